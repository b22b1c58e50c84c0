"""Memory that is mapped page by page, as both policies have it. `Stitching` says which page is mapped where."""

from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport NO_CHUNK, NO_HOST_MEMORY, NO_LANE, ChunkHandle
from bfc.buffers._buffer cimport HOST_STREAM
from bfc.allocators._lock cimport acquire_lock
from bfc.allocators.mapping._address_ranges cimport Faults, raise_faults
from bfc.allocators.mapping._stitching cimport Stitching, Wanted
from bfc.allocators._chunk_allocator cimport ChunkAllocator, Placement, Request
from bfc.allocators._allocator cimport trim_pages
from bfc.backings._backing cimport Backing, grow_mapped, refuse_closed

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
    # The source's granularity wins over the bound: a smaller page cannot be mapped at all.
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


cdef StitchedPages stitched_pages(ChunkAllocator allocator, page_size, headroom):
    """Turns pages on in an allocator that has no memory yet."""
    cdef uint64_t nbytes = checked_page_size(page_size, allocator.limit, allocator.sub_allocator)
    cdef StitchedPages made = StitchedPages()
    made.stitching = Stitching()
    made.stitching.attach(&allocator.lock, allocator.pool, allocator.source, allocator.fences, allocator.tags)
    made.stitching.set_up(allocator.limit, nbytes, headroom)
    allocator.mapped = allocator.stitching = made.stitching
    allocator.streams.by_stream = allocator.streams.home != HOST_STREAM
    # A view of pages may lie right behind a region of the sub-allocator's, and is unmapped by itself.
    allocator.source.joins_regions = False
    return made


cdef class StitchedPages(Backing):
    """Each lane has a range of addresses that pages are mapped to. Where no free chunk is large enough, the pages of
    several get further addresses, end to end."""

    cdef cbool serves(self, ChunkAllocator allocator, Request* request) noexcept nogil:
        # Private pools get regions: a captured graph names addresses, and pages move.
        return may_be_mapped(&request.lane) and not request.contiguous and not request.asking.without_gil

    cdef ChunkHandle find(self, ChunkAllocator allocator, Request* request) noexcept nogil:
        cdef uint32_t bin_set
        cdef ChunkHandle handle
        if request.contiguous or not may_be_mapped(&request.lane):
            return NO_CHUNK
        bin_set = allocator.bin_set_of(request)
        if bin_set == NO_LANE:
            return NO_HOST_MEMORY
        handle = allocator.pool.allocate_chunk(bin_set, request.rounded, request.nbytes, request.stream, 0,
                                               request.indexed)
        if handle == NO_CHUNK:
            # After the best fit, since earlier pages and kept views are taken whole, out of free chunks.
            handle = self.stitching.pages.find_elsewhere(bin_set, request.rounded, request.nbytes, request.stream,
                                                         request.indexed)
        return handle

    cdef int grow(self, ChunkAllocator allocator, Request* request, Placement* placed) except -1 nogil:
        # Before anything is reserved: addresses for it would stay.
        if request.rounded > allocator.limit:
            return 0
        return grow_mapped(self, self.stitching, allocator, request, placed, 0)

    cdef int map_for(self, ChunkAllocator allocator, Request* request, Placement* placed) noexcept nogil:
        """Makes, moves and stitches pages."""
        cdef uint64_t calls = self.stitching.count_calls()
        cdef Wanted wanted = Wanted(request.rounded, request.nbytes, request.stream, request.indexed, NO_CHUNK)
        cdef uint32_t bin_set
        cdef int placed_now = 0, provided = 1
        # Between two locks other threads take and free memory: so each round looks at all of it again.
        while placed_now == 0 and provided > 0:
            # Looked for before anything is mapped: what another thread has freed since the miss costs no call.
            placed_now = self.place(allocator, request, placed, wanted.handle)
            if placed_now == 0:
                bin_set = self.bin_set_now(allocator, request)
                provided = (self.stitching.device.fail_for_memory() if bin_set == NO_LANE else
                            self.stitching.provide(bin_set, &wanted))
        self.stitching.note_request(calls)
        return -1 if placed_now < 0 or provided < 0 else 0

    cdef uint32_t bin_set_now(self, ChunkAllocator allocator, Request* request) noexcept nogil:
        """NO_LANE: the host has no memory for it."""
        acquire_lock(allocator.lock)
        cdef uint32_t bin_set = allocator.bin_set_of(request)
        # Its range may have to be reserved first, without the lock: until then no other lane may get this record.
        allocator.pool.lanes.kept = bin_set & ~<uint32_t>1
        allocator.lock.release()
        return bin_set

    cdef int place(self, ChunkAllocator allocator, Request* request, Placement* placed,
                   ChunkHandle served) noexcept nogil:
        """Serves the request if it fits by now, unless it is `served` already. Returns 1 if it did, and also if the
        host has no memory. -1: the allocator was closed."""
        acquire_lock(allocator.lock)    # another thread may have closed the allocator since the device was asked
        cdef cbool closed = allocator.life.is_closed
        if not closed:
            allocator.fill(served if served != NO_CHUNK else allocator.place(request), request, placed)
        allocator.lock.release()
        return refuse_closed(self.stitching) if closed else placed.handle != NO_CHUNK

    cdef int make_room(self, ChunkAllocator allocator, Request* request, uint64_t nbytes) except -1 nogil:
        # To trim may raise, and waits for streams with the GIL.
        if request.asking.without_gil or self.serves(allocator, request):
            return False
        self.trim_for(allocator, nbytes)
        return True

    cdef uint64_t release(self, ChunkAllocator allocator) except? 0xFFFFFFFFFFFFFFFF:
        return 0 if allocator.life.is_closed else trim_pages(allocator, 0, True)

    cdef int trim_for(self, ChunkAllocator allocator, uint64_t nbytes) except -1 with gil:
        """Releases free pages of so many bytes, as far as there are any."""
        cdef Faults faults = Faults()
        cdef uint64_t held
        if not self.stitching.enter(0):
            return 0
        try:
            # only the mapper makes and releases pages, so the count holds without the lock
            held = self.stitching.pages.count * self.stitching.page_size
            self.stitching.trim(held - min(nbytes, held), True, faults)
        finally:
            self.stitching.leave()
        raise_faults(allocator.sub_allocator, faults)
        return 0
