"""What a snapshot copies of a pool, in one pass under the lock: no Python object is made there."""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cython.operator cimport dereference as deref, postincrement
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.map cimport map as cmap
from libcpp.vector cimport vector

from bfc._core cimport (
    FREE, IN_USE, MAPPED_ELSEWHERE, NO_CHUNK, NO_PAGE, OWNER_SHIFT, STATE, UNMAPPED, WAITING, BinSet, Chunk,
    ChunkHandle, HistoryRecord, Pool, Region,
)
from bfc.allocators._pages cimport Pages
from bfc.allocators._page_use cimport list_pages

cdef extern from "history.hpp":
    pass
cdef extern from "window.hpp":
    pass

cdef extern from "nothrow.hpp" namespace "bfc" nogil:
    cbool try_push_region_row "bfc::try_push_back"(vector[RegionRow]& items, const RegionRow& item) noexcept
    cbool try_push_chunk_row "bfc::try_push_back"(vector[ChunkRow]& items, const ChunkRow& item) noexcept
    cbool try_push_page "bfc::try_push_back"(vector[uint32_t]& items, const uint32_t& item) noexcept


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
    if owner.is_range and owner.window == NULL and pool.pages != NULL:
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
            if not try_push_region_row(regions, row):
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
    return try_push_chunk_row(chunks, row)


cdef cbool add_pages(Pool pool, vector[uint32_t]& slots, uint64_t start, uint64_t end,
                     vector[uint32_t]& pages) noexcept nogil:
    """Adds the pages of a part of a region, but for those that another thread may be giving back."""
    cdef uint64_t page_size, slot
    if slots.empty():
        return True
    page_size = (<Pages>pool.pages).page_size
    for slot in range(start // page_size, min(end // page_size, <uint64_t>slots.size())):
        if slots[slot] != NO_PAGE and not try_push_page(pages, slots[slot]):
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
