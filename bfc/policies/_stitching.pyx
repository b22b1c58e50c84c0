"""Stitching: where no free chunk is large enough, free pages that lie apart get a row of addresses of their own.

A large request that no chunk fits takes pages of its stream that are free, and more of the device where they are too
few: it is served at the end of the range if that needs no more of them, or else through a *view* (_pages.pyx). At the
limit it takes free pages of other streams, and waits for what these have queued.
"""

cimport cython
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport ABSENT, FREE, LARGE, NO_CHUNK, NO_LANE, UNMAPPED, ChunkHandle, Window
from bfc.allocators._extending cimport bytes_behind
from bfc.allocators._ranges cimport cancel_mapping, cut_absent, join_absent
from bfc.allocators._pages cimport NO_SLOT, NO_VIEW, PageRecord, Run, Slot, View
from bfc.allocators._lock cimport acquire_lock
from bfc.policies._mapper cimport Faults, call_reserve
from bfc.policies._page_mapper cimport Retired

from bfc.errors import SubAllocatorError, out_of_host_memory

cdef extern from "window.hpp":
    pass

cdef extern from "nothrow.hpp" namespace "bfc" nogil:
    cbool try_push_run "bfc::try_push_back"(vector[Run]& items, const Run& item) noexcept

cdef enum:
    ANY_LENGTH = 0xFFFFFFFF             # of a run


@cython.no_gc_clear
cdef class Stitching(PageMapper):
    """What is done for a request that no free chunk fits."""

    cdef bint provide(self, uint32_t bin_set, Wanted* wanted) except -1:
        """Brings memory for a request nearer, by one step, and may serve it. False: there is no step that would."""
        cdef Stretch stretch = self.stretch_of(bin_set)
        self.sweep(None, False, False)
        if self.has_failed():
            self.try_again()
        if stretch is None:
            stretch = self.reserve(bin_set)
        if stretch.bin_set & 1 == LARGE:
            return self.provide_large(stretch, wanted)
        return self.provide_small(stretch)

    cdef bint has_failed(self) noexcept:
        """Whether the sub-allocator failed to unmap or to release something that is to be tried again."""
        cdef Stretch stretch
        cdef Retired retired
        for stretch in self.stretches:
            if stretch.some_stuck and not self.is_set_asleep(stretch.bin_set):
                return True
        for retired in self.retired:
            if retired.is_stuck:
                return True
        return self.unreleased is not None

    cdef int try_again(self) except -1:
        """Unmaps and releases what the sub-allocator failed to take back before."""
        cdef Faults faults = Faults()
        cdef Stretch stretch
        cdef dict idle = {}
        self.try_unreleased_again(faults)
        self.sweep(faults, False, True)
        for stretch in self.stretches:
            if not stretch.is_known or not stretch.some_stuck or self.is_set_asleep(stretch.bin_set):
                continue
            if self.is_idle(stretch.asked_of, False, idle, faults):
                self.unmap_stuck(stretch, faults)
        if faults.interrupt is not None:
            raise faults.interrupt
        return 0

    cdef bint provide_small(self, Stretch stretch) except -1:
        """One page: a free one of the stream's large chunks, a new one, or one of another stream."""
        if self.adopt(stretch, 1, False):
            return True
        if self.room() and self.grow(stretch, 1, NO_CHUNK):
            return True
        return self.adopt(stretch, 1, True) > 0 or self.trim_strangers(stretch, 1)

    cdef bint provide_large(self, Stretch stretch, Wanted* wanted) except -1:
        cdef uint64_t pages = self.pages.pages_for(wanted.rounded), room = self.room(), others, own, missing
        cdef uint64_t missing_at_end = self.missing_at_end(stretch, wanted.rounded)
        acquire_lock(self.lock[0])
        own = self.pages.count_free(stretch.bin_set) + self.pages.count_free(stretch.bin_set - 1)
        self.lock.release()
        missing = pages - own if own < pages else 0
        if missing_at_end <= room and (missing_at_end <= missing
                                       or self.is_within_headroom(missing_at_end, wanted.rounded)):
            return self.grow(stretch, missing_at_end, NO_CHUNK) > 0
        if missing == 0:
            return self.stitch(stretch, pages, wanted)
        others = self.free_of_others(stretch) if missing > room else 0
        if missing > room + others:
            return self.trim_strangers(stretch, missing - room - others)
        if room and self.grow(stretch, min(missing, room), NO_CHUNK):
            return True
        return self.adopt(stretch, missing, True) > 0

    cdef bint grow_behind(self, uint64_t address, uint64_t rounded) except -1:
        """Makes pages for a chunk that is to be as large as `rounded`, and maps them behind it. Whether it has them."""
        cdef ChunkHandle handle, behind = NO_CHUNK
        cdef uint32_t bin_set = 0
        cdef uint64_t missing = 0
        acquire_lock(self.lock[0])
        handle = self.pool.handle_of(address)
        if handle != NO_CHUNK and self.is_set_asleep(self.pool.chunks[handle].bin_set):
            handle = NO_CHUNK
        if handle != NO_CHUNK:
            bin_set = self.pool.chunks[handle].bin_set
            behind = self.pool.chunks[handle].next
            missing = rounded - self.pool.chunks[handle].size - bytes_behind(self.pool, handle)
            if bytes_behind(self.pool, handle):
                behind = self.pool.chunks[behind].next
        if behind != NO_CHUNK and (self.pool.chunks[behind].state != UNMAPPED
                                   or self.pool.chunks[behind].size < missing):
            behind = NO_CHUNK
        self.lock.release()
        missing = self.pages.pages_for(missing)
        if behind == NO_CHUNK or missing > self.room():
            return False
        return self.grow(self.stretch_of(bin_set), missing, behind) == missing

    cdef uint64_t missing_at_end(self, Stretch stretch, uint64_t rounded) noexcept:
        """The pages that a chunk for the request would need at the end of a range, beside what is free there."""
        cdef uint64_t size = 0, missing
        cdef ChunkHandle last
        acquire_lock(self.lock[0])
        if stretch.tail == NO_CHUNK:
            missing = ~<uint64_t>0
        else:
            last = self.pool.chunks[stretch.tail].prev
            if last != NO_CHUNK and self.pool.chunks[last].state == FREE:
                size = self.pool.chunks[last].size
            missing = self.pages.pages_for(rounded - size) if rounded > size else 1
            if missing * self.page_size > self.pool.chunks[stretch.tail].size:
                missing = ~<uint64_t>0
        self.lock.release()
        return missing

    cdef uint64_t room(self) noexcept:
        """How many pages may still be made."""
        acquire_lock(self.lock[0])
        cdef uint64_t taken = self.source.taken()
        self.lock.release()
        return 0 if self.is_refused or taken >= self.limit else (self.limit - taken) // self.page_size

    cdef uint64_t free_of_others(self, Stretch stretch) noexcept:
        cdef Stretch other
        cdef uint64_t count = 0
        acquire_lock(self.lock[0])
        for other in self.stretches:
            if self.is_kin(other, stretch):
                count += self.pages.count_free(other.bin_set)
        self.lock.release()
        return count

    cdef bint is_kin(self, Stretch other, Stretch stretch) noexcept:
        """Whether a range belongs to another stream and to the same tag: what sleeps shares no page with what is awake.
        Needs the lock."""
        cdef uint64_t* theirs = self.pool.bin_sets[other.bin_set].lane.pool
        cdef uint64_t* ours = self.pool.bin_sets[stretch.bin_set].lane.pool
        return (other.is_known and other.bin_set | 1 != stretch.bin_set | 1
                and theirs[0] == ours[0] and theirs[1] == ours[1])

    cdef bint is_stranger(self, Stretch other, Stretch stretch) noexcept:
        """Whether a range belongs to another tag, and is awake. Needs the lock."""
        return (other.is_known and other.bin_set | 1 != stretch.bin_set | 1 and not self.is_kin(other, stretch)
                and not self.is_set_asleep(other.bin_set))

    cdef bint trim_strangers(self, Stretch stretch, uint64_t wanted) except -1:
        """Releases free pages of other tags, which cannot be lent. Returns whether any went."""
        cdef uint64_t before = self.pages.count, there = 0
        cdef dict idle = {}
        cdef Faults faults = Faults()
        cdef Stretch other
        acquire_lock(self.lock[0])
        for other in self.stretches:
            if self.is_stranger(other, stretch):
                there += self.pages.count_free(other.bin_set)
        self.lock.release()
        if there == 0:
            return False
        self.retire_all()
        self.sweep(faults, True, False)
        for other in self.stretches:
            if (self.is_stranger(other, stretch) and before - self.pages.count < wanted
                    and self.is_idle(other.asked_of, True, idle, faults)):
                self.trim_stretch(other, wanted - (before - self.pages.count), True, faults)
        return self.pages.count < before

    cdef bint is_within_headroom(self, uint64_t pages, uint64_t rounded) noexcept:
        """Whether so many more pages are less above the most that was ever in use than the user allows."""
        cdef uint64_t peak
        if self.headroom == 0:
            return False
        acquire_lock(self.lock[0])
        peak = max(self.pool.counters.peak_bytes_in_use, self.pool.counters.bytes_in_use + rounded)
        self.lock.release()
        return <double>((self.pages.count + pages) * self.page_size) <= (1 + self.headroom) * <double>peak

    # -- pages that change hands ---------------------------------------------------------------------------------------

    cdef uint64_t adopt(self, Stretch stretch, uint64_t wanted, bint from_others) except? 0xFFFFFFFFFFFFFFFF:
        """Lets a range use free pages of the stream's large chunks, or `from_others`. Returns how many."""
        cdef uint64_t got = self.hold_free(stretch, wanted, from_others)
        cdef bint for_good
        if got == 0:
            return 0
        acquire_lock(self.lock[0])      # the first page of a range stays there: it may be taken and freed in turn
        for_good = from_others or self.pool.bin_sets[stretch.bin_set].window.slots() == 0
        self.lock.release()
        try:
            if from_others:
                self.order_after(stretch)
            self.map_held(stretch)
            self.seat_held(stretch, for_good)
        except BaseException:
            self.let_held_go()
            raise
        self.note_change()
        return got

    cdef uint64_t hold_free(self, Stretch stretch, uint64_t wanted, bint from_others) noexcept:
        """Holds free pages one by one, those of the stream that has most of them first."""
        cdef uint64_t got = 0, most
        cdef Stretch other, best
        acquire_lock(self.lock[0])
        if not from_others:
            got = self.pages.hold(stretch.bin_set | 1, wanted, 1, self.held)
        while from_others and got < wanted:
            most, best = 0, None
            for other in self.stretches:
                if self.is_kin(other, stretch):
                    if self.pages.count_free(other.bin_set) > most:
                        most, best = self.pages.count_free(other.bin_set), other
            if best is None or self.pages.hold(best.bin_set, wanted - got, 1, self.held) == 0:
                break
            got = self.held.size()
        self.lock.release()
        return got

    cdef int order_after(self, Stretch stretch) except -1:
        """Makes the stream of a range wait for what the streams of the held pages have queued."""
        cdef Stretch other
        cdef Run run
        cdef set streams = set()
        for run in self.held:
            for other in self.stretches:
                if other.bin_set == run.set:
                    streams.add(other.asked_of)
        for stream in sorted(streams):
            self.calls.stream_waits += 1
            self.source.sub_allocator.order(stream, stretch.stream)
        return 0

    cdef int map_held(self, Stretch stretch) except -1:
        """Maps the held pages into a range, but for those that are mapped there already. They are absent there."""
        cdef list pages = []
        cdef uint32_t page
        cdef Run run
        cdef cbool is_new
        for run in self.held:
            acquire_lock(self.lock[0])
            page = self.pool.bin_sets[run.set].window.page_at(run.first)
            is_new = self.pages.records[page].in_set(stretch.bin_set) == NO_SLOT
            self.lock.release()
            if is_new:      # what needs memory of the host comes after the lock
                pages.append(page)
        while pages:
            self.map_again(stretch, pages)
        return 0

    cdef int map_again(self, Stretch stretch, list pages) except -1:
        """Maps as many of these pages as one row of addresses has room for, and takes them off the list."""
        cdef uint64_t ptr = 0, count = 0
        cdef ChunkHandle handle = self.begin(stretch, len(pages), NO_CHUNK, &ptr, &count)
        cdef list mapped
        cdef cbool done
        try:
            mapped = pages[:count]
            self.put(ptr, self.numbers_of(mapped))
            acquire_lock(self.lock[0])
            done = self.add_slots(stretch, handle, mapped)
            self.touched.nbytes = 0 if done else self.touched.nbytes
            self.lock.release()
            if not done:
                self.call_unmap(ptr, count * self.page_size)
                raise out_of_host_memory()
        except BaseException as error:
            lost = getattr(error, "lost", ())
            acquire_lock(self.lock[0])
            if lost:
                self.pool.chunks[handle].state = ABSENT     # for good
            else:
                cancel_mapping(self.pool, handle, False)
            self.find_tail(stretch)
            self.lock.release()
            if lost:
                self.keep_stuck(lost, mapped, 0, 0)
            self.touched.nbytes = 0
            raise
        del pages[:count]
        return 0

    cdef cbool add_slots(self, Stretch stretch, ChunkHandle handle, list pages):
        """Enters a further slot of each of these pages. False: the host has no memory for it. Needs the lock."""
        cdef Window* window = self.pool.bin_sets[stretch.bin_set].window
        cdef size_t slot = window.slot_at(self.pool.chunks[handle].ptr)
        cdef Py_ssize_t added = 0, count = len(pages)
        cdef uint32_t page
        if not cut_absent(self.pool, handle, self.page_size):
            return False
        while added < count:
            page = pages[added]
            if not self.pages.records[page].try_add(Slot(stretch.bin_set, <uint32_t>(slot + added))):
                break
            added += 1
        if added < count:
            while added > 0:
                added -= 1
                page = pages[added]
                self.pages.records[page].slots.pop_back()
            join_absent(self.pool, handle, count * self.page_size)
            return False
        for added in range(count):
            window.set_page(slot + added, pages[added])
            window.note_chunk(slot + added, handle)
            handle = self.pool.chunks[handle].next
        return True

    cdef int seat_held(self, Stretch stretch, bint for_good) except -1:
        """Lets the held pages be used through their slots in a range from now on. `for_good`: views rely on it."""
        cdef Run here, there
        cdef PageRecord* record
        cdef uint32_t to
        cdef cbool done = True
        acquire_lock(self.lock[0])
        while self.held.size() and done:
            here = self.held.back()
            record = &self.pages.records[self.pool.bin_sets[here.set].window.page_at(here.first)]
            to = record.in_set(stretch.bin_set)
            there = Run(stretch.bin_set, record.slots[to].number, 1)
            done = self.pages.free_run(&there)
            if done:
                self.pool.chunks[self.pages.chunk_of(&here)].state = ABSENT
                record.seat = to
                self.pages.count_moved(here.set, stretch.bin_set)
                record.home = to if for_good else record.home
                self.held.pop_back()
        self.lock.release()
        if not done:
            raise out_of_host_memory()
        return 0

    # -- views ---------------------------------------------------------------------------------------------------------

    cdef bint stitch(self, Stretch stretch, uint64_t pages, Wanted* wanted) except -1:
        """Maps free pages of a stream end to end, as a view that is kept, and serves the request there. True, too, if
        another thread has taken some of them meanwhile."""
        cdef uint32_t number = NO_VIEW
        cdef list held = []
        self.retire_for(pages)
        if not self.hold_for_view(stretch, pages, &number):
            return True
        try:
            self.list_pages(number, held)
            self.map_view(number, held, wanted)
        except BaseException:
            acquire_lock(self.lock[0])
            self.pages.views.forget(number)
            self.lock.release()
            raise
        finally:
            self.let_held_go()
        self.calls.stitches += 1
        self.note_change()
        return True

    cdef bint hold_for_view(self, Stretch stretch, uint64_t pages, uint32_t* number) except -1:
        """Holds pages for a view, and opens it. False: there are too few."""
        cdef uint64_t held
        cdef uint32_t set_of_views
        cdef View* view
        cdef Run run
        cdef cbool opened, is_short
        acquire_lock(self.lock[0])
        held = self.pages.hold(stretch.bin_set, pages, ANY_LENGTH, self.held)
        if held < pages:
            held += self.pages.hold(stretch.bin_set - 1, pages - held, ANY_LENGTH, self.held)
        is_short = held < pages and (self.pages.count_free(stretch.bin_set)
                                     + self.pages.count_free(stretch.bin_set - 1) + held < pages)
        set_of_views = self.pool.open_ranges(stretch.bin_set)
        number[0] = self.pages.views.open() if held == pages else <uint32_t>NO_VIEW
        opened = set_of_views != NO_LANE and number[0] != NO_VIEW
        if opened:
            view = &self.pages.views.at(number[0])
            view.pages = <uint32_t>pages
            view.set = set_of_views
            for run in self.held:
                opened = opened and try_push_run(view.runs, run)
            if not opened:
                self.pages.views.forget(number[0])
        if not opened:
            self.pages.let_go(self.held)
        self.lock.release()
        if not opened and not is_short:
            raise out_of_host_memory()
        return opened

    cdef int map_view(self, uint32_t number, list pages, Wanted* wanted) except -1:
        cdef uint64_t ptr = 0, nbytes = len(pages) * self.page_size
        cdef Retired begun = Retired()
        begun.pages = []
        begun.mapped = []
        self.retired.append(begun)      # for a child that is forked meanwhile, and has nothing else of it
        self.add_calls(1)
        try:
            ptr = call_reserve(self.source.sub_allocator, nbytes)
            begun.ptr, begun.nbytes = ptr, nbytes
            self.put(ptr, self.numbers_of(pages))
            try:
                self.enter_view(number, ptr, wanted)
            except BaseException:
                self.call_unmap(ptr, nbytes)
                raise
        except BaseException as error:
            lost = getattr(error, "lost", ())
            self.retired.remove(begun)
            if lost:
                self.keep_stuck(lost, pages, ptr, nbytes)
            elif ptr:
                self.give_addresses_up(ptr, nbytes, None)
            self.touched.nbytes = 0
            raise
        self.retired.remove(begun)
        return 0

    cdef int enter_view(self, uint32_t number, uint64_t ptr, Wanted* wanted) except -1:
        """Adds a view that is mapped to the pool, and hands it out: nothing is held any more."""
        cdef uint64_t nbytes = self.pages.views.at(number).pages * self.page_size
        acquire_lock(self.lock[0])
        cdef cbool overlaps = self.pool.overlaps_region(ptr, nbytes)
        self.pages.views.at(number).address = ptr
        if not overlaps and (not wanted.indexed or self.pool.starts.reserve()) and self.pages.add_view(number):
            wanted.handle = self.pages.hand_held_out(number, wanted.requested, wanted.stream, wanted.indexed)
            self.held.clear()
            self.touched.nbytes = 0
        self.lock.release()
        if overlaps:
            raise SubAllocatorError(f"{self.source.sub_allocator!r}.reserve returned {ptr:#x}, which is in use")
        if wanted.handle == NO_CHUNK:
            raise out_of_host_memory()
        return 0

    cdef int retire_for(self, uint64_t pages) except -1:
        """Retires the views that were used longest ago, so that with one more there are no more views than pages."""
        cdef uint32_t oldest
        cdef bint some = True
        while some:
            acquire_lock(self.lock[0])
            oldest = NO_VIEW
            if self.pages.views.slots() + pages > self.pages.count:
                oldest = self.pages.oldest_kept_view()
            self.lock.release()
            some = oldest != NO_VIEW and self.retire(oldest)
        return 0
