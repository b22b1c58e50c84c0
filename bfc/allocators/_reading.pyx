"""What can be read from a pool, changing nothing but peaks: its totals, what a snapshot copies (in one pass under the
lock, with no Python object made there), which pages are used through which addresses, and whether it is sound: the
invariants of docs/design/invariants.md, recounted from nothing, for `check()` and a debug build.

Functions that do not take the lock themselves need it.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cython.operator cimport dereference as deref, postincrement
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.map cimport map as cmap
from libcpp.vector cimport vector

from bfc.native.nothrow cimport try_push_back
from bfc._core cimport (
    BOTH_KINDS, DELETED, DIVIDED, ENDS, FREE, GAP, IN_USE, INDEXED, LEAVING, MAPPED_ELSEWHERE, MARKS, MINIMUM_SIZE,
    NO_CHUNK, NO_PAGE, OPTIONS, OWNER_SHIFT, PAGED, PLACE, PLANNED, STATE, UNLIMITED, UNMAPPED, WAITING, BinSet, Chunk,
    ChunkHandle, Counters, FreeChunk, HistoryRecord, PageBitmap, PlanServer, Pool, Region, plan_of, round_up,
)
from bfc.buffers._scopes cimport name_of_owner
from bfc.allocators._places cimport list_places, plan_in, set_of_region
from bfc.allocators._changes cimport IS_GROWING
from bfc.allocators._pages cimport KEPT, LIVE, PageRecord, Pages, Run, StitchedView
from bfc.allocators._lock cimport Lock, acquire_lock

from bfc.errors import InvalidPointerError, PagesInUse
from bfc.snapshots import snapshot as _snapshot

cdef extern from "bins.hpp":
    pass
cdef extern from "history.hpp":
    pass
cdef extern from "owners.hpp":
    pass
cdef extern from "starts.hpp":
    pass
cdef extern from "page_bitmap.hpp":
    pass
cdef extern from "plan_server.hpp":
    pass

cdef extern from "sort.hpp" namespace "bfc" nogil:
    void sort_by_address(const Chunk* chunks, vector[uint32_t]& handles) noexcept


cdef cbool copy_columns(Pool pool, vector[RegionRow]& regions, vector[ChunkRow]& chunks,
                        vector[uint32_t]& pages) noexcept nogil:
    """Every region and every chunk in address order, and the regions' pages. In a range, each run of chunks that have
    memory counts as a region of its own. Needs the lock, and changes nothing. False: the host is out of memory."""
    cdef cmap[uint64_t, Region].iterator it = pool.regions.begin()
    cdef vector[uint32_t] slots
    while it != pool.regions.end():
        slots.clear()
        if pool.pages is not None and not list_pages(<Pages>pool.pages, deref(it).second.first, slots):
            return False
        if not add_runs(pool, &deref(it).second, slots, regions, chunks, pages):
            return False
        postincrement(it)
    return True


cdef cbool add_runs(Pool pool, Region* region, vector[uint32_t]& slots, vector[RegionRow]& regions,
                    vector[ChunkRow]& chunks, vector[uint32_t]& pages) noexcept nogil:
    """Adds the runs of a region. `slots` are the pages of its slots, if it has any."""
    cdef BinSet* owner = &pool.bin_sets[pool.chunks[region.first].bin_set]
    cdef ChunkHandle handle = region.first
    cdef RegionRow row
    cdef uint64_t end
    row.stream = owner.lane.stream
    row.pool[0] = owner.lane.pool[0]
    row.pool[1] = owner.lane.pool[1]
    row.home = region.ptr
    row.home_size = region.end - region.ptr
    row.number = region.number
    row.kind = owner.kind
    row.flags = IN_RANGE if owner.is_range else 0
    if owner.asleep:
        row.flags |= ASLEEP
    if owner.is_range and owner.bitmap == NULL and pool.pages is not None:
        row.flags |= IS_VIEW
    while handle != NO_CHUNK:
        row.ptr = end = pool.chunks[handle].ptr
        while handle != NO_CHUNK and pool.chunks[handle].state not in (UNMAPPED, MAPPED_ELSEWHERE):
            end = pool.chunks[handle].ptr + pool.chunks[handle].size
            if pool.chunks[handle].state == DIVIDED:
                if not add_blocks(pool, handle, chunks):
                    return False
            elif not add_chunk(pool, &pool.chunks[handle], chunks):
                return False
            handle = pool.chunks[handle].next
        if end > row.ptr:
            if not owner.asleep and not add_pages(pool, slots, row.ptr - region.ptr, end - region.ptr, pages):
                return False
            row.size = end - row.ptr
            row.chunks_end = <uint32_t>chunks.size()
            row.pages_end = <uint32_t>pages.size()
            if not try_push_back(regions, row):
                return False
        if handle != NO_CHUNK:
            handle = pool.chunks[handle].next
    return True


cdef cbool list_blocks(Pool pool, ChunkHandle divided, vector[uint32_t]& blocks) noexcept nogil:
    """The blocks in the region of a plan, by address. False: the host is out of memory."""
    cdef PlanServer* plan
    cdef int which
    cdef vector[uint32_t] listed
    cdef uint64_t ptr = pool.chunks[divided].ptr, end = ptr + pool.chunks[divided].size
    cdef uint32_t block
    for plan in pool.plans.all:
        for which in range(2):
            listed.clear()
            if plan.present[which] and plan.contains(ptr) and plan.address[which] <= ptr:
                if not list_places(pool, plan, which, listed):
                    return False
            for block in listed:        # of one row of pages, where there are pages
                if ptr <= pool.chunks[block].ptr < end and not try_push_back(blocks, block):
                    return False
    sort_by_address(pool.chunks, blocks)
    return True


cdef cbool add_blocks(Pool pool, ChunkHandle divided, vector[ChunkRow]& chunks) noexcept nogil:
    """Adds the blocks in the region of a plan, and what is free between them."""
    cdef vector[uint32_t] blocks
    cdef uint32_t block
    cdef uint64_t end = pool.chunks[divided].ptr + pool.chunks[divided].size
    cdef Chunk gap = pool.chunks[divided]
    gap.state = FREE
    if not list_blocks(pool, divided, blocks):
        return False
    for block in blocks:
        gap.size = pool.chunks[block].ptr - gap.ptr
        if gap.size and not add_chunk(pool, &gap, chunks):
            return False
        if not add_chunk(pool, &pool.chunks[block], chunks):
            return False
        gap.ptr = pool.chunks[block].ptr + pool.chunks[block].size
    gap.size = end - gap.ptr
    return gap.size == 0 or add_chunk(pool, &gap, chunks)


cdef inline cbool add_chunk(Pool pool, Chunk* chunk, vector[ChunkRow]& chunks) noexcept nogil:
    cdef uint32_t state = chunk.state & STATE
    cdef cbool in_use = state == IN_USE or state == WAITING
    cdef ChunkRow row
    row.ptr = chunk.ptr
    row.size = chunk.size
    row.requested_size = chunk.requested_size if in_use else 0
    row.last_requested_size = chunk.requested_size if pool.books.usage != NULL and not in_use else 0
    row.stream = chunk.stream
    row.freed_at_count = chunk.freed_at_count if pool.books.usage == NULL else 0
    row.allocation_id = chunk.allocation_id
    row.state = (ROW_FREE if state == FREE else ROW_IN_USE if state == IN_USE else ROW_WAITING if state == WAITING
                 else ROW_LEAVING)
    row.tag = <uint16_t>(ROW_LOWER + chunk.bin_set) if pool.features & ENDS and chunk.bin_set <= GAP else 0
    row.owner = chunk.state >> OWNER_SHIFT
    return try_push_back(chunks, row)


cdef cbool add_pages(Pool pool, vector[uint32_t]& slots, uint64_t start, uint64_t end,
                     vector[uint32_t]& pages) noexcept nogil:
    """Adds the pages of a part of a region, but for those that another thread may be giving back."""
    cdef uint64_t page_size, slot
    if slots.empty():
        return True
    page_size = (<Pages>pool.pages).page_size
    for slot in range(start // page_size, min(end // page_size, <uint64_t>slots.size())):
        if slots[slot] != NO_PAGE and not try_push_back(pages, <uint32_t>slots[slot]):
            return False
    return True


cdef bytes bytes_of_records(vector[HistoryRecord]& records):
    return PyBytes_FromStringAndSize(<char*>records.data(), <Py_ssize_t>(records.size() * sizeof(HistoryRecord)))


cdef bytes bytes_of_regions(vector[RegionRow]& rows):
    return PyBytes_FromStringAndSize(<char*>rows.data(), <Py_ssize_t>(rows.size() * sizeof(RegionRow)))


cdef bytes bytes_of_chunks(vector[ChunkRow]& rows):
    return PyBytes_FromStringAndSize(<char*>rows.data(), <Py_ssize_t>(rows.size() * sizeof(ChunkRow)))


cdef bytes bytes_of_pages(vector[uint32_t]& rows):
    return PyBytes_FromStringAndSize(<char*>rows.data(), <Py_ssize_t>(rows.size() * sizeof(uint32_t)))


cdef enum:
    SPARSE = 10         # a page is sparse if less than this part of it is in use


cdef cbool list_pages(Pages pages, ChunkHandle first, vector[uint32_t]& numbers) noexcept nogil:
    """Adds the pages of the region that begins with a chunk, slot by slot. A view that is not in use has none. False:
    the host is out of memory."""
    cdef PageBitmap* bitmap = bitmap_of(pages, first)
    cdef StitchedView* view = view_of(pages, first)
    cdef cbool listed = True
    cdef Run run
    cdef size_t slot
    if bitmap != NULL:
        for slot in range(bitmap.slots()):
            listed = listed and try_push_back(numbers, bitmap.page_at(slot))
    elif view != NULL:
        for run in view.runs:
            bitmap = pages.pool.bin_sets[run.set].bitmap
            for slot in range(run.first, run.first + run.count):
                listed = listed and try_push_back(numbers, bitmap.page_at(slot))
    return listed


cdef cbool count_use(Pages pages, PageUse* use) noexcept nogil:
    """How many pages there are, and how many of them are in use and sparse. False: the host is out of memory."""
    cdef cmap[uint64_t, Region].iterator it = pages.pool.regions.begin()
    cdef vector[uint64_t] used
    cdef ChunkHandle handle
    cdef Chunk* chunk
    cdef uint64_t nbytes
    while used.size() < pages.records.size():
        if not try_push_back(used, <uint64_t>0):
            return False
    while it != pages.pool.regions.end():
        handle = deref(it).second.first
        while handle != NO_CHUNK:
            chunk = &pages.pool.chunks[handle]
            if chunk.state & STATE in (IN_USE, WAITING) and not pages.pool.bin_sets[chunk.bin_set].asleep:
                add_use(pages, handle, used)
            handle = chunk.next
        postincrement(it)
    if not add_plans(pages, used):
        return False
    use.page_size = pages.page_size
    use.pages = count_awake(pages.pool) // pages.page_size
    use.in_use = use.sparse = 0
    for nbytes in used:
        use.in_use += nbytes > 0
        use.sparse += 0 < nbytes and nbytes * SPARSE < pages.page_size
    return True


cdef cbool add_plans(Pages pages, vector[uint64_t]& used) noexcept nogil:
    """Adds what lives in the regions of plans. False: the host is out of memory."""
    cdef PlanServer* plan
    cdef vector[uint32_t] blocks
    cdef uint32_t block
    cdef int region
    for plan in pages.pool.plans.all:
        for region in range(2):
            blocks.clear()
            if plan.has_pages() and not list_places(pages.pool, plan, region, blocks):
                return False
            for block in blocks:
                add_use(pages, block, used)
    return True


cdef uint64_t count_awake(Pool pool) noexcept nogil:
    """The bytes of the pages that have memory: those that sleep have none."""
    cdef uint64_t nbytes = 0
    cdef BinSet owner
    for owner in pool.bin_sets:
        nbytes += owner.mapped_bytes if owner.is_range and not owner.asleep else 0
    return nbytes


cdef void add_use(Pages pages, ChunkHandle handle, vector[uint64_t]& used) noexcept nogil:
    """Adds the bytes of a chunk in use to those of its pages."""
    cdef Chunk* chunk = &pages.pool.chunks[handle]
    cdef PageBitmap* bitmap = bitmap_of(pages, handle)
    cdef StitchedView* view = view_of(pages, handle)
    cdef uint64_t at = chunk.ptr, end = chunk.ptr + chunk.size, next_page, left
    cdef Run run
    cdef size_t slot
    if bitmap != NULL:
        while at < end:
            slot = bitmap.slot_at(at)
            next_page = min(end, bitmap.address_of(slot + 1))
            if bitmap.page_at(slot) != NO_PAGE:
                used[bitmap.page_at(slot)] += next_page - at
            at = next_page
    elif view != NULL:
        left = min(chunk.size, round_up(max(chunk.requested_size, <uint64_t>1), MINIMUM_SIZE))
        for run in view.runs:
            bitmap = pages.pool.bin_sets[run.set].bitmap
            for slot in range(run.first, run.first + run.count):
                if bitmap.page_at(slot) != NO_PAGE:
                    used[bitmap.page_at(slot)] += min(left, pages.page_size)
                left -= min(left, pages.page_size)


cdef PageBitmap* bitmap_of(Pages pages, ChunkHandle handle) noexcept nogil:
    """The slots of the range that a chunk lies in; NULL: it lies in none."""
    cdef PlanServer* plan
    if pages.pool.chunks[handle].state & PLANNED:
        plan = plan_of(pages.pool, handle)
        if plan == NULL or not plan.has_pages():
            return NULL
        return pages.pool.bin_sets[set_of_region(pages.pool, plan,
                                                 plan.region_at(pages.pool.chunks[handle].ptr))].bitmap
    return pages.pool.bin_sets[pages.pool.chunks[handle].bin_set].bitmap


cdef StitchedView* view_of(Pages pages, ChunkHandle handle) noexcept nogil:
    """The view in use whose chunk this is, or NULL."""
    cdef Chunk* chunk = &pages.pool.chunks[handle]
    cdef BinSet* owner = &pages.pool.bin_sets[chunk.bin_set]
    if not owner.is_range or owner.bitmap != NULL or owner.asleep or chunk.state & STATE not in (IN_USE, WAITING):
        return NULL
    return &pages.views.at(pages.views.of_chunk(handle))


def _by_falling_bytes(item):
    return -item[1], item[0]


cdef object bytes_by_name(uint64_t in_use, vector[uint64_t]& owned):
    """Bytes in use by owner, the largest first. `owned`: by the owner's number."""
    cdef uint64_t left = in_use
    cdef size_t i
    cdef list found = []
    for i in range(owned.size()):
        if owned[i]:
            left -= owned[i]
            found.append((name_of_owner(<uint32_t>i), owned[i]))
    if left:
        found.append(("", left))
    found.sort(key=_by_falling_bytes)
    return _snapshot.OwnerBytes(found)


cdef uint64_t count_bookkeeping(Pool pool) noexcept nogil:
    """The bytes of host memory that a pool keeps: records ever used, the table of starts, the bins. Needs the lock."""
    cdef uint64_t total = pool.chunk_count * sizeof(Chunk) + pool.starts.bytes() + (pool.chunk_count + 63) // 64 * 8
    cdef BinSet bin_set
    for bin_set in pool.bin_sets:
        total += bin_set.bins.bytes() + (bin_set.bitmap.bytes() if bin_set.bitmap != NULL else 0)
    cdef PlanServer* plan
    for plan in pool.plans.all:
        total += plan.bytes()
    return total


cdef ChunkHandle chunk_around(Pool pool, uint64_t ptr) noexcept nogil:
    """The chunk, free or not, that `ptr` lies in, or NO_CHUNK: a walk along its region, for messages. Needs the lock.
    """
    cdef cmap[uint64_t, Region].iterator found = pool.regions.upper_bound(ptr)
    if found == pool.regions.end() or ptr < deref(found).second.ptr:
        return NO_CHUNK
    cdef ChunkHandle handle = deref(found).second.first
    while ptr >= pool.chunks[handle].ptr + pool.chunks[handle].size:
        handle = pool.chunks[handle].next
    cdef vector[uint32_t] blocks
    cdef uint32_t block
    if pool.chunks[handle].state == DIVIDED and list_blocks(pool, handle, blocks):
        for block in blocks:
            if pool.chunks[block].ptr <= ptr < pool.chunks[block].ptr + pool.chunks[block].size:
                return block
    return handle


cdef Counters start_peaks(Pool pool, Lock& lock) noexcept:
    """Restarts the peaks of bytes. Returns the counters as they were, for end_peaks."""
    # The peaks restart at what is in use at this moment.
    acquire_lock(lock)
    cdef Counters before = pool.totals()
    pool.restart_peaks()
    if pool.books.usage != NULL:
        pool.books.usage.restart_bytes_peak()
    lock.release()
    return before


cdef Counters end_peaks(Pool pool, Lock& lock, Counters before) noexcept:
    """The peaks since start_peaks."""
    cdef Counters* counters = &pool.counters
    # The peaks are read and put back between two requests of other threads.
    acquire_lock(lock)
    cdef Counters since = pool.totals()
    if pool.books.usage != NULL:
        pool.books.usage.merge_bytes_peak(before.peak_bytes_in_use)
    counters.peak_bytes_in_use = max(since.peak_bytes_in_use, before.peak_bytes_in_use)
    counters.peak_pool_bytes = max(since.peak_pool_bytes, before.peak_pool_bytes)
    lock.release()
    return since


cdef Chunk chunk_at(Pool pool, Lock& lock, uint64_t address) except *:
    """A copy of the live chunk that starts at an address."""
    cdef Chunk chunk
    # It is copied, since it may be freed after the lock.
    acquire_lock(lock)
    cdef ChunkHandle handle = pool.handle_of(address)
    if handle != NO_CHUNK:
        chunk = pool.chunks[handle]
    lock.release()
    if handle == NO_CHUNK:
        raise_invalid_pointer(pool, lock, address)
    return chunk


cdef object pages_in_use(Pool pool, Lock& lock):
    """How much of the pages is in use, for the text of a refusal; None: there are no pages."""
    cdef PageUse use
    if not pool.features & PAGED:
        return None
    # Pages change hands in other threads.
    acquire_lock(lock)
    cdef cbool counted = count_use(<Pages>pool.pages, &use)
    lock.release()
    return PagesInUse(use.page_size, use.pages, use.in_use, use.sparse) if counted else None


cdef int raise_invalid_pointer(Pool pool, Lock& lock, uint64_t address) except -1:
    """Raises InvalidPointerError, with what lies at the address."""
    cdef Chunk chunk
    # It is copied, since it may be freed after the lock.
    acquire_lock(lock)
    cdef ChunkHandle handle = chunk_around(pool, address)
    if handle != NO_CHUNK:
        chunk = pool.chunks[handle]
    lock.release()
    if handle == NO_CHUNK:
        text = "lies in no region of this allocator: it was allocated elsewhere, or its region was given back"
    elif chunk.state & STATE == IN_USE:
        text = (f"lies {address - chunk.ptr} bytes inside the allocation at {chunk.ptr:#x} "
                f"({chunk.requested_size} bytes): pass the address that allocate_raw returned")
    elif chunk.state & STATE == UNMAPPED:
        text = "lies in reserved addresses that have no memory: it was freed, and given back to the device"
    elif chunk.state & STATE == WAITING:
        text = "is freed already, and waits for another stream to finish with it"
    else:
        text = "lies in free memory: it is freed already, or was never handed out"
    raise InvalidPointerError(f"{address:#x} {text}")


cdef extern from "usage.hpp" namespace "bfc" nogil:
    const int ACTIVE "bfc::kActive"
    const int ACTIVE_BYTES "bfc::kActiveBytes"
    const int PIECES "bfc::kInactiveSplit"
    const int PIECE_BYTES "bfc::kInactiveSplitBytes"
    const int REQUESTED_BYTES "bfc::kRequestedBytes"
    const int RESERVED_BYTES "bfc::kReservedBytes"

cdef struct Recount:                    # of all chunks of one kind
    int64_t chunks                      # those that are not free
    int64_t bytes
    int64_t requested
    int64_t pieces                      # free chunks that are only a part of their region
    int64_t piece_bytes
    int64_t reserved


cdef const char* first_fault(Pool pool) noexcept nogil:
    """The first invariant that does not hold, in words, or NULL."""
    cdef Counters recount
    cdef size_t reached = 0, slots = 0
    cdef ChunkHandle handle = pool.records.free_slot
    recount.num_allocs = 0
    recount.bytes_in_use = 0
    recount.pool_bytes = 0
    recount.bytes_waiting = 0
    cdef const char* found = fault_in_regions(pool, &recount, &reached)
    if found == NULL:
        found = fault_in_plans(pool, &recount, &reached)
    if found != NULL:
        return found
    while handle != NO_CHUNK and slots <= pool.chunk_count:
        if pool.chunks[handle].state != DELETED:
            return b"I9: a record on the slot list is in use"
        slots += 1
        handle = pool.chunks[handle].next
    if reached + slots != pool.chunk_count:
        return b"I9: a record is neither in a region nor on the slot list, or in both"
    if <size_t>recount.num_allocs != pool.starts.count():
        return b"I6: the table of starts holds another number of chunks than are indexed"
    if recount.bytes_in_use != pool.totals().bytes_in_use:
        return b"I10: bytes_in_use differs from a recount"
    if recount.pool_bytes != pool.counters.pool_bytes:
        return b"I10: pool_bytes differs from a recount"
    if recount.bytes_waiting != pool.counters.bytes_waiting:
        return b"I10: the bytes that wait for streams differ from a recount"
    found = fault_in_owners(pool)
    if found != NULL:
        return found
    if pool.pages is not None:
        found = fault_in_bitmaps(pool)
    if found == NULL and pool.books.usage != NULL:
        found = fault_in_usage(pool)
    return found


cdef const char* fault_in_regions(Pool pool, Counters* recount, size_t* reached) noexcept nogil:
    cdef cmap[uint64_t, Region].iterator it = pool.regions.begin()
    cdef Region region
    cdef ChunkHandle handle, prev
    cdef uint64_t ptr, below = 0
    cdef size_t free_chunks = 0
    cdef const char* found
    while it != pool.regions.end():
        region = deref(it).second
        if region.ptr < below or region.end <= region.ptr or deref(it).first != region.end:
            return b"I7: regions overlap, or one is not keyed by its end"
        below = region.end
        ptr = region.ptr
        prev = NO_CHUNK
        handle = region.first
        while handle != NO_CHUNK and reached[0] <= pool.chunk_count:
            found = fault_in_chunk(pool, handle, prev, ptr, recount)
            if found != NULL:
                return found
            free_chunks += pool.chunks[handle].state == FREE
            recount.pool_bytes += pool.chunks[handle].size if has_memory(pool, handle) else 0
            ptr += pool.chunks[handle].size
            reached[0] += 1
            prev = handle
            handle = pool.chunks[handle].next
        if ptr != region.end:
            return b"I1: the chunks of a region do not tile it"
        postincrement(it)
    return fault_in_bins(pool, free_chunks)


cdef const char* fault_in_plans(Pool pool, Counters* recount, size_t* reached) noexcept nogil:
    """What is wrong with the places of plans and their guests, or NULL."""
    cdef PlanServer* plan
    cdef vector[uint32_t] live
    cdef ChunkHandle handle
    cdef size_t i
    cdef const char* found = NULL
    for plan in pool.plans.all:
        live.clear()
        for i in range(plan.places() + plan.guests().size()):
            handle = plan.first_record + <ChunkHandle>i
            if i >= plan.places():
                handle = plan.guests()[i - plan.places()].handle
                if pool.chunks[handle].ptr != plan.address_of(plan.guests()[i - plan.places()].offset):
                    return b"I16: a guest in the region of a plan lies elsewhere"
            elif pool.chunks[handle].state == PLACE:
                reached[0] += 1
                if pool.chunks[handle].allocation_id != -1:
                    return b"I5: a place that is not taken has an allocation id"
                continue
            elif not try_push_back(live, <uint32_t>i):
                return NULL
            reached[0] += 1
            if not pool.chunks[handle].state & PLANNED or not plan.contains(pool.chunks[handle].ptr):
                return b"I16: a block of a plan does not lie in its regions"
            found = fault_in_chunk(pool, handle, NO_CHUNK, pool.chunks[handle].ptr, recount)
            if found != NULL:
                return found
            if i < plan.places() and pool.chunks[handle].size > plan.size_of(<int64_t>i):
                return b"I16: a block is larger than its place"
        if not plan.is_sound(live):
            return b"I16: the places that are taken differ from those noted, or blocks in a plan overlap"
    return NULL


cdef inline cbool has_memory(Pool pool, ChunkHandle handle) noexcept nogil:
    cdef Chunk* chunk = &pool.chunks[handle]
    return chunk.state not in (UNMAPPED, MAPPED_ELSEWHERE) and not pool.bin_sets[chunk.bin_set].asleep


cdef const char* fault_in_chunk(Pool pool, ChunkHandle handle, ChunkHandle prev, uint64_t ptr,
                                Counters* recount) noexcept nogil:
    cdef Chunk chunk = pool.chunks[handle]
    cdef uint32_t state = chunk.state & STATE
    cdef Chunk before
    if chunk.ptr != ptr or chunk.size == 0:
        return b"I1: a chunk does not start where the one before it ends"
    if chunk.prev != prev:
        return b"I2: next.prev is not self"
    if chunk.ptr % MINIMUM_SIZE or (state in (IN_USE, WAITING) and chunk.requested_size > chunk.size):
        return b"I8: a chunk is not aligned, or smaller than what was asked for"
    if state == FREE:
        before = pool.chunks[prev if prev != NO_CHUNK else handle]
        if prev != NO_CHUNK and before.state == FREE and pool.times.counter == NULL:
            return b"I3: two neighbours are free"
        return unless(chunk.allocation_id == -1, b"I5: a free chunk has an allocation id")
    if state == DIVIDED:
        before = pool.chunks[prev if prev != NO_CHUNK else handle]
        return unless(pool.bin_sets[chunk.bin_set].is_plan and (prev == NO_CHUNK or before.state != DIVIDED)
                      and (pool.bin_sets[chunk.bin_set].is_range or chunk.next == NO_CHUNK),
                      b"I16: a plan's region has neighbours, or stands among others")
    if state in (UNMAPPED, LEAVING, MAPPED_ELSEWHERE):
        return fault_without_memory(pool, &chunk)
    recount.bytes_in_use += chunk.size
    if state == WAITING:
        recount.bytes_waiting += chunk.size
        return unless(chunk.allocation_id == -1, b"I5: a chunk that waits has an allocation id")
    recount.num_allocs += chunk.state & INDEXED != 0
    if state != IN_USE or chunk.allocation_id < 1 or chunk.allocation_id >= pool.records.next_allocation_id:
        return b"I5: a chunk in use has no valid allocation id"
    return unless((pool.handle_of(ptr) == handle) == (chunk.state & INDEXED != 0),
                  b"I6: a chunk in use is not found by its address")


cdef const char* fault_without_memory(Pool pool, const Chunk* chunk) noexcept nogil:
    """What is wrong with a chunk that is unmapped, is being unmapped, or whose pages are used through other addresses.
    """
    if not pool.bin_sets[chunk.bin_set].is_range:
        return b"I12: a chunk without memory does not lie in a range"
    if chunk.allocation_id != -1:
        return b"I12: a chunk without memory has an allocation id"
    if chunk.state == UNMAPPED and chunk.prev != NO_CHUNK and pool.chunks[chunk.prev].state == UNMAPPED:
        return unless(pool.chunks[chunk.prev].freed_at_count == IS_GROWING or chunk.freed_at_count == IS_GROWING,
                      b"I12: two neighbours are unmapped")
    return NULL


cdef const char* fault_in_bins(Pool pool, size_t free_chunks) noexcept nogil:
    cdef vector[FreeChunk] listed
    cdef FreeChunk entry
    cdef Chunk chunk
    cdef size_t total = 0, i
    for i in range(pool.bin_sets.size()):
        listed.clear()
        if not pool.bin_sets[i].bins.list(listed):
            return b"I4: a bin is out of order"
        total += listed.size()
        for entry in listed:
            chunk = pool.chunks[entry.handle]
            if (chunk.state != FREE or chunk.bin_set != i or chunk.size != entry.size
                    or pool.order_of(entry.handle, True) != entry.order):
                return b"I4: a bin holds a chunk under another size, order or state than its own"
    return unless(total == free_chunks, b"I4: a free chunk is in no bin, or in two")


cdef const char* fault_in_owners(Pool pool) noexcept nogil:
    """What is wrong with the bytes in use by owner, or NULL; also NULL if the host has no memory to count them in."""
    cdef vector[uint64_t] owned
    cdef uint32_t owner
    cdef size_t i
    cdef Chunk* chunk
    if not pool.books.owned.copy(owned):
        return NULL
    for i in range(pool.chunk_count):
        chunk = &pool.chunks[i]
        owner = chunk.state >> OWNER_SHIFT
        if chunk.state & MARKS and chunk.state & STATE not in (IN_USE, WAITING):
            return b"I15: a chunk that is not in use has an owner, or is known to tracemalloc"
        if not pool.books.owned.knows(owner):
            return b"I15: a chunk has an owner whose bytes are not counted"
        if owner:
            owned[owner] -= chunk.size
    for i in range(owned.size()):
        if owned[i]:
            return b"I15: the bytes in use of an owner differ from a recount"
    return NULL


cdef const char* fault_in_bitmaps(Pool pool) noexcept nogil:
    """What is wrong with the slots of ranges: exactly those that lie wholly in free chunks must be noted as free."""
    cdef cmap[uint64_t, Region].iterator it = pool.regions.begin()
    cdef ChunkHandle handle
    cdef PageBitmap* bitmap
    cdef PlanServer* plan
    cdef Chunk chunk
    cdef size_t slot, first, end, free_slots
    cdef int region = 0
    while it != pool.regions.end():
        handle = deref(it).second.first
        bitmap = pool.bin_sets[pool.chunks[handle].bin_set].bitmap
        if bitmap != NULL:
            (<Pages>pool.pages).bitmap_of(pool.chunks[handle].bin_set)   # brings it up to date
        free_slots = 0
        while bitmap != NULL and handle != NO_CHUNK:
            chunk = pool.chunks[handle]
            first = bitmap.slot_at(chunk.ptr + bitmap.page_size() - 1)
            end = bitmap.slot_at(chunk.ptr + chunk.size)
            plan = plan_in(pool, chunk.bin_set, &region) if pool.bin_sets[chunk.bin_set].is_plan else <PlanServer*>NULL
            for slot in range(first, end if plan != NULL else first):
                if plan.is_away(region, <uint32_t>slot) != (chunk.state != DIVIDED):
                    return b"I16: a plan uses a page that is not there, or does not know of one that is"
            for slot in range(first, end if chunk.state == FREE else first):
                free_slots += 1
                if not bitmap.is_free(slot) or bitmap.chunk_around(slot) != handle:
                    return b"I13: a slot of a free chunk is not found as one"
            handle = chunk.next
        if bitmap != NULL and free_slots != bitmap.count_free():
            return b"I13: a slot is noted as free that is not"
        postincrement(it)
    return NULL


cdef const char* fault_in_usage(Pool pool) noexcept nogil:
    cdef Recount recount
    cdef int64_t reserved = 0
    cdef int kind
    cdef BinSet bin_set
    for bin_set in pool.bin_sets:
        if not pool.features & OPTIONS and (bin_set.is_range or bin_set.looks_in_ranges or not bin_set.counts_pieces
                                            or bin_set.ticks or bin_set.oversize != UNLIMITED
                                            or bin_set.cuts_below != UNLIMITED):
            return b"I11: a pool without options has a set of bins with one"
    for kind in range(BOTH_KINDS):
        recount = recount_usage(pool, <uint32_t>kind)
        if (recount.chunks != pool.books.usage.read(ACTIVE, kind).current
                or recount.bytes != pool.books.usage.read(ACTIVE_BYTES, kind).current
                or recount.requested != pool.books.usage.read(REQUESTED_BYTES, kind).current):
            return b"I11: what PyTorch's counts say is active differs from a recount"
        if (recount.pieces != pool.books.usage.read(PIECES, kind).current
                or recount.piece_bytes != pool.books.usage.read(PIECE_BYTES, kind).current):
            return b"I11: what PyTorch's counts say is split off and free differs from a recount"
        reserved += recount.reserved
        if not pool.features & PAGED and recount.reserved != pool.books.usage.read(RESERVED_BYTES, kind).current:
            return b"I11: what PyTorch's counts say is reserved differs from a recount"
    # a page counts in the range that it is used in, and a view may have pages of ranges of both kinds
    return unless(reserved == pool.books.usage.read(RESERVED_BYTES, BOTH_KINDS).current,
                  b"I11: what PyTorch's counts say is reserved differs from a recount of both kinds")


cdef Recount recount_usage(Pool pool, uint32_t kind) noexcept nogil:
    cdef Recount recount = Recount(0, 0, 0, 0, 0, 0)
    cdef size_t i
    cdef Chunk chunk
    for i in range(pool.chunk_count):
        chunk = pool.chunks[i]
        if chunk.state in (DELETED, PLACE, UNMAPPED, MAPPED_ELSEWHERE) or pool.bin_sets[chunk.bin_set].kind != kind:
            continue
        recount.reserved += chunk.size if has_memory(pool, <ChunkHandle>i) and not chunk.state & PLANNED else 0
        if chunk.state == DIVIDED:
            continue
        if chunk.state != FREE and chunk.state != LEAVING:
            recount.chunks += 1
            recount.bytes += chunk.size
            recount.requested += chunk.requested_size
        elif not pool.bin_sets[chunk.bin_set].is_range and (chunk.prev != NO_CHUNK or chunk.next != NO_CHUNK):
            recount.pieces += 1
            recount.piece_bytes += chunk.size
    return recount


cdef const char* fault_in_pages(Pages pages) noexcept nogil:
    """The first thing that is wrong with pages and views, or NULL."""
    cdef size_t page
    cdef uint64_t known = 0, slots = 0
    cdef uint32_t number, i
    cdef PageRecord* record
    cdef StitchedView* view
    cdef const char* found
    for page in range(pages.records.size()):
        record = &pages.records[page]
        known += record.is_known
        for i in range(<uint32_t>record.slots.size()):
            if pages.pool.bin_sets[record.slots[i].set].bitmap.page_at(record.slots[i].number) != page:
                return b"I14: a page is mapped into a slot that names another page"
    if known != pages.count:
        return b"I14: the pages are not as many as they are counted"
    for number in range(pages.views.count()):
        view = &pages.views.at(number)
        if view.state == KEPT or view.state == LIVE:
            found = fault_in_view(pages, view)
            if found != NULL:
                return found
            slots += view.pages
    return unless(slots == pages.views.slots(), b"I14: the slots of views differ from a recount")


cdef const char* fault_in_view(Pages pages, StitchedView* view) noexcept nogil:
    cdef uint64_t count = 0
    cdef Run run
    cdef Chunk chunk = pages.pool.chunks[view.chunk]
    if (chunk.state & STATE == MAPPED_ELSEWHERE) != (view.state == KEPT) or chunk.ptr != view.address:
        return b"I14: a view's chunk is not as the view says"
    for run in view.runs:
        count += run.count
        if view.state == LIVE and pages.pool.chunks[pages.chunk_of(&run)].state != MAPPED_ELSEWHERE:
            return b"I14: a page is used through a view and through its primary slot at once"
    return unless(count == view.pages, b"I14: the runs of a view are not its pages")


cdef inline const char* unless(cbool sound, const char* fault) noexcept nogil:
    if sound:
        return NULL
    return fault
