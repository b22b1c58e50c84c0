"""Pages that have several addresses. All methods need the allocator's lock, and call no device.

A *page* is one piece of a device's memory, of the pool's page size. It is mapped into a *slot* of a range, and perhaps
into slots of other ranges and into *views*: a view is a row of pages that lie apart, stitched for one large request and
kept afterwards. A page is used through one of its addresses at a time. At the others its slot is a chunk that is
MAPPED_ELSEWHERE, which is in no bin and merges with nothing, so an allocation and a free know nothing of it.

A view does not follow its pages when they are moved. It names the slots that it was stitched from, the homes of its
pages, and can be used when all of these lie in free chunks. The bitmaps of the ranges tell which slots do.
"""

cimport cython
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.native.nothrow cimport try_push_back, try_store
from bfc._core cimport (
    FREE, IN_USE, LEAVING, MAPPED_ELSEWHERE, NO_CHUNK, NO_HOST_MEMORY, NO_PAGE, NO_STREAM, OPTIONS, PAGED, SMALL, STATE,
    WAITING, BinSet, Chunk, ChunkHandle, FreeChunk, Lane, PageBitmap, PlanPages, PlanServer, Pool, PoolPages, Region,
    carve, has_records,
)
from bfc.allocators._places cimport list_places, plan_in, set_of_region
from bfc.allocators._changes cimport make_free

cdef extern from "bins.hpp":
    pass
cdef extern from "owners.hpp":
    pass
cdef extern from "starts.hpp":
    pass
cdef extern from "usage.hpp":
    pass
cdef extern from "page_bitmap.hpp":
    pass
cdef extern from "plan_server.hpp":
    pass

cdef extern from * nogil:
    """
    #include <new>
    #include "page_bitmap.hpp"
    static inline bfc::PageBitmap* bfc_new_bitmap(uint64_t start, uint64_t page_size) noexcept {
        return new (std::nothrow) bfc::PageBitmap(start, __builtin_ctzll(page_size));
    }
    """
    uint32_t lowest_bit "__builtin_ctzll"(uint64_t bits) noexcept
    PageBitmap* new_bitmap "bfc_new_bitmap"(uint64_t start, uint64_t page_size) noexcept


@cython.final
@cython.no_gc
cdef class Pages(PoolPages):
    """The pages of a pool, and the views stitched from them."""

    cdef void watch(self, Pool pool, uint64_t page_size) noexcept:
        """Takes a pool that has no memory yet. The two hold each other until `leave`."""
        self.pool = pool
        self.page_size = page_size
        pool.pages = self
        pool.features |= PAGED

    cdef void leave(self) noexcept:
        """Lets go of the pool: its allocator is gone."""
        if self.pool is not None:
            self.pool.pages = None
            self.pool = None

    cdef cbool open_bitmap(self, uint32_t bin_set, uint64_t start) noexcept nogil:
        self.pool.bin_sets[bin_set].bitmap = new_bitmap(start, self.page_size)
        return self.pool.bin_sets[bin_set].bitmap != NULL

    cdef void close_bitmap(self, uint32_t bin_set) noexcept nogil:
        del self.pool.bin_sets[bin_set].bitmap
        self.pool.bin_sets[bin_set].bitmap = NULL

    cdef PageBitmap* bitmap_of(self, uint32_t bin_set) noexcept nogil:
        """The bitmap of a range, up to date; what reads which slots are free asks for it here. NULL: it has none."""
        cdef BinSet* owner = &self.pool.bin_sets[bin_set]
        if owner.bitmap == NULL or owner.is_plan:
            return owner.bitmap
        if owner.kind == SMALL:
            self.note_large_chunks(owner)
        elif self.pool.changed.any:
            self.note_changes()
        return owner.bitmap

    cdef void note_changes(self) noexcept nogil:
        """Brings the bitmaps of large chunks up to date with what was handed out and freed since the last time.

        The chunks are noted as they are now, which is enough. A slot that is not free any more holds a part of a chunk
        that was handed out meanwhile, and one that has become free lies in a chunk that grew by a free meanwhile.
        """
        cdef size_t word, words = (self.pool.chunk_count + 63) // 64
        cdef uint64_t bits
        self.pool.changed.any = False
        for word in range(words):
            bits = self.pool.changed.bits[word]
            if bits:
                self.pool.changed.bits[word] = 0
            while bits:
                self.note_change_of(<ChunkHandle>(64 * word) + lowest_bit(bits))
                bits &= bits - 1

    cdef inline void note_change_of(self, ChunkHandle handle) noexcept nogil:
        cdef Chunk* chunk = &self.pool.chunks[handle]
        cdef BinSet* owner = &self.pool.bin_sets[chunk.bin_set]
        if owner.bitmap == NULL or owner.is_plan:
            return
        if chunk.state == FREE:
            owner.bitmap.add(chunk.ptr, chunk.size, handle)
        elif chunk.state & STATE == IN_USE or chunk.state & STATE == WAITING:
            owner.bitmap.take(chunk.ptr, chunk.size)

    cdef void note_large_chunks(self, BinSet* owner) noexcept nogil:
        """Writes the bitmap of a range of small chunks anew. Few of its free chunks have the size of a page, since a
        page that is free goes back."""
        cdef FreeChunk found
        cdef cbool some = owner.bins.lower_bound(self.page_size, 0, found)
        owner.bitmap.clear()
        while some:
            owner.bitmap.add(self.pool.chunks[found.handle].ptr, found.size, found.handle)
            some = owner.bins.lower_bound(found.size, found.order + 1, found)

    cdef uint64_t pages_for(self, uint64_t nbytes) noexcept nogil:
        return nbytes // self.page_size + (nbytes % self.page_size != 0)

    cdef uint64_t count_free(self, uint32_t bin_set) noexcept nogil:
        """How many pages lie whole in free chunks of a range."""
        cdef PageBitmap* bitmap = self.bitmap_of(bin_set)
        return bitmap.count_free() if bitmap != NULL else 0

    cdef ChunkHandle find_elsewhere(self, uint32_t bin_set, uint64_t rounded, uint64_t requested, uint64_t stream,
                                    cbool indexed) noexcept nogil:
        """Serves a request that no chunk fits, if that needs no device call: from a page that the range had before, or
        from a kept view. Or NO_CHUNK."""
        cdef BinSet* owner = &self.pool.bin_sets[bin_set]
        if owner.bitmap == NULL:
            return NO_CHUNK
        if owner.kind == SMALL:
            if not self.move_again(bin_set):
                return NO_CHUNK
            return self.pool.allocate_chunk(bin_set, rounded, requested, stream, 0, indexed)
        if owner.ranges == 0:
            return NO_CHUNK
        return self.use_kept_view(owner.ranges, self.pages_for(rounded), requested, stream, indexed)

    # -- pages --------------------------------------------------------------------------------------------------------

    cdef uint32_t enter_page(self, uint32_t bin_set, uint32_t slot) noexcept nogil:
        """The number of a page that is mapped into its first slot. NO_PAGE: the host is out of memory."""
        cdef PageRecord record
        cdef uint32_t page = 0
        if self.count < self.records.size():
            while self.records[self.all_known_below].is_known:
                self.all_known_below += 1
            page = self.all_known_below
        elif try_push_back(self.records, record):
            page = <uint32_t>(self.records.size() - 1)
        else:
            return NO_PAGE
        if not self.records[page].try_add(Slot(bin_set, slot)):
            return NO_PAGE
        self.records[page].is_known = True
        self.records[page].active = self.records[page].primary = 0
        self.pool.bin_sets[bin_set].bitmap.set_page(slot, page)
        self.count += 1
        return page

    cdef void forget_page(self, uint32_t page) noexcept nogil:
        """Takes a page that is in no view out of its slot, if it has one, and out of the books."""
        cdef PageRecord* record = &self.records[page]   # a loop over records[page].slots would copy them
        cdef Slot slot
        for slot in record.slots:
            self.pool.bin_sets[slot.set].bitmap.set_page(slot.number, NO_PAGE)
        self.records[page] = PageRecord()
        self.count -= 1
        self.all_known_below = min(self.all_known_below, page)

    cdef cbool move_back(self, ChunkHandle handle, uint64_t ptr, uint64_t size) noexcept nogil:
        """Moves the pages that a free in a range of small chunks has made wholly free back to their primary slots. What
        is free where then depends only on what is live, so that a program that repeats itself finds its earlier views
        usable. Returns whether there was such a page."""
        cdef Chunk* chunk = &self.pool.chunks[handle]
        cdef uint32_t small = chunk.bin_set, page
        cdef PageBitmap* bitmap = self.pool.bin_sets[small].bitmap
        cdef size_t slot = max(bitmap.slot_at(ptr), bitmap.slot_at(chunk.ptr + self.page_size - 1))
        cdef size_t end = min(bitmap.slot_at(ptr + size - 1) + 1, bitmap.slot_at(chunk.ptr + chunk.size))
        cdef PageRecord* record
        cdef cbool some = False
        while slot < end:
            page = bitmap.page_at(slot)
            record = &self.records[page]
            if record.slots[record.primary].set != small:
                some = self.move(page, record.primary) or some
            slot += 1
        return some

    cdef cbool move_again(self, uint32_t small) noexcept nogil:
        """Gives the range of small chunks a free page that it has had before. Returns whether there was one."""
        cdef PageBitmap* bitmap = self.pool.bin_sets[small].bitmap
        cdef size_t slot
        cdef uint32_t page
        if bitmap == NULL:
            return False
        slot = self.next_lent(small, small + 1, 0)
        if slot == bitmap.slots():
            return False
        page = bitmap.page_at(slot)
        return self.move(page, self.records[page].in_set(small))

    cdef size_t next_lent(self, uint32_t bin_set, uint32_t user, size_t slot) noexcept nogil:
        """The first slot of a range, from this one on, whose page is used in the range of `user` and free there. The
        number of slots: there is none."""
        cdef PageBitmap* bitmap = self.pool.bin_sets[bin_set].bitmap
        cdef PageBitmap* used = self.bitmap_of(user)
        cdef PageRecord* record
        cdef Slot active
        while slot < bitmap.slots():
            if bitmap.page_at(slot) != NO_PAGE:
                record = &self.records[bitmap.page_at(slot)]
                active = record.slots[record.active]
                if active.set == user and used.is_free(active.number):
                    break
            slot += 1
        return slot

    cdef cbool move(self, uint32_t page, uint32_t to) noexcept nogil:
        """Lets a free page be used through another of its slots from now on. False: the host is out of memory."""
        cdef PageRecord* record = &self.records[page]
        cdef Run there = Run(record.slots[to].set, record.slots[to].number, 1)
        cdef Run here = Run(record.slots[record.active].set, record.slots[record.active].number, 1)
        if not self.take_run(&here, MAPPED_ELSEWHERE):
            return False
        if not self.free_run(&there):
            self.free_run(&here)
            return False
        record.active = to
        self.count_moved(here.set, there.set)
        return True

    cdef void count_moved(self, uint32_t here, uint32_t there) noexcept nogil:
        """Counts a page as reserved in the set that it is now used in."""
        cdef BinSet* owner = &self.pool.bin_sets[here]
        cdef BinSet* other = &self.pool.bin_sets[there]
        owner.mapped_bytes -= self.page_size
        other.mapped_bytes += self.page_size
        if self.pool.books.usage != NULL and not owner.asleep and owner.kind != other.kind:
            self.pool.books.usage.memory_moved(owner.kind, other.kind, self.page_size)

    # -- holding ------------------------------------------------------------------------------------------------------

    cdef uint64_t hold(self, uint32_t bin_set, uint64_t wanted, uint32_t longest, vector[Run]& runs) noexcept nogil:
        """Takes free pages of a range, from the largest free chunk down, so that nobody else does while the device is
        called: they are LEAVING. Adds them to `runs`, each of at most `longest` pages, and returns how many they are.
        """
        cdef BinSet* owner = &self.pool.bin_sets[bin_set]
        cdef uint64_t held = 0, more = 1
        cdef FreeChunk found
        if owner.bitmap == NULL:
            return 0
        while held < wanted and more and owner.bins.lower_bound(owner.bins.largest(), 0, found):
            more = self.hold_part(bin_set, found.handle, wanted - held, longest, runs)
            held += more
        if held < wanted and owner.bins.largest() >= self.page_size:
            held += self.hold_from_list(bin_set, wanted - held, longest, runs)  # the largest may contain no whole page
        return held

    cdef uint64_t hold_from_list(self, uint32_t bin_set, uint64_t wanted, uint32_t longest,
                                 vector[Run]& runs) noexcept nogil:
        cdef vector[ChunkHandle] chunks
        cdef uint64_t held = 0
        if not self.pool.list_free(bin_set, chunks):
            return 0
        while held < wanted and chunks.size() and self.pool.chunks[chunks.back()].size >= self.page_size:
            held += self.hold_part(bin_set, chunks.back(), wanted - held, longest, runs)
            chunks.pop_back()
        return held

    cdef uint64_t hold_part(self, uint32_t bin_set, ChunkHandle handle, uint64_t wanted, uint32_t longest,
                            vector[Run]& runs) noexcept nogil:
        """As `hold`, but takes the first whole pages of one free chunk. Returns 0 if it has none."""
        cdef PageBitmap* bitmap = self.pool.bin_sets[bin_set].bitmap
        cdef uint64_t ptr = self.pool.chunks[handle].ptr, end = ptr + self.pool.chunks[handle].size, held = 0
        cdef uint64_t slot = bitmap.slot_at(ptr + self.page_size - 1), last = bitmap.slot_at(end)
        cdef Run run
        while slot < last and held < wanted:
            run = Run(bin_set, <uint32_t>slot, <uint32_t>min(min(last - slot, wanted - held), <uint64_t>longest))
            if not self.hold_run(&run, runs):
                break
            held += run.count
            slot += run.count
        return held

    cdef uint64_t hold_again(self, uint32_t bin_set, uint32_t user, uint64_t wanted,
                             vector[Run]& runs) noexcept nogil:
        """As `hold`, but takes from the range of `user`, one by one, pages that the range of `bin_set` has had before:
        they are mapped there. It takes them in the order of their slots there, so that a program that repeats itself
        moves the same pages each time, and finds its earlier views usable when they are back."""
        cdef PageBitmap* bitmap = self.pool.bin_sets[bin_set].bitmap
        cdef PageRecord* record
        cdef uint64_t held = 0
        cdef size_t slot = 0
        cdef Run run
        while held < wanted:
            slot = self.next_lent(bin_set, user, slot)
            if slot == bitmap.slots():
                break
            record = &self.records[bitmap.page_at(slot)]
            run = Run(user, record.slots[record.active].number, 1)
            if not self.hold_run(&run, runs):
                break
            held += 1
        return held

    cdef uint64_t hold_highest(self, uint32_t bin_set, uint64_t wanted, vector[Run]& runs) noexcept nogil:
        """As `hold`, but takes the pages at the end of a range, one by one: they were made last, when most was live,
        and are needed least at other times."""
        cdef PageBitmap* bitmap = self.bitmap_of(bin_set)
        cdef size_t slot = bitmap.slots()
        cdef uint64_t held = 0
        cdef Run run
        while slot > 0 and held < wanted:
            slot -= 1
            if bitmap.is_free(slot):
                run = Run(bin_set, <uint32_t>slot, 1)
                if not self.hold_run(&run, runs):
                    break
                held += 1
        return held

    cdef uint64_t hold_unshared(self, uint32_t bin_set, uint64_t wanted, cbool in_ranges_too,
                                vector[Run]& runs) noexcept nogil:
        """As `hold`, but takes only pages that no view has and, unless `in_ranges_too`, no other range."""
        cdef vector[ChunkHandle] chunks
        cdef PageBitmap* bitmap = self.pool.bin_sets[bin_set].bitmap
        cdef uint64_t held = 0, slot, end
        cdef Run run
        if bitmap == NULL or not self.pool.list_free(bin_set, chunks):
            return 0
        while held < wanted and chunks.size():
            slot = bitmap.slot_at(self.pool.chunks[chunks.back()].ptr + self.page_size - 1)
            end = bitmap.slot_at(self.pool.chunks[chunks.back()].ptr + self.pool.chunks[chunks.back()].size)
            chunks.pop_back()
            while slot < end and held < wanted:
                run = Run(bin_set, <uint32_t>slot, 0)
                while (slot < end and held + run.count < wanted
                       and self.is_unshared(bitmap.page_at(slot), in_ranges_too)):
                    slot += 1
                    run.count += 1
                slot += 1
                if run.count == 0:
                    continue
                if not self.hold_run(&run, runs):
                    return held
                held += run.count
        return held

    cdef cbool hold_run(self, Run* run, vector[Run]& runs) noexcept nogil:
        """Makes the pages of a run LEAVING, and appends it. False: the host is out of memory, and nothing has changed.
        """
        if not try_push_back(runs, run[0]):
            return False
        if self.take_run(run, LEAVING):
            return True
        runs.pop_back()
        return False

    cdef cbool is_unshared(self, uint32_t page, cbool in_ranges_too) noexcept nogil:
        return self.records[page].views == 0 and (in_ranges_too or self.records[page].slots.size() == 1)

    # -- pages of a plan ----------------------------------------------------------------------------------------------

    # A plan's region is a range like others, but what is idle in it is in no bin and in no bitmap: the plan knows it.

    cdef PlanServer* plan_for(self, uint32_t bin_set) noexcept nogil:
        """The plan whose pages a lane may have, or NULL."""
        cdef Lane* lane = &self.pool.bin_sets[bin_set].lane
        cdef PlanServer* plan = self.pool.plans.current
        if plan == NULL or not plan.has_pages() or self.pool.plans.rest or lane.pool[0] or lane.pool[1]:
            return NULL
        return plan

    cdef uint32_t stream_in_plan(self, uint32_t bin_set) noexcept nogil:
        """The plan's stream that a lane is of. NO_STREAM: it is of none, or may have none of the plan's pages."""
        cdef PlanServer* plan = self.plan_for(bin_set)
        if plan == NULL or self.pool.bin_sets[bin_set].lane.thread:
            return NO_STREAM
        return plan.stream_of(self.pool.bin_sets[bin_set].lane.stream)

    cdef uint64_t count_lendable(self, uint32_t bin_set) noexcept nogil:
        """How many pages a plan can lend to a lane of the same stream."""
        cdef uint32_t stream = self.stream_in_plan(bin_set)
        return self.pool.plans.current.count_lendable(stream) if stream != NO_STREAM else 0

    cdef uint64_t count_of_others(self, uint32_t bin_set) noexcept nogil:
        """How many pages a plan can lend to a lane of other streams than that."""
        cdef PlanServer* plan = self.plan_for(bin_set)
        cdef uint32_t own = self.stream_in_plan(bin_set), stream
        cdef uint64_t count = 0
        if plan != NULL:
            for stream in range(<uint32_t>plan.streams()):
                if stream != own and plan.is_bound(stream):
                    count += plan.count_lendable(stream)
        return count

    cdef uint64_t count_shared(self) noexcept nogil:
        """How many pages the streams of the plan in use have, in its regions and beside them."""
        cdef uint64_t nbytes = 0
        cdef uint32_t bin_set
        cdef int region
        for bin_set in range(<uint32_t>self.pool.bin_sets.size()):
            if self.stream_in_plan(bin_set) != NO_STREAM:
                nbytes += self.pool.bin_sets[bin_set].mapped_bytes
        for region in range(2):
            nbytes += self.pool.bin_sets[set_of_region(self.pool, self.pool.plans.current, region)].mapped_bytes
        return nbytes // self.page_size

    cdef uint64_t most_shared(self) noexcept nogil:
        """How many pages the plan in use needs: where streams have areas of their own, which are not full at the same
        time, as many as were live at once, and as many as they went on taking of each other."""
        cdef PlanServer* plan = self.pool.plans.current
        cdef uint64_t needed = plan.pages(0) + plan.pages(1)
        if plan.streams() > 1:
            return min(needed, self.pages_for(plan.peak)) + self.pages_for(plan.apart)
        return needed

    cdef uint64_t count_idle(self) noexcept nogil:
        """How many pages of plans no block has a byte of. 0 where the host has no memory to count them."""
        cdef uint64_t idle = 0
        cdef vector[uint32_t] blocks
        cdef vector[uint32_t] used
        cdef PlanServer* plan
        cdef Chunk* chunk
        cdef uint32_t block, page
        cdef int region
        for plan in self.pool.plans.all:
            for region in range(2):
                blocks.clear()
                used.clear()
                if plan.pages(region) == 0 or not plan.present[region]:
                    continue
                if not list_places(self.pool, plan, region, blocks):
                    return 0
                for page in range(plan.pages(region)):
                    if not try_push_back(used, <uint32_t>plan.is_away(region, page)):
                        return 0
                for block in blocks:
                    chunk = &self.pool.chunks[block]
                    for page in range(<uint32_t>((chunk.ptr - plan.address[region]) // self.page_size),
                                      <uint32_t>((chunk.ptr + chunk.size - 1 - plan.address[region])
                                                 // self.page_size) + 1):
                        used[page] = 1
                for page in used:
                    idle += page == 0
        return idle

    cdef uint64_t hold_from_plan(self, uint32_t stream, uint64_t wanted, uint32_t longest, cbool for_long,
                                 vector[Run]& runs) noexcept nogil:
        """As `hold`, but takes pages of a stream of the plan in use, or (NO_STREAM) none: those that it needs last."""
        cdef vector[PlanPages] rows
        cdef PlanPages row
        cdef Run run
        cdef uint64_t held = 0
        if stream == NO_STREAM or self.pool.plans.current.choose(stream, wanted, for_long, rows) == 0:
            return 0
        for row in rows:
            while row.count:
                run = Run(set_of_region(self.pool, self.pool.plans.current, row.region), row.first, min(row.count,
                                                                                                        longest))
                if not self.hold_run(&run, runs):
                    return held
                held += run.count
                row.first += run.count
                row.count -= run.count
        return held

    cdef void let_known_go(self, uint32_t bin_set, vector[Run]& runs) noexcept nogil:
        """Of single pages that are held, lets those go that are mapped into this range already."""
        cdef size_t i, kept = 0, count = runs.size()
        for i in range(count):
            if (self.records[self.pool.bin_sets[runs[i].set].bitmap.page_at(runs[i].first)].in_set(bin_set) == NO_SLOT
                    or not self.free_run(&runs[i])):
                runs[kept] = runs[i]
                kept += 1
        while runs.size() > kept:
            runs.pop_back()

    cdef cbool is_in_views(self, uint32_t bin_set) noexcept nogil:
        """Whether a view relies on slots of this range."""
        cdef uint32_t number
        cdef size_t i
        cdef StitchedView* view
        for number in range(self.views.count()):
            view = &self.views.at(number)
            if view.state == KEPT or view.state == LIVE:
                for i in range(view.runs.size()):
                    if view.runs[i].set == bin_set:
                        return True
        return False

    cdef cbool has_moved(self, uint32_t bin_set, size_t slot) noexcept nogil:
        """Whether the page in a slot is used through a slot of another range now."""
        cdef uint32_t page = self.pool.bin_sets[bin_set].bitmap.page_at(slot)
        return page != NO_PAGE and self.records[page].slots[self.records[page].active].set != bin_set

    cdef cbool is_idle(self, Run* run) noexcept nogil:
        """Whether nothing lives in these slots, and their pages are used through them."""
        cdef int region = 0
        cdef PlanServer* plan
        if not self.pool.bin_sets[run.set].is_plan:
            return self.bitmap_of(run.set).are_free(run.first, run.count)
        plan = plan_in(self.pool, run.set, &region)
        return plan.are_idle(region, run.first, run.count)

    cdef void let_go(self, vector[Run]& runs) noexcept nogil:
        """Makes what was held free again. What the host has no memory for stays held."""
        while runs.size() and self.free_run(&runs.back()):
            runs.pop_back()

    cdef ChunkHandle chunk_of(self, Run* run) noexcept nogil:
        return self.pool.bin_sets[run.set].bitmap.chunk_at(run.first)

    cdef cbool take_run(self, Run* run, uint32_t state) noexcept nogil:
        """Carves free slots out of their chunk. False: the host is out of memory, and nothing has changed."""
        cdef PageBitmap* bitmap = self.bitmap_of(run.set)
        cdef int region = 0
        cdef ChunkHandle handle, rest
        cdef PlanServer* plan = NULL
        if self.pool.bin_sets[run.set].is_plan:
            plan = plan_in(self.pool, run.set, &region)
            handle = bitmap.chunk_at(plan.row_begin(region, run.first))
        else:
            handle = bitmap.chunk_around(run.first)
        handle = carve(self.pool, handle, bitmap.address_of(run.first), bitmap.address_of(run.first + run.count), state)
        if handle == NO_HOST_MEMORY:
            return False
        bitmap.note_chunk(run.first, handle)
        if plan != NULL:
            # The plan must not use these pages, and finds what lies behind them by its first slot.
            plan.send_away(region, run.first, run.count)
            rest = self.pool.chunks[handle].next
            if rest != NO_CHUNK:
                bitmap.note_chunk(bitmap.slot_at(self.pool.chunks[rest].ptr), rest)
        return True

    cdef cbool free_run(self, Run* run) noexcept nogil:
        """Makes slots that were carved out free. False: the host is out of memory, and nothing has changed."""
        cdef BinSet* owner = &self.pool.bin_sets[run.set]
        if not owner.bins.reserve():
            return False
        make_free(self.pool, owner, self.chunk_of(run))
        return True

    # -- views --------------------------------------------------------------------------------------------------------

    cdef ChunkHandle use_kept_view(self, uint32_t bin_set, uint64_t pages, uint64_t requested, uint64_t stream,
                                   cbool indexed) noexcept nogil:
        """Hands out a kept view of exactly so many pages, or NO_CHUNK. Of several it takes the one that was made first,
        so that a program that repeats itself gets the same ones each time."""
        cdef vector[uint32_t]* same = self.views.of_size(bin_set, <uint32_t>pages)
        cdef StitchedView* best = NULL
        cdef StitchedView* view
        cdef uint32_t number
        if same == NULL:
            return NO_CHUNK
        for number in same[0]:
            view = &self.views.at(number)
            if view.state == KEPT and (best == NULL or view.made_at < best.made_at) and self.is_usable(view):
                best = view
        if best == NULL:
            return NO_CHUNK
        if (indexed and not self.pool.starts.reserve()) or not self.take_view(best):
            return NO_HOST_MEMORY
        return self.hand_out(best, requested, stream, indexed)

    cdef inline ChunkHandle hand_out(self, StitchedView* view, uint64_t requested, uint64_t stream,
                                     cbool indexed) noexcept nogil:
        """Hands out a view whose pages are absent everywhere else."""
        self.uses += 1
        view.last_used = self.uses
        view.state = LIVE
        return self.pool.hand_out(&self.pool.counters, &self.pool.bin_sets[view.set], view.chunk,
                                  self.pool.chunks[view.chunk].size, requested, stream, indexed,
                                  self.pool.features | OPTIONS)

    cdef ChunkHandle hand_out_new(self, uint32_t number, uint64_t requested, uint64_t stream,
                                  cbool indexed) noexcept nogil:
        """Enters a view that was mapped just now, and hands it out: its pages are held no more. NO_CHUNK: the host is
        out of memory, and nothing has changed."""
        cdef StitchedView* view = &self.views.at(number)
        cdef Run run
        # Room for its address first: a view that is entered must be handed out.
        if (indexed and not self.pool.starts.reserve()) or not self.add_view(number):
            return NO_CHUNK
        for run in view.runs:
            self.pool.chunks[self.chunk_of(&run)].state = MAPPED_ELSEWHERE
        return self.hand_out(view, requested, stream, indexed)

    cdef cbool is_usable(self, StitchedView* view) noexcept nogil:
        cdef Run run
        for run in view.runs:
            if not self.is_idle(&run):
                return False
        return True

    cdef cbool take_view(self, StitchedView* view) noexcept nogil:
        """Makes the homes of a view's pages absent. False: the host is out of memory, and nothing has changed."""
        cdef size_t taken = 0
        while taken < view.runs.size() and self.take_run(&view.runs[taken], MAPPED_ELSEWHERE):
            taken += 1
        if taken == view.runs.size():
            return True
        while taken:
            taken -= 1
            self.free_run(&view.runs[taken])    # cannot fail: the host memory for it was in use just now
        return False

    cdef cbool add_view(self, uint32_t number) noexcept nogil:
        """Keeps a view that is mapped. Its pages are held. False: the host is out of memory, and nothing has changed.
        """
        cdef StitchedView* view = &self.views.at(number)
        cdef BinSet* owner = &self.pool.bin_sets[view.set]
        cdef Region region = Region(view.address, view.address + view.pages * self.page_size, NO_CHUNK, 0)
        if not has_records(self.pool, 1) or not try_store(self.pool.regions, region.end, region):
            return False
        view.chunk = self.pool.take_slot()
        if not self.views.enter(number):
            self.pool.delete_chunk(view.chunk)
            self.pool.regions.erase(region.end)
            return False
        self.pool.regions[region.end].first = view.chunk
        self.pool.fill_in(view.chunk, region.ptr, region.end - region.ptr, view.set, MAPPED_ELSEWHERE)
        owner.regions += 1
        self.uses += 1
        view.made_at = view.last_used = self.uses
        view.state = KEPT
        self.count_mappings(view, 1)
        return True

    cdef void count_mappings(self, StitchedView* view, int change) noexcept nogil:
        cdef Run run
        cdef size_t i
        for run in view.runs:
            for i in range(run.count):
                self.records[self.pool.bin_sets[run.set].bitmap.page_at(run.first + i)].views += change

    cdef cbool free_view(self, ChunkHandle handle) noexcept nogil:
        """Gives the pages of a view back to their homes. False: the host is out of memory, and nothing has changed."""
        cdef StitchedView* view = &self.views.at(self.views.of_chunk(handle))
        cdef Chunk* chunk = &self.pool.chunks[handle]
        cdef size_t freed = 0
        while freed < view.runs.size() and self.free_run(&view.runs[freed]):
            freed += 1
        if freed < view.runs.size():
            while freed:
                freed -= 1
                self.take_run(&view.runs[freed], MAPPED_ELSEWHERE)    # cannot fail, as in take_view
            return False
        chunk = &self.pool.chunks[handle]
        self.pool.books.owned.take_back(chunk)
        self.pool.unindex_chunk(handle)
        if chunk.state & STATE == WAITING:
            self.pool.counters.bytes_waiting -= chunk.size
        if self.pool.books.usage != NULL:
            self.pool.count_removed(&self.pool.bin_sets[chunk.bin_set], chunk, False)
        else:
            self.pool.counters.bytes_in_use -= chunk.size
        if self.pool.books.history != NULL:
            self.pool.note_free(chunk)
        chunk.allocation_id = -1
        chunk.state = MAPPED_ELSEWHERE
        view.state = KEPT
        return True

    cdef cbool is_kept(self, uint32_t number) noexcept nogil:
        """Whether a view is mapped, and nothing lives in it."""
        return self.views.at(number).state == KEPT and not self.pool.bin_sets[self.views.at(number).set].asleep

    cdef uint32_t oldest_kept_view(self) noexcept nogil:
        """The kept view that was used longest ago, or NO_VIEW."""
        cdef uint32_t oldest = NO_VIEW, number
        for number in range(self.views.count()):
            if self.is_kept(number) and (
                    oldest == NO_VIEW or self.views.at(number).last_used < self.views.at(oldest).last_used):
                oldest = number
        return oldest

    cdef void retire_view(self, uint32_t number) noexcept nogil:
        """Takes a kept view out of the pool, and forgets it. It stays mapped."""
        cdef StitchedView* view = &self.views.at(number)
        cdef BinSet* owner = &self.pool.bin_sets[view.set]
        self.pool.regions.erase(view.address + view.pages * self.page_size)
        self.pool.delete_chunk(view.chunk)
        owner.regions -= 1
        self.views.retire(number)
        self.views.forget(number)

    cdef void forget_view(self, uint32_t number) noexcept nogil:
        """Forgets a view that is not mapped any more."""
        self.count_mappings(&self.views.at(number), -1)
        self.views.forget(number)
