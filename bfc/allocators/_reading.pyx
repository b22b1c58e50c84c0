"""What can be read from a pool, changing nothing but peaks: its totals, what a snapshot copies (in one pass under the
lock, with no Python object made there), and which pages are used through which addresses.

Functions that do not take the lock themselves need it.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cython.operator cimport dereference as deref, postincrement
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.map cimport map as cmap
from libcpp.vector cimport vector

from bfc.native.nothrow cimport try_push_back
from bfc._core cimport (
    FREE, IN_USE, MAPPED_ELSEWHERE, MINIMUM_SIZE, NO_CHUNK, NO_PAGE, OWNER_SHIFT, STATE, UNMAPPED, WAITING, BinSet,
    Chunk, ChunkHandle, Counters, HistoryRecord, Pool, Region, PageBitmap, round_up,
)
from bfc.buffers._scopes cimport name_of_owner
from bfc.allocators._pages cimport Pages, Run, StitchedView
from bfc.allocators._lock cimport Lock, acquire_lock

from bfc.errors import InvalidPointerError, PagesInUse
from bfc.snapshots import snapshot as _snapshot

cdef extern from "history.hpp":
    pass
cdef extern from "page_bitmap.hpp":
    pass


cdef cbool copy_columns(Pool pool, vector[RegionRow]& regions, vector[ChunkRow]& chunks,
                        vector[uint32_t]& pages) noexcept nogil:
    """Every region and every chunk in address order, and the regions' pages. In a range, each run of chunks that have
    memory counts as a region of its own. Needs the lock, and changes nothing. False: the host is out of memory."""
    cdef cmap[uint64_t, Region].iterator it = pool.regions.begin()
    cdef vector[uint32_t] slots
    while it != pool.regions.end():
        slots.clear()
        if pool.pages != NULL and not list_pages(<Pages>pool.pages, deref(it).second.first, slots):
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
    row.kind = owner.kind
    row.flags = IN_RANGE if owner.is_range else 0
    if owner.asleep:
        row.flags |= ASLEEP
    if owner.is_range and owner.bitmap == NULL and pool.pages != NULL:
        row.flags |= IS_VIEW
    while handle != NO_CHUNK:
        row.ptr = end = pool.chunks[handle].ptr
        while handle != NO_CHUNK and pool.chunks[handle].state not in (UNMAPPED, MAPPED_ELSEWHERE):
            end = pool.chunks[handle].ptr + pool.chunks[handle].size
            if not add_chunk(pool, &pool.chunks[handle], chunks):
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


cdef inline cbool add_chunk(Pool pool, Chunk* chunk, vector[ChunkRow]& chunks) noexcept nogil:
    cdef uint32_t state = chunk.state & STATE
    cdef cbool in_use = state == IN_USE or state == WAITING
    cdef ChunkRow row
    row.ptr = chunk.ptr
    row.size = chunk.size
    row.requested_size = chunk.requested_size if in_use else 0
    row.last_requested_size = chunk.requested_size if pool.usage != NULL and not in_use else 0
    row.stream = chunk.stream
    row.freed_at_count = chunk.freed_at_count if pool.usage == NULL else 0
    row.allocation_id = chunk.allocation_id
    row.state = (ROW_FREE if state == FREE else ROW_IN_USE if state == IN_USE else ROW_WAITING if state == WAITING
                 else ROW_LEAVING)
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
    use.page_size = pages.page_size
    use.pages = count_awake(pages.pool) // pages.page_size
    use.in_use = use.sparse = 0
    for nbytes in used:
        use.in_use += nbytes > 0
        use.sparse += 0 < nbytes and nbytes * SPARSE < pages.page_size
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
    return pages.pool.bin_sets[pages.pool.chunks[handle].bin_set].bitmap


cdef StitchedView* view_of(Pages pages, ChunkHandle handle) noexcept nogil:
    """The view in use whose chunk this is, or NULL."""
    cdef Chunk* chunk = &pages.pool.chunks[handle]
    cdef BinSet* owner = &pages.pool.bin_sets[chunk.bin_set]
    if not owner.is_range or owner.bitmap != NULL or owner.asleep or chunk.state & STATE not in (IN_USE, WAITING):
        return NULL
    return &pages.views.at(pages.views.of_chunk(handle))


cdef extern from "bins.hpp":
    pass
cdef extern from "usage.hpp":
    pass
cdef extern from "page_bitmap.hpp":
    pass


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
    cdef uint64_t total = pool.chunk_count * sizeof(Chunk) + pool.starts.bytes()
    cdef BinSet bin_set
    for bin_set in pool.bin_sets:
        total += bin_set.bins.bytes() + (bin_set.bitmap.bytes() if bin_set.bitmap != NULL else 0)
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
    return handle


cdef Counters start_peaks(Pool pool, Lock& lock) noexcept:
    """Restarts the peaks of bytes. Returns the counters as they were, for end_peaks."""
    acquire_lock(lock)
    cdef Counters before = pool.totals()
    pool.restart_peaks()
    if pool.usage != NULL:
        pool.usage.restart_bytes_peak()
    lock.release()
    return before


cdef Counters end_peaks(Pool pool, Lock& lock, Counters before) noexcept:
    """The peaks since start_peaks."""
    cdef Counters* counters = &pool.counters
    acquire_lock(lock)
    cdef Counters since = pool.totals()
    if pool.usage != NULL:
        pool.usage.merge_bytes_peak(before.peak_bytes_in_use)
    counters.peak_bytes_in_use = max(since.peak_bytes_in_use, before.peak_bytes_in_use)
    counters.peak_pool_bytes = max(since.peak_pool_bytes, before.peak_pool_bytes)
    lock.release()
    return since


cdef Chunk chunk_at(Pool pool, Lock& lock, uint64_t address) except *:
    """A copy of the live chunk that starts at an address."""
    cdef Chunk chunk
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
    if pool.pages == NULL:
        return None
    acquire_lock(lock)
    cdef cbool counted = count_use(<Pages>pool.pages, &use)
    lock.release()
    return PagesInUse(use.page_size, use.pages, use.in_use, use.sparse) if counted else None


cdef int raise_invalid_pointer(Pool pool, Lock& lock, uint64_t address) except -1:
    """Raises InvalidPointerError, with what lies at the address."""
    cdef Chunk chunk
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
