"""Which pages are used through which addresses, and how much of each: for snapshots and for refusals. All functions
need the allocator's lock, and change nothing."""

from cython.operator cimport dereference as deref, postincrement
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.map cimport map as cmap
from libcpp.vector cimport vector

from bfc._core cimport (
    IN_USE, MINIMUM_SIZE, NO_CHUNK, NO_PAGE, STATE, WAITING, BinSet, Chunk, ChunkHandle, Pool, Region, Window,
    round_up,
)
from bfc.allocators._pages cimport Pages, Run, View

cdef extern from "window.hpp":
    pass

cdef extern from "nothrow.hpp" namespace "bfc" nogil:
    cbool try_push_page "bfc::try_push_back"(vector[uint32_t]& items, const uint32_t& item) noexcept
    cbool try_push_count "bfc::try_push_back"(vector[uint64_t]& items, const uint64_t& item) noexcept

cdef enum:
    SPARSE = 10         # a page is sparse if less than this part of it is in use


cdef cbool list_pages(Pages pages, ChunkHandle first, vector[uint32_t]& numbers) noexcept nogil:
    """Adds the pages of the region that begins with a chunk, slot by slot. A view that is not in use has none. False:
    the host is out of memory."""
    cdef Window* window = window_of(pages, first)
    cdef View* view = view_of(pages, first)
    cdef cbool listed = True
    cdef Run run
    cdef size_t slot
    if window != NULL:
        for slot in range(window.slots()):
            listed = listed and try_push_page(numbers, window.page_at(slot))
    elif view != NULL:
        for run in view.runs:
            window = pages.pool.bin_sets[run.set].window
            for slot in range(run.first, run.first + run.count):
                listed = listed and try_push_page(numbers, window.page_at(slot))
    return listed


cdef cbool count_use(Pages pages, PageUse* use) noexcept nogil:
    """How many pages there are, and how many of them are in use and sparse. False: the host is out of memory."""
    cdef cmap[uint64_t, Region].iterator it = pages.pool.regions.begin()
    cdef vector[uint64_t] used
    cdef ChunkHandle handle
    cdef Chunk* chunk
    cdef uint64_t nbytes
    while used.size() < pages.records.size():
        if not try_push_count(used, 0):
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
    cdef Window* window = window_of(pages, handle)
    cdef View* view = view_of(pages, handle)
    cdef uint64_t at = chunk.ptr, end = chunk.ptr + chunk.size, next_page, left
    cdef Run run
    cdef size_t slot
    if window != NULL:
        while at < end:
            slot = window.slot_at(at)
            next_page = min(end, window.address_of(slot + 1))
            if window.page_at(slot) != NO_PAGE:
                used[window.page_at(slot)] += next_page - at
            at = next_page
    elif view != NULL:
        left = min(chunk.size, round_up(max(chunk.requested_size, <uint64_t>1), MINIMUM_SIZE))
        for run in view.runs:
            window = pages.pool.bin_sets[run.set].window
            for slot in range(run.first, run.first + run.count):
                if window.page_at(slot) != NO_PAGE:
                    used[window.page_at(slot)] += min(left, pages.page_size)
                left -= min(left, pages.page_size)


cdef Window* window_of(Pages pages, ChunkHandle handle) noexcept nogil:
    """The slots of the range that a chunk lies in; NULL: it lies in none."""
    return pages.pool.bin_sets[pages.pool.chunks[handle].bin_set].window


cdef View* view_of(Pages pages, ChunkHandle handle) noexcept nogil:
    """The view in use whose chunk this is, or NULL."""
    cdef Chunk* chunk = &pages.pool.chunks[handle]
    cdef BinSet* owner = &pages.pool.bin_sets[chunk.bin_set]
    if not owner.is_range or owner.window != NULL or owner.asleep or chunk.state & STATE not in (IN_USE, WAITING):
        return NULL
    return &pages.views.at(pages.views.of_chunk(handle))
