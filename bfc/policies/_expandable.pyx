"""PyTorch's expandable segments: ranges of reserved addresses into which memory is mapped piece by piece.

The sub-allocator is called with the GIL and without the lock. One thread at a time maps and unmaps, between `enter` and
`leave`; the others allocate and free meanwhile. Numbers of behaviour are those of docs/behaviour/pytorch.md.
"""

from bisect import bisect_right

cimport cython
from cpython.number cimport PyNumber_Index
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.interpreter._signals cimport Deferral, defer_handlers, resume_handlers
from bfc._core cimport FREE, LEAVING, NO_CHUNK, NO_HOST_MEMORY, SMALL, UNMAPPED, Chunk, ChunkHandle, Pool
from bfc.allocators._lock cimport Lock, acquire_lock
from bfc.allocators._ranges cimport (
    add_range, begin_mapping, begin_unmapping, cancel_mapping, cancel_unmapping, end_mapping, end_unmapping,
    remove_range,
)
from bfc.allocators._source cimport Source
from bfc.policies._private_pools cimport PoolId
from bfc.policies._releasing cimport list_in_ranges

from bfc.errors import SettingsError, SubAllocatorError, out_of_host_memory
from bfc.suballocators.base import checked_memory_info
from bfc.units import format_bytes

cdef extern from "nothrow.hpp" namespace "bfc" nogil:
    cbool try_push_handle "bfc::try_push_back"(vector[ChunkHandle]& items, ChunkHandle item) noexcept
    cbool try_push_part "bfc::try_push_back"(vector[FreePart]& items, const FreePart& item) noexcept

cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident() nogil

cdef enum:
    SMALL_SLOT = 2 << 20

_POLL_SECONDS = 0.001


cdef inline uint64_t round_up_to(uint64_t size, uint64_t step) noexcept nogil:
    return (size + step - 1) // step * step


cdef cbool is_start(Pool pool, const Growing* growing, uint32_t state) noexcept nogil:
    """Whether the chosen chunk is there still, in this state. Its record may be another chunk's by now."""
    cdef Chunk* chunk = &pool.chunks[growing.start]
    return chunk.state == state and chunk.ptr == growing.ptr and chunk.bin_set == growing.bin_set


cdef cbool is_run_of(Pool pool, ChunkHandle first, uint64_t size) noexcept nogil:
    """Whether free and unmapped chunks, from this one on, have so many bytes together."""
    cdef ChunkHandle handle = first
    cdef uint64_t found = 0
    while found < size and handle != NO_CHUNK and pool.chunks[handle].state in (FREE, UNMAPPED):
        found += pool.chunks[handle].size
        handle = pool.chunks[handle].next
    return found >= size


cdef uint64_t call_reserve(sub_allocator, uint64_t nbytes) except 0:
    address = sub_allocator.reserve(nbytes)
    if address is None:
        raise SubAllocatorError(
            f"{sub_allocator!r} has no {format_bytes(nbytes)} of addresses left to reserve. That is no lack of memory: "
            f"each stream and private pool reserves so much. Use fewer of them, or expandable_segments:False")
    address = PyNumber_Index(address)
    if not 0 < address < 1 << 63 or address % sub_allocator.mapping_granularity:
        sub_allocator.unreserve(address, nbytes)
        raise SubAllocatorError(
            f"{sub_allocator!r}.reserve returned {address:#x}: it must be above 0, a multiple of mapping_granularity")
    return address


cdef object call_create(sub_allocator, uint64_t nbytes):
    try:
        return sub_allocator.create(nbytes)
    except MemoryError:
        return None


cdef bint lies_in(uint64_t address, runs) except -1:
    """Whether an address lies in one of these (address, bytes)."""
    for start, size in runs:
        if start <= address < start + size:
            return True
    return False


cdef int check_mapping(sub_allocator) except -1:
    possible = sub_allocator.supports_virtual_memory
    if not possible:
        raise SettingsError(f"expandable segments need a source that maps memory: {possible}",
                            key="expandable_segments", given="True", allowed="False with this source",
                            hint="max_split_size_mb or garbage_collection_threshold, against fragmentation")
    return 0


cdef int raise_faults(sub_allocator, list faults) except -1:
    """Raises what the sub-allocator failed with while memory went back: a Ctrl-C as it is."""
    for fault in faults:
        if not isinstance(fault, Exception):
            raise fault
    if faults:
        raise SubAllocatorError(f"{sub_allocator!r} failed {len(faults)} time(s) to take memory back, first with "
                                f"{faults[0]!r}; release_free_regions() and close() try again") from faults[0]
    return 0


cdef void list_parts(Pool pool, PoolId id, uint32_t kind, vector[FreePart]& out) noexcept nogil:
    """A pool's free chunks of one kind in ranges, by (stream, size, address). Needs the lock."""
    cdef vector[ChunkHandle] free
    cdef ChunkHandle handle
    list_in_ranges(pool, id, kind, free)
    for handle in free:
        if not try_push_part(out, FreePart(handle, pool.chunks[handle].ptr, pool.chunks[handle].size)):
            return


@cython.final
@cython.no_gc_clear
cdef class Range:
    """Reserved addresses for one stream, one pool, and small or large chunks: slots of one size, each with a page of
    memory or with none."""


def _start_of(Range range not None):
    """The address that ranges are ordered by."""
    return range.ptr


@cython.final
@cython.no_gc_clear
cdef class ExpandableSegments:
    """The ranges of an allocator, and what is mapped in them. It never calls the allocator."""

    def __cinit__(self):
        self.ranges = []
        self.unreleased = []

    cdef int stand_behind(self, Lock* lock, Pool pool, Source source) except -1:
        """Takes the allocator's lock, which must live as long, its pool and its source."""
        self.lock = lock
        self.pool = pool
        self.source = source
        return 0

    cdef bint enter(self) except -1:
        """Lets this thread map and unmap. False: another thread does, or this one in a call further up."""
        cdef cbool entered
        if not self.source.begin_call(0, 0):
            raise out_of_host_memory()
        acquire_lock(self.lock[0])
        # a thread that is in no call any more did not come through a fork, or the interpreter's shutdown stopped it
        entered = self.mapper == 0 or not self.source.is_listed(self.mapper)
        if entered:
            self.mapper = PyThread_get_thread_ident()
        self.lock.release()
        if not entered:
            self.source.end_call(True, 0)
        return entered

    cdef int leave(self) except -1:
        acquire_lock(self.lock[0])
        self.mapper = 0
        self.count = len(self.ranges) + len(self.unreleased)
        self.lock.release()
        self.source.end_call(True, 0)
        return 0

    cdef uint64_t slot_of(self, Growing* growing) noexcept nogil:
        """The bytes of a page in a range of that kind."""
        cdef uint64_t slot = SMALL_SLOT
        acquire_lock(self.lock[0])
        if self.pool.bin_sets[growing.bin_set].kind != SMALL:
            slot = self.pool.sizes.large_segment
        self.lock.release()
        return slot

    cdef cbool are_some(self) noexcept nogil:
        """Whether there are any, or pages to be given back."""
        return self.count > 0

    # -- growing ------------------------------------------------------------------------------------------------------

    cdef ChunkHandle ready(self, Growing* growing) noexcept nogil:
        """The chunk that has become large enough, or NO_CHUNK. Needs the lock."""
        cdef ChunkHandle handle = growing.start
        if handle != NO_CHUNK and is_start(self.pool, growing, FREE) and self.pool.chunks[handle].size >= growing.size:
            return handle
        return NO_CHUNK

    cdef bint map_more(self, Growing* growing) except -1:
        """Reserves addresses or maps memory, so that a chunk comes nearer to the size that is wanted. False: there is
        no memory."""
        cdef uint64_t nbytes = 0
        cdef ChunkHandle handle
        cdef bint is_ready
        acquire_lock(self.lock[0])
        handle = self.next_to_map(growing, &nbytes)
        is_ready = self.ready(growing) != NO_CHUNK
        self.lock.release()
        if is_ready:
            return True         # cached memory that a search passes over, for max_split_size (EX-24)
        if handle != NO_CHUNK:
            return self.map_front(self.range_of(self.pool.chunks[handle].ptr), handle, nbytes)
        if growing.has_reserved:
            return False    # the device says that it has less memory than it has given
        self.reserve(growing)
        growing.has_reserved = True
        return True

    cdef ChunkHandle next_to_map(self, Growing* growing, uint64_t* nbytes):
        """The unmapped chunk whose first `nbytes` come next, or NO_CHUNK. Needs the lock."""
        cdef ChunkHandle handle
        cdef Chunk* chunk
        if growing.start == NO_CHUNK or not (is_start(self.pool, growing, FREE)
                                             or is_start(self.pool, growing, UNMAPPED)):
            self.choose_start(growing)
        if growing.start == NO_CHUNK:
            return NO_CHUNK
        handle = growing.start
        chunk = &self.pool.chunks[handle]
        nbytes[0] = growing.size
        if chunk.state == FREE and chunk.size >= growing.size:
            return NO_CHUNK
        if chunk.state == FREE:
            nbytes[0] -= chunk.size
            handle = chunk.next
        if handle == NO_CHUNK or self.pool.chunks[handle].state != UNMAPPED:
            growing.start = NO_CHUNK    # the range ends here, or another thread was faster
            return NO_CHUNK
        nbytes[0] = min(nbytes[0], self.pool.chunks[handle].size)
        return handle

    cdef int choose_start(self, Growing* growing):
        """Chooses the first run of free and unmapped chunks, by address, that is large enough (PyTorch's behaviour,
        E5). Needs the lock."""
        cdef Range range
        cdef ChunkHandle hole, start
        growing.start = NO_CHUNK
        for range in self.ranges:
            if range.bin_set != growing.bin_set or not range.is_known:
                continue
            for hole in range.holes:
                start = self.pool.chunks[hole].prev
                if start == NO_CHUNK or self.pool.chunks[start].state != FREE:
                    start = hole
                if is_run_of(self.pool, start, growing.size):
                    growing.start = start
                    growing.ptr = self.pool.chunks[start].ptr
                    return 0
        return 0

    cdef int reserve(self, Growing* growing) except -1:
        """Reserves addresses for all of the device's memory, and an eighth more (PyTorch's behaviour, E2)."""
        cdef object sub_allocator = self.source.sub_allocator
        cdef Range range = Range()
        _free, total = checked_memory_info(sub_allocator.memory_info(), sub_allocator)
        range.slot = round_up_to(self.slot_of(growing), 1 if self.strict else sub_allocator.mapping_granularity)
        acquire_lock(self.lock[0])
        range.stream = self.pool.bin_sets[growing.bin_set].lane.stream
        self.lock.release()
        range.nbytes = round_up_to(total + total // 8, range.slot)
        range.bin_set = growing.bin_set
        range.pages = {}
        range.holes.reserve(2)
        self.ranges.append(None)    # room, before there is something to put there
        self.ranges.pop()
        address = call_reserve(sub_allocator, range.nbytes)
        try:
            range.ptr = address
            self.take_in(range, growing)
        except BaseException:
            sub_allocator.unreserve(address, range.nbytes)
            raise
        return 0

    cdef int take_in(self, Range range, Growing* growing) except -1:
        cdef ChunkHandle handle = NO_HOST_MEMORY
        cdef cbool overlaps
        place = bisect_right(self.ranges, range.ptr, key=_start_of)
        acquire_lock(self.lock[0])
        overlaps = self.pool.overlaps_region(range.ptr, range.nbytes)
        if not overlaps:
            handle = add_range(self.pool, range.ptr, range.nbytes, range.bin_set)
        if handle != NO_HOST_MEMORY:
            range.is_known = True
            self.note_holes(range, handle)
            growing.start = handle
            growing.ptr = range.ptr
        self.lock.release()
        if overlaps:
            raise SubAllocatorError(f"{self.source.sub_allocator!r}.reserve returned {range.ptr:#x}, which is in use")
        if handle == NO_HOST_MEMORY:
            raise out_of_host_memory()
        self.ranges.insert(place, range)
        return 0

    cdef Range range_of(self, uint64_t ptr):
        return self.ranges[bisect_right(self.ranges, ptr, key=_start_of) - 1]

    cdef bint map_front(self, Range range, ChunkHandle handle, uint64_t nbytes) except -1:
        """Maps memory to the first bytes of an unmapped chunk, rounded up to whole slots. False: there is none."""
        cdef uint64_t ptr = self.pool.chunks[handle].ptr
        cdef cbool done
        cdef Deferral deferral
        nbytes = round_up_to(nbytes, range.slot)
        range.holes.reserve(range.holes.size() + 2)
        acquire_lock(self.lock[0])
        done = begin_mapping(self.pool, handle, nbytes)
        if done:
            self.note_holes(range, self.pool.chunks[handle].next)
        self.lock.release()
        if not done:
            raise out_of_host_memory()
        defer_handlers(&deferral)
        done = False
        try:
            pages = self.create_pages(range, nbytes)
            if pages is not None:
                self.put_pages(range, ptr, pages)
                done = True
        finally:
            resume_handlers(&deferral)
            if not done:
                self.give_up_mapping(range, handle)
        if done:
            self.finish_mapping(range, handle, nbytes)
        return done

    cdef int give_up_mapping(self, Range range, ChunkHandle handle) except -1:
        cdef Chunk* chunk = &self.pool.chunks[handle]   # nobody else touches an unmapped one
        cdef uint64_t ptr = chunk.ptr, end = chunk.ptr + chunk.size
        cdef bint is_mapped = False
        while ptr < end and not is_mapped:
            is_mapped = ptr in range.pages
            ptr += range.slot
        acquire_lock(self.lock[0])
        cancel_mapping(self.pool, handle, is_mapped)
        self.note_holes(range, NO_CHUNK)
        self.lock.release()
        if is_mapped:
            self.settle(range, handle)
        return 0

    cdef int finish_mapping(self, Range range, ChunkHandle handle, uint64_t nbytes) except -1:
        cdef uint64_t ptr = self.pool.chunks[handle].ptr
        acquire_lock(self.lock[0])
        cdef cbool done = end_mapping(self.pool, handle)
        self.note_holes(range, NO_CHUNK)
        self.lock.release()
        if not done:
            self.unmap_pages(range, ptr, nbytes, nbytes, [])
            self.give_up_mapping(range, handle)
            raise out_of_host_memory()
        self.note_change()
        return 0

    cdef list create_pages(self, Range range, uint64_t nbytes):
        """So many bytes of new pages, or None: there is no memory for all of them."""
        pages = []
        try:
            while len(pages) * range.slot < nbytes:
                page = call_create(self.source.sub_allocator, range.slot)
                if page is None:
                    break
                pages.append(page)
        except BaseException:
            self.release_pages(pages, range.slot)
            raise
        if len(pages) * range.slot == nbytes:
            return pages
        self.release_pages(pages, range.slot)
        return None

    cdef int put_pages(self, Range range, uint64_t ptr, list pages) except -1:
        """Maps pages, all or none. On an error those that are mapped all the same stay in the range's table."""
        cdef object sub_allocator = self.source.sub_allocator
        mapped = {}
        for page in pages:
            mapped[ptr + len(mapped) * range.slot] = page
        range.pages.update(mapped)
        try:
            sub_allocator.map(ptr, pages)
        except BaseException as error:
            lost = getattr(error, "lost", ())
            for address, page in mapped.items():
                if not lies_in(address, lost):
                    del range.pages[address]
                    self.release_page(page, range.slot, None)
            raise
        try:
            sub_allocator.set_access(ptr, len(pages) * range.slot)
        except BaseException:
            self.unmap_pages(range, ptr, len(pages) * range.slot, len(pages) * range.slot, [])
            raise
        return 0

    cdef int release_pages(self, list pages, uint64_t nbytes) except -1:
        """Releases pages that are mapped nowhere, the first first."""
        for page in pages:
            self.release_page(page, nbytes, None)
        return 0

    cdef int release_page(self, page, uint64_t nbytes, list faults) except -1:
        """Releases a page. If that fails, it is kept for another try, and goes on counting against the limit."""
        try:
            self.source.sub_allocator.release(page)
        except BaseException as error:
            self.unreleased.append((page, nbytes))
            self.source.keep_bytes(nbytes)
            if faults is not None:
                faults.append(error)
        return 0

    # -- giving back --------------------------------------------------------------------------------------------------

    cdef uint64_t give_back(self, vector[FreePart]& parts, list faults) except? 0xFFFFFFFFFFFFFFFF:
        """Unmaps the whole slots inside of free chunks (PyTorch's behaviour, E7). Returns the bytes; what the
        sub-allocator fails with goes to `faults`."""
        cdef uint64_t released = 0
        cdef FreePart part
        cdef Deferral deferral
        defer_handlers(&deferral)
        try:
            for part in parts:
                released += self.unmap_part(self.range_of(part.ptr), &part, faults)
        finally:
            resume_handlers(&deferral)
        return released

    cdef uint64_t unmap_part(self, Range range, FreePart* part, list faults) except? 0xFFFFFFFFFFFFFFFF:
        cdef uint64_t start = range.ptr + round_up_to(part.ptr - range.ptr, range.slot)
        cdef uint64_t end = range.ptr + (part.ptr + part.size - range.ptr) // range.slot * range.slot
        cdef Chunk* chunk
        cdef ChunkHandle handle = NO_CHUNK
        if start >= end:
            return 0
        range.holes.reserve(range.holes.size() + 2)
        acquire_lock(self.lock[0])
        chunk = &self.pool.chunks[part.handle]
        if chunk.state == FREE and chunk.ptr == part.ptr and chunk.size == part.size:
            handle = begin_unmapping(self.pool, part.handle, start, end)
        self.lock.release()
        if handle >= NO_HOST_MEMORY:
            return 0        # another thread has taken it, or the host has no memory for the records
        try:
            self.source.sub_allocator.wait(range.stream)
        except BaseException as error:
            faults.append(error)
            acquire_lock(self.lock[0])
            self.some_stuck = not cancel_unmapping(self.pool, handle) or self.some_stuck
            self.lock.release()
            return 0
        self.unmap_pages(range, start, end - start, range.slot if self.strict else end - start, faults)
        start = self.settle(range, handle)
        self.drop_if_unused(range, faults)
        return start

    cdef int unmap_pages(self, Range range, uint64_t ptr, uint64_t nbytes, uint64_t step, list faults) except -1:
        """Unmaps and releases the pages at these addresses, `step` bytes in each call. Those that cannot be unmapped
        stay in the range's table."""
        cdef uint64_t at = ptr, slot
        while at < ptr + nbytes:
            try:
                self.source.sub_allocator.unmap(at, step)
            except BaseException as error:
                faults.append(error)
            else:
                slot = at
                while slot < at + step:
                    self.release_page(range.pages.pop(slot), range.slot, faults)
                    slot += range.slot
            at += step
        return 0

    cdef uint64_t settle(self, Range range, ChunkHandle handle) except? 0xFFFFFFFFFFFFFFFF:
        """Tells the pool which slots of a leaving chunk have gone. Returns the bytes that have."""
        cdef uint64_t gone = 0, size, ptr, end
        cdef ChunkHandle rest
        cdef bint has_gone
        while handle < NO_HOST_MEMORY:
            ptr = self.pool.chunks[handle].ptr
            end = ptr + self.pool.chunks[handle].size
            has_gone = ptr not in range.pages
            size = range.slot
            while ptr + size < end and (ptr + size not in range.pages) == has_gone:
                size += range.slot
            acquire_lock(self.lock[0])
            rest = end_unmapping(self.pool, handle, size, has_gone)
            self.note_holes(range, handle)
            self.lock.release()
            gone += size if has_gone and rest != NO_HOST_MEMORY else 0
            handle = rest
            self.some_stuck = self.some_stuck or not has_gone
        self.note_change()
        return gone

    cdef void note_change(self) noexcept nogil:
        self.changes += 1
        self.source.changes.add(1)

    cdef void note_holes(self, Range range, ChunkHandle added) noexcept nogil:
        """Lists what is unmapped in a range, after some of it has changed and this chunk may be new. Needs the lock
        under which it has changed, and room in the list."""
        cdef size_t kept = 0, i
        cdef ChunkHandle handle
        cdef bint is_new = added != NO_CHUNK and self.pool.chunks[added].state == UNMAPPED
        for handle in range.holes:
            if self.pool.chunks[handle].state == UNMAPPED:
                range.holes[kept] = handle
                kept += 1
                is_new = is_new and handle != added
        range.holes.resize(kept)
        if is_new and try_push_handle(range.holes, added):
            i = kept
            while i > 0 and self.pool.chunks[range.holes[i - 1]].ptr > self.pool.chunks[added].ptr:
                range.holes[i] = range.holes[i - 1]
                i -= 1
            range.holes[i] = added

    cdef uint64_t try_stuck_again(self, list faults) except? 0xFFFFFFFFFFFFFFFF:
        """Tries again to unmap and to release what the sub-allocator failed with. Returns the bytes that went."""
        cdef Range range
        cdef ChunkHandle handle
        cdef uint64_t released = 0
        self.try_unreleased_again(faults)
        if not self.some_stuck:
            return 0
        self.some_stuck = False
        for range in list(self.ranges):
            for handle in self.leaving(range) if range.is_known else ():
                self.unmap_again(range, handle, faults)
                released += self.settle(range, handle)
            self.drop_if_unused(range, faults)
        return released

    cdef int try_unreleased_again(self, list faults) except -1:
        pages, self.unreleased = self.unreleased, []
        for page, nbytes in pages:
            self.source.keep_bytes(-<int64_t>nbytes)
            self.release_page(page, nbytes, faults)
        return 0

    cdef list leaving(self, Range range):
        cdef vector[ChunkHandle] found
        cdef ChunkHandle handle
        acquire_lock(self.lock[0])
        handle = self.pool.regions[range.ptr + range.nbytes].first
        while handle != NO_CHUNK:
            if self.pool.chunks[handle].state == LEAVING:
                try_push_handle(found, handle)
            handle = self.pool.chunks[handle].next
        self.lock.release()
        return list(found)

    cdef int unmap_again(self, Range range, ChunkHandle handle, list faults) except -1:
        cdef uint64_t ptr = self.pool.chunks[handle].ptr
        cdef uint64_t end = ptr + self.pool.chunks[handle].size
        while ptr < end:
            if ptr in range.pages:
                self.unmap_pages(range, ptr, range.slot, range.slot, faults)
            ptr += range.slot
        return 0

    cdef int drop_unused(self, list faults) except -1:
        """Gives the addresses of ranges back that have never held memory, which PyTorch keeps."""
        for range in list(self.ranges):
            self.drop_if_unused(range, faults)
        return 0

    cdef int drop_if_unused(self, Range range, list faults) except -1:
        cdef bint unused
        acquire_lock(self.lock[0])
        unused = range.is_known and range.holes.size() == 1 and self.pool.chunks[range.holes[0]].size == range.nbytes
        if unused:
            remove_range(self.pool, range.ptr, range.nbytes)
            range.is_known = False
        self.lock.release()
        return 0 if range.is_known else self.unreserve(range, faults)

    cdef int unreserve(self, Range range, list faults) except -1:
        """Of a range that the pool has forgotten. If that fails, it stays in the list, for another try."""
        if range.pages:
            return 0
        try:
            self.source.sub_allocator.unreserve(range.ptr, range.nbytes)
            self.ranges.remove(range)
        except BaseException as error:
            faults.append(error)
        return 0

    cdef int close(self, list faults) except -1:
        """Gives all memory and all addresses back. The next call tries what the sub-allocator fails with again."""
        cdef Range range
        acquire_lock(self.lock[0])
        for range in self.ranges:
            if range.is_known:
                remove_range(self.pool, range.ptr, range.nbytes)
                range.is_known = False
        self.lock.release()
        for range in list(self.ranges):
            self.empty(range, faults)
            self.unreserve(range, faults)
        return self.try_unreleased_again(faults)

    cdef int empty(self, Range range, list faults) except -1:
        """Unmaps all that is mapped, in runs as long as they can be."""
        cdef uint64_t start = 0, end = 0, ptr
        if not range.pages:
            return 0
        try:
            self.source.sub_allocator.wait(range.stream)
        except BaseException as error:
            faults.append(error)    # a device that fails gets its memory back all the same
        for ptr in sorted(range.pages):
            if ptr != end and end:
                self.unmap_pages(range, start, end - start, end - start, faults)
            start = start if ptr == end else ptr
            end = ptr + range.slot
        return self.unmap_pages(range, start, end - start, end - start, faults)

    cdef dict figures(self):
        """How much there is of everything, for `page_stats`."""
        cdef Range range
        cdef uint64_t reserved = 0, mapped = 0, lost = 0
        for range in self.ranges:
            reserved += range.nbytes
            mapped += len(range.pages)
            for handle in self.leaving(range) if range.is_known and not self.mapper else ():
                lost += self.pool.chunks[<ChunkHandle>handle].size // range.slot
        return {"reservations": len(self.ranges), "reserved_address_bytes": reserved, "pages": mapped,
                "lost_slots": lost}
