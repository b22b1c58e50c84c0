"""What both policies do where memory is mapped page by page: which range a request may look in, and what a miss does.

A request whose memory must not be mapped takes a region from the sub-allocator, as it would without pages: one that
comes without the GIL, since mapping needs Python, and one that must be a single physical allocation. Such regions stand
in lanes of their own (IN_REGIONS). Requests that no page fits look there, too.
"""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport IN_REGIONS, NO_CHUNK, NO_HOST_MEMORY, NO_LANE, ChunkHandle, Region
from bfc.buffers._arguments cimport address_from
from bfc.buffers._buffer cimport HOST_STREAM, Buffer
from bfc.allocators._extending cimport extend_chunk
from bfc.allocators._reading cimport chunk_at, is_asleep_in
from bfc.allocators._invariants cimport fault_in_pages
from bfc.allocators._frees cimport AGAIN, QUERY, WAIT
from bfc.allocators._tags cimport no_mapping
from bfc.allocators._allocator cimport Allocator, Placement, Request
from bfc.mapping._calls cimport Faults, raise_faults
from bfc.mapping._sleep cimport put_tags_to_sleep, wake_tags
from bfc.mapping._stitching cimport Stitching, Wanted

from bfc.errors import ClosedError, InvariantError, out_of_host_memory
from bfc.suballocators.base import SubAllocator, check_mapping_members
from bfc.units import format_bytes, parse_bytes

cdef extern from "debug.h":
    const int BFC_DEBUG

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


@cython.no_gc_clear
cdef class PagedAllocator(Allocator):
    """Memory that is mapped page by page, for both policies."""

    cdef int set_up_pages(self, page_size, headroom) except -1:
        cdef uint64_t nbytes = checked_page_size(page_size, self.limit, self.sub_allocator)
        self.stitching = Stitching()
        self.stitching.attach(&self.lock, self.pool, self.source, self.fences, &self.tags.asleep)
        self.stitching.set_up(self.limit, nbytes, headroom)
        self.by_stream = self.home_stream != HOST_STREAM
        self.source.joins_regions = False
        self.stitches = True
        return 0

    cdef ChunkHandle place_in_pages(self, Request* request) noexcept nogil:
        """Places a request in its stream's ranges, or else in a region. `request.lane` must be set."""
        cdef ChunkHandle handle = NO_CHUNK
        cdef uint64_t thread = request.lane.thread
        if not request.contiguous:
            handle = self.find_mapped(self.bin_set_of(request), request)
        if handle == NO_CHUNK and not request.tag:
            request.lane.thread |= IN_REGIONS
            if self.pool.find_lane(&request.lane) != NO_LANE:
                handle = self.pool.allocate_chunk(self.bin_set_of(request), request.rounded, request.nbytes,
                                                  request.stream, 0, request.indexed)
            request.lane.thread = thread
        return handle

    cdef ChunkHandle find_mapped(self, uint32_t bin_set, Request* request) noexcept nogil:
        cdef ChunkHandle handle
        if bin_set == NO_LANE:
            return NO_HOST_MEMORY
        handle = self.pool.allocate_chunk(bin_set, request.rounded, request.nbytes, request.stream, 0, request.indexed)
        if handle == NO_CHUNK:
            handle = self.stitching.pages.find_elsewhere(bin_set, request.rounded, request.nbytes, request.stream,
                                                         request.indexed)
        return handle

    cdef int map_for(self, Request* request, Placement* placed) except -1 with gil:
        """Makes, moves and stitches pages until the request fits, or nothing more can be done."""
        cdef uint64_t changes, calls
        cdef Wanted wanted = Wanted(request.rounded, request.nbytes, request.stream, request.indexed, NO_CHUNK)
        if request.rounded > self.limit:
            return 0
        request.blocked = not self.stitching.enter(0)
        if request.blocked:
            return 0
        changes, calls = self.stitching.changes, self.stitching.count_calls()
        self.stitching.is_refused = False
        try:
            if request.tag:
                self.tags.refuse_if_asleep(request.tag)
            while not self.place_mapped(request, placed, wanted.handle):
                if not self.stitching.provide(self.bin_set_now(request), &wanted):
                    break
        finally:
            request.asking.changes += self.stitching.changes - changes
            self.stitching.note_request(calls)
            self.stitching.leave()
        return 0

    cdef uint32_t bin_set_now(self, Request* request) except? 0xFFFFFFFF:
        self.acquire()
        cdef uint32_t bin_set = self.bin_set_of(request)
        self.pool.kept_lane = bin_set & ~<uint32_t>1
        self.lock.release()
        if bin_set == NO_LANE:
            raise out_of_host_memory()
        return bin_set

    cdef bint place_mapped(self, Request* request, Placement* placed, ChunkHandle served) except -1:
        """Serves the request if it fits by now, unless it is `served` already. Returns True if it did, and also if the
        host has no memory."""
        self.acquire()
        cdef bint closed = self.is_closed
        if not closed:
            self.fill(served if served != NO_CHUNK else self.place(request), request, placed)
        self.lock.release()
        if closed:
            self.stitching.must_close = True
            raise ClosedError("this allocator was closed while it asked for memory")
        return placed.handle != NO_CHUNK

    cdef int check_books(self) except -1:
        cdef const char* fault = NULL
        Allocator.check_books(self)
        if not self.stitches:
            return 0
        self.acquire()
        if not self.is_closed:
            fault = fault_in_pages(self.stitching.pages)
        self.lock.release()
        if fault != NULL:
            raise InvariantError(fault.decode())
        return 0

    cdef int give_up_ranges(self) except -1:
        return self.stitching.give_all_back() if self.stitches else 0

    cdef int add_region_for(self, Request* request, Placement* placed, uint64_t nbytes) except -1 nogil:
        """Takes a region for a request that must not be mapped, if the limit has room for it."""
        cdef Region block
        cdef cbool fits
        self.acquire()
        fits = nbytes <= self.limit and self.source.taken() <= self.limit - nbytes
        request.blocked = not fits and nbytes <= self.limit and self.source.lasting() <= self.limit - nbytes
        if fits:
            self.source.set_aside += nbytes     # under the same lock: no other thread may find the limit free meanwhile
        else:
            self.source.refused_bytes.set(0)
        self.lock.release()
        if fits and self.source.ask(&request.asking, nbytes, &block, True):
            request.lane.thread |= IN_REGIONS
            self.take_region(request, placed, &block)
            request.lane.thread &= ~IN_REGIONS
        return 0

    cdef int trim_for(self, uint64_t nbytes) except -1 with gil:
        """Releases free pages of so many bytes, as far as there are any, so that a region fits."""
        cdef Faults faults = Faults()
        cdef uint64_t held
        if not self.stitching.enter(0):
            return 0
        try:
            held = self.stitching.pages.count * self.stitching.page_size
            self.stitching.trim(held - min(nbytes, held), True, faults)
        finally:
            self.stitching.leave()
        raise_faults(self.sub_allocator, faults)
        return 0

    cdef object put_to_sleep(self, dict ways):
        if not self.stitches:
            raise no_mapping(self)
        return put_tags_to_sleep(self, self.stitching, ways)

    cdef int wake_up(self, list tags, object fill) except -1:
        return wake_tags(self, self.stitching, tags, fill, self.limit) if self.stitches else 0

    cdef uint64_t bytes_asleep(self) noexcept:
        return self.stitching.bytes_asleep() if self.tags.asleep.size() else 0

    def page_stats(self):
        """How much memory is mapped, and what was called for that, of an allocator that maps page by page.

        Returns
        -------
        dict of str to int or float
            `page_size` in bytes; `pages`, all that were made and not released; `pages_owned`, those
            of which at least a part is in use; `views`; `slots_mapped`, how many addresses pages
            are mapped at; `stitches`, the views made so far; `creates`, `maps` (of pages),
            `set_accesses`, `unmaps`, `releases`, the calls so far; `stream_waits`, how often a
            stream had to wait for another one's work; `most_calls_of_a_request`; `lost_slots`,
            those that could not be unmapped; `driver_seconds`, the time in these calls.

        Raises
        ------
        ValueError
            If the allocator has neither `virtual_memory` nor `stitch`.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), virtual_memory=True)
        >>> address = allocator.allocate_raw(5 << 20)
        >>> allocator.page_stats()["pages"]
        3
        """
        if not self.stitches:
            self.require_pages("page_stats")
        return self.stitching.stats()

    def trim(self, keep=0, *, wait=False):
        """Give free pages back, of an allocator that maps page by page. Their addresses stay reserved.

        Parameters
        ----------
        keep : int or str, optional
            The bytes to keep: free pages go until no more than that is reserved, or no page is free.
        wait : bool, optional
            Wait for the streams that may still use them. If False, the pages of streams that are busy
            stay.

        Returns
        -------
        int
            The bytes given back.

        Raises
        ------
        ValueError
            If the allocator has neither `virtual_memory` nor `stitch`, or if `keep` is negative or malformed.
        SubAllocatorError
            If the device failed. What it did not take back is offered again by the next call.

        Notes
        -----
        Pages that have one address go first, and the largest free chunks before smaller ones. Then the
        views go, and the pages behind them. Cost: one call to unmap each row of pages, and one to
        release each page.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), virtual_memory=True)
        >>> allocator.deallocate_raw(allocator.allocate_raw(64 << 20))
        >>> allocator.trim("16 MiB")
        50331648
        """
        cdef uint64_t kept = parse_bytes(keep), released
        cdef Faults faults = Faults()
        self.require_pages("trim")
        self.frees.drain(QUERY | AGAIN | (WAIT if wait else 0))
        if not self.stitching.enter(0):
            return 0        # another thread maps: it needs memory
        try:
            released = self.stitching.trim(kept, bool(wait), faults)
        finally:
            self.stitching.leave()
        raise_faults(self.sub_allocator, faults)
        if BFC_DEBUG >= 2 and self.pool.check_is_due():
            self.check_books()
        return released

    def try_extend(self, buffer, nbytes):
        """Make an allocation larger where it is, without a copy.

        Parameters
        ----------
        buffer : Buffer or int
            The allocation, or its address.
        nbytes : int or str
            Its new size in bytes, from its present one on.

        Returns
        -------
        bool
            True if what lies behind it was free, or could be mapped. If False, nothing has changed.

        Raises
        ------
        InvalidPointerError
            If it is no live allocation of this allocator.
        ValueError
            If `nbytes` is less than the present size, or malformed.
        TypeError
            If an argument has the wrong type.
        ClosedError
            If the allocator is closed.

        Notes
        -----
        Where memory is mapped page by page, new pages are mapped behind a chunk that is the last of its
        range. A view, which is what a request was stitched for, only grows up to its last page.

        Cost: O(log n) if enough is free behind it, otherwise the calls that map pages.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), virtual_memory=True)
        >>> cache = allocator.allocate("64 MiB")
        >>> allocator.try_extend(cache, "96 MiB"), cache.nbytes
        (True, 100663296)
        """
        cdef Buffer owned = None
        cdef uint64_t size = parse_bytes(nbytes), rounded = self.rounded_size(size), address
        if self.is_closed:
            raise ClosedError("this allocator is closed")
        if isinstance(buffer, Buffer):
            owned = self.own_buffer(buffer)
        address = address_from(buffer) if owned is None else owned.start
        cdef uint64_t present = chunk_at(self.pool, self.lock, address).requested_size
        if size < present:
            raise ValueError(f"{address:#x} has {present} bytes, and would have {size}: try_extend makes nothing "
                             f"smaller")
        if not self.extend_now(address, rounded, size):
            if not self.stitches or not self.map_behind(address, rounded):
                return False
            if not self.extend_now(address, rounded, size):
                return False    # another thread has taken it
        if owned is not None:
            owned.nbytes = size
        return True

    cdef uint64_t rounded_size(self, uint64_t nbytes) noexcept:
        cdef Request request
        self.acquire()
        self.set_request(&request, nbytes, self.home_stream)
        self.lock.release()
        return request.rounded

    cdef bint extend_now(self, uint64_t address, uint64_t rounded, uint64_t nbytes) except -1:
        self.acquire()
        cdef ChunkHandle handle = self.pool.handle_of(address)
        cdef bint asleep = handle != NO_CHUNK and is_asleep_in(self.pool, handle)
        cdef bint done = handle != NO_CHUNK and not asleep and extend_chunk(self.pool, handle, rounded, nbytes)
        cdef int64_t allocation_id = self.pool.chunks[handle].allocation_id if asleep else 0
        self.lock.release()
        if asleep:
            raise self.why_not(handle, allocation_id)
        return done

    cdef bint map_behind(self, uint64_t address, uint64_t rounded) except -1:
        """Maps the memory that an allocation lacks for its new size, if its range is unmapped behind it. Returns
        whether it did."""
        cdef uint64_t calls
        if not self.stitching.enter(0):
            return False
        calls = self.stitching.count_calls()
        try:
            return self.stitching.grow_behind(address, rounded)
        finally:
            self.stitching.note_request(calls)
            self.stitching.leave()

    cdef uint64_t release_pages(self) except? 0xFFFFFFFFFFFFFFFF:
        return self.trim(0, wait=True) if self.stitches and not self.is_closed else 0

    cdef uint64_t bytes_not_released(self) noexcept:
        return self.stitching.unreleased_bytes() if self.stitches else 0

    cdef int require_pages(self, str method) except -1:
        if self.is_closed:
            raise ClosedError("this allocator is closed")
        if not self.stitches:
            raise ValueError(f"{method} is for BFCAllocator(virtual_memory=True) and CachingAllocator(stitch=True)")
        return 0
