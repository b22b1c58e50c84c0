"""What both policies do where memory is mapped page by page: which range a request may look in, and what a miss does.

A request whose memory must not be mapped takes a region from the sub-allocator, as it would without pages: one that
comes without the GIL, since mapping needs Python, and one that must be a single physical allocation. Such regions stand
in lanes of their own (IN_REGIONS). Requests that no page fits look there, too.
"""

from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport IN_REGIONS, NO_CHUNK, NO_HOST_MEMORY, NO_LANE, ChunkHandle, Region
from bfc.buffers._buffer cimport HOST_STREAM
from bfc.allocators.mapping._address_ranges cimport Faults, raise_faults
from bfc.allocators.mapping._stitching cimport Stitching, Wanted
from bfc.allocators._allocator cimport Allocator, Placement, Request

from bfc.errors import ClosedError, out_of_host_memory
from bfc.suballocators.base import SubAllocator, check_mapping_members
from bfc.units import format_bytes, parse_bytes

cdef enum:
    LARGEST_PAGE = 32 << 20
    PAGES_WANTED = 8192                 # of a device, or fewer: more cost more calls, and save little


cdef int check_mapping_wanted(sub_allocator, str option, wanted, strict, str upstream) except -1:
    """Refuses the option that turns pages on where it cannot be had."""
    if not isinstance(wanted, bool):
        raise TypeError(f"{option} is True or False, not {wanted!r}")
    if not wanted:
        return 0
    if strict:
        raise ValueError(f"strict=True does as {upstream} does, which never stitches: leave strict or {option} out")
    possible = getattr(sub_allocator, "supports_virtual_memory", True)
    if not possible:
        raise ValueError(f"{option} needs a sub-allocator that maps memory: {possible}")
    if isinstance(sub_allocator, SubAllocator):     # any other object is refused later
        check_mapping_members(sub_allocator)
    return 0


cdef uint64_t page_size_for(uint64_t limit, sub_allocator) except 0:
    """The bytes of a page that suit a limit."""
    cdef uint64_t granularity = sub_allocator.mapping_granularity, nbytes = SMALLEST_PAGE
    while nbytes < limit // PAGES_WANTED and nbytes < LARGEST_PAGE:
        nbytes *= 2
    while nbytes < granularity:
        nbytes *= 2
    return nbytes


cdef uint64_t checked_page_size(page_size, uint64_t limit, sub_allocator) except 0:
    cdef uint64_t granularity = sub_allocator.mapping_granularity, nbytes = parse_bytes(page_size)
    if nbytes == 0 or nbytes & (nbytes - 1) or nbytes % granularity:
        raise ValueError(f"page_size is a power of two and a multiple of {format_bytes(granularity)}, the "
                         f"granularity of {sub_allocator!r}, not {page_size!r}")
    if nbytes > limit:
        raise ValueError(f"memory_limit is {format_bytes(limit)}, less than a page of {format_bytes(nbytes)}")
    return nbytes


cdef int set_up_pages(Allocator allocator, page_size, headroom) except -1:
    cdef uint64_t nbytes = checked_page_size(page_size, allocator.limit, allocator.sub_allocator)
    allocator.stitching = Stitching()
    allocator.mapped = allocator.stitching
    allocator.mapped.attach(&allocator.lock, allocator.pool, allocator.source, allocator.fences,
                            allocator.tags)
    allocator.stitching.set_up(allocator.limit, nbytes, headroom)
    allocator.by_stream = allocator.home_stream != HOST_STREAM
    allocator.source.joins_regions = False
    allocator.stitches = True
    return 0


cdef ChunkHandle place_in_pages(Allocator allocator, Request* request) noexcept nogil:
    """Places a request in its stream's ranges, or else in a region. `request.lane` must be set."""
    cdef ChunkHandle handle = NO_CHUNK
    cdef uint64_t thread = request.lane.thread
    if not request.contiguous:
        handle = find_mapped(allocator, allocator.bin_set_of(request), request)
    if handle == NO_CHUNK and not request.tag:
        request.lane.thread |= IN_REGIONS
        if allocator.pool.find_lane(&request.lane) != NO_LANE:
            handle = allocator.pool.allocate_aligned(allocator.bin_set_of(request), request.rounded, request.nbytes,
                                                     request.stream, 0, request.alignment, request.indexed)
        request.lane.thread = thread
    return handle


cdef ChunkHandle find_mapped(Allocator allocator, uint32_t bin_set, Request* request) noexcept nogil:
    cdef ChunkHandle handle
    if bin_set == NO_LANE:
        return NO_HOST_MEMORY
    handle = allocator.pool.allocate_chunk(bin_set, request.rounded, request.nbytes, request.stream, 0, request.indexed)
    if handle == NO_CHUNK:
        handle = allocator.stitching.pages.find_elsewhere(bin_set, request.rounded, request.nbytes, request.stream,
                                                          request.indexed)
    return handle


cdef int map_for(Allocator allocator, Request* request, Placement* placed) except -1 with gil:
    """Makes, moves and stitches pages until the request fits, or nothing more can be done."""
    cdef uint64_t changes, calls
    cdef Wanted wanted = Wanted(request.rounded, request.nbytes, request.stream, request.indexed, NO_CHUNK)
    if request.rounded > allocator.limit:
        return 0
    request.blocked = not allocator.stitching.enter(0)
    if request.blocked:
        return 0
    changes, calls = allocator.stitching.changes, allocator.stitching.count_calls()
    allocator.stitching.is_refused = False
    try:
        if request.tag:
            allocator.tags.refuse_if_asleep(request.tag)
        # Between two locks other threads take and free memory: so each round looks at all of it again.
        while not place_mapped(allocator, request, placed, wanted.handle):
            if not allocator.stitching.provide(bin_set_now(allocator, request), &wanted):
                break
    finally:
        request.asking.changes += allocator.stitching.changes - changes
        allocator.stitching.note_request(calls)
        allocator.stitching.leave()
    return 0


cdef uint32_t bin_set_now(Allocator allocator, Request* request) except? 0xFFFFFFFF:
    allocator.acquire()
    cdef uint32_t bin_set = allocator.bin_set_of(request)
    # Its range may have to be reserved first, without the lock: until then no other lane may get this record.
    allocator.pool.kept_lane = bin_set & ~<uint32_t>1
    allocator.lock.release()
    if bin_set == NO_LANE:
        raise out_of_host_memory()
    return bin_set


cdef bint place_mapped(Allocator allocator, Request* request, Placement* placed, ChunkHandle served) except -1:
    """Serves the request if it fits by now, unless it is `served` already. Returns True if it did, and also if the
    host has no memory."""
    allocator.acquire()
    cdef bint closed = allocator.is_closed
    if not closed:
        allocator.fill(served if served != NO_CHUNK else allocator.place(request), request, placed)
    allocator.lock.release()
    if closed:      # close() could not enter: what was mapped since goes when this thread leaves
        allocator.stitching.must_close = True
        raise ClosedError("this allocator was closed while it asked for memory")
    return placed.handle != NO_CHUNK


cdef int add_region_for(Allocator allocator, Request* request, Placement* placed, uint64_t nbytes) except -1 nogil:
    """Takes a region for a request that must not be mapped, if the limit has room for it."""
    cdef Region block
    cdef cbool fits
    allocator.acquire()
    fits = nbytes <= allocator.limit and allocator.source.taken() <= allocator.limit - nbytes
    request.blocked = not fits and nbytes <= allocator.limit and allocator.source.lasting() <= allocator.limit - nbytes
    if fits:
        allocator.source.set_aside += nbytes    # under the same lock: no other thread may find the limit free
    else:
        allocator.source.refused_bytes.set(0)
    allocator.lock.release()
    if fits and allocator.source.ask(&request.asking, nbytes, &block, True):
        request.lane.thread |= IN_REGIONS
        allocator.take_region(request, placed, &block)
        request.lane.thread &= ~IN_REGIONS
    return 0


cdef int trim_for(Allocator allocator, uint64_t nbytes) except -1 with gil:
    """Releases free pages of so many bytes, as far as there are any, so that a region fits."""
    cdef Faults faults = Faults()
    cdef uint64_t held
    if not allocator.stitching.enter(0):
        return 0
    try:
        # only the mapper makes and releases pages, so the count holds without the lock
        held = allocator.stitching.pages.count * allocator.stitching.page_size
        allocator.stitching.trim(held - min(nbytes, held), True, faults)
    finally:
        allocator.stitching.leave()
    raise_faults(allocator.sub_allocator, faults)
    return 0
