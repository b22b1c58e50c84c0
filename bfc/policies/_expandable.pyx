"""PyTorch's expandable segments: ranges of reserved addresses into which memory is mapped piece by piece.

Only the thread between `enter` and `leave` maps and unmaps (_mapper.pyx). Numbers after "PyTorch's behaviour" are
sections of docs/behaviour/pytorch.md.
"""

cimport cython
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport FREE, LEAVING, NO_CHUNK, NO_HOST_MEMORY, SMALL, UNMAPPED, Chunk, ChunkHandle, Pool
from bfc.allocators._ranges cimport (
    IS_GROWING, add_range, begin_mapping, begin_unmapping, cancel_mapping, cancel_unmapping, end_mapping, end_unmapping,
    remove_range,
)
from bfc.allocators._lock cimport acquire_lock
from bfc.allocators._tags cimport Tag
from bfc.policies._private_pools cimport PoolId
from bfc.policies._releasing cimport list_in_ranges
from bfc.policies._mapper cimport Faults, Page, Place, call_create, call_reserve, lies_in, round_up_to
from bfc.policies._sleep cimport Nap, Run, Sleeper, add_run

from bfc.errors import SettingsError, SubAllocatorError, out_of_host_memory
from bfc.suballocators.base import check_mapping_members, checked_memory_info

cdef extern from "nothrow.hpp" namespace "bfc" nogil:
    cbool try_push_handle "bfc::try_push_back"(vector[ChunkHandle]& items, ChunkHandle item) noexcept
    cbool try_push_part "bfc::try_push_back"(vector[FreePart]& items, const FreePart& item) noexcept
    cbool try_push_span "bfc::try_push_back"(vector[Span]& items, const Span& item) noexcept

cdef enum:
    SMALL_SLOT = 2 << 20


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


cdef int check_mapping(sub_allocator) except -1:
    possible = sub_allocator.supports_virtual_memory
    if not possible:
        raise SettingsError(f"expandable segments need a sub-allocator that maps memory: {possible}",
                            key="expandable_segments", given="True", allowed="False with this sub-allocator",
                            hint="max_split_size_mb or garbage_collection_threshold, against fragmentation")
    check_mapping_members(sub_allocator)
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

    cdef Page page_at(self, uint64_t ptr):
        cdef size_t slot = (ptr - self.ptr) // self.slot
        return <Page>self.pages[slot] if slot < <size_t>len(self.pages) else None

    cdef int expect_pages(self, uint64_t ptr, uint64_t nbytes) except -1:
        """Enters pages that are to be made and mapped: all, or none."""
        cdef Py_ssize_t i, first = (ptr - self.ptr) // self.slot, end = first + <Py_ssize_t>(nbytes // self.slot)
        cdef Page page
        cdef list expected = []
        for i in range(first, end):
            expected.append(Page())
            page = expected[i - first]
            page.nbytes = self.slot
        if len(self.pages) < end:
            self.pages.extend([None] * (end - len(self.pages)))
        for i in range(first, end):
            self.pages[i] = expected[i - first]
        return 0

    cdef void forget_page(self, uint64_t ptr) noexcept:
        cdef size_t slot = (ptr - self.ptr) // self.slot
        self.pages[slot] = None

    cdef size_t count_mapped(self) noexcept:
        cdef size_t count = 0
        cdef Page page
        for page in self.pages:
            count += page is not None and page.is_mapped
        return count


@cython.final
@cython.no_gc_clear
cdef class ExpandableSegments(Sleeper):
    """The ranges of an allocator, and what is mapped in them. It never calls the allocator."""

    def __cinit__(self):
        self.ranges = []

    cdef size_t count_what_is_mapped(self) noexcept:
        return len(self.ranges) + (self.unreleased is not None)

    cdef void take_over(self) noexcept:
        """Releases the pages that the stopped thread had not mapped, or had unmapped."""
        cdef Range range
        cdef ChunkHandle handle
        cdef Py_ssize_t last
        self.forget_what_has_gone()
        self.take_over_naps()
        self.some_stuck = True      # there may be chunks that are LEAVING
        last = len(self.ranges) - 1
        if last >= 0 and (<Range>self.ranges[last]).ptr == ~<uint64_t>0:
            del self.ranges[last]       # the thread stopped while it reserved its addresses
        for range in self.ranges:
            self.drop_pages(range, range.ptr, range.nbytes)
            handle = self.growing_in(range)
            if handle != NO_CHUNK:
                self.give_up_mapping(range, handle)

    cdef void forget_what_has_gone(self) noexcept:
        """Does again what the stopped thread was in the middle of, and enters it."""
        cdef Range range
        cdef uint64_t ptr = self.touched.ptr, end = self.touched.ptr + self.touched.nbytes
        cdef Page page
        range = self.range_of(ptr) if self.ranges else None
        self.end_calls_of_other(range.slot if range is not None else 1)
        while ptr < end:
            page = range.page_at(ptr)
            if page is not None:
                page.is_mapped = False
            ptr += range.slot
        if self.going.nbytes:
            self.remove(self.range_of(self.going.ptr))
        self.touched.nbytes = self.going.nbytes = 0

    cdef ChunkHandle growing_in(self, Range range) noexcept:
        """The chunk of a range that memory is being mapped for, or NO_CHUNK."""
        cdef ChunkHandle handle = NO_CHUNK
        acquire_lock(self.lock[0])
        if range.is_known:
            handle = self.pool.regions[range.ptr + range.nbytes].first
        while handle != NO_CHUNK and not (self.pool.chunks[handle].state == UNMAPPED
                                          and self.pool.chunks[handle].freed_at_count == IS_GROWING):
            handle = self.pool.chunks[handle].next
        self.lock.release()
        return handle

    cdef FreePart part_of(self, ChunkHandle handle) noexcept:
        acquire_lock(self.lock[0])
        cdef FreePart part = FreePart(handle, self.pool.chunks[handle].ptr, self.pool.chunks[handle].size)
        self.lock.release()
        return part

    cdef uint64_t slot_of(self, Growing* growing) noexcept nogil:
        """The bytes of a page in a range of that kind."""
        cdef uint64_t slot = SMALL_SLOT
        acquire_lock(self.lock[0])
        if self.pool.bin_sets[growing.bin_set].kind != SMALL:
            slot = self.pool.sizes.large_segment
        self.lock.release()
        return slot

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
            return self.map_front(handle, nbytes)
        if growing.has_reserved:
            return False    # the device says that it has less memory than it has given
        self.reserve(growing)
        growing.has_reserved = True
        return True

    cdef ChunkHandle next_to_map(self, Growing* growing, uint64_t* nbytes):
        """The unmapped chunk whose first `nbytes` come next, or NO_CHUNK. Needs the lock."""
        cdef ChunkHandle handle
        cdef Chunk* chunk
        if not self.is_on_its_way(growing):
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
        nbytes[0] = min(nbytes[0], self.pool.chunks[handle].size)
        return handle

    cdef bint is_on_its_way(self, Growing* growing) noexcept:
        """Whether the chosen chunk is there still and large enough, or has unmapped memory behind it. Needs the lock.
        """
        cdef Chunk* chunk
        if growing.start == NO_CHUNK or is_start(self.pool, growing, UNMAPPED):
            return growing.start != NO_CHUNK
        if not is_start(self.pool, growing, FREE):
            return False
        chunk = &self.pool.chunks[growing.start]
        return chunk.size >= growing.size or (chunk.next != NO_CHUNK
                                              and self.pool.chunks[chunk.next].state == UNMAPPED)

    cdef int choose_start(self, Growing* growing):
        """Chooses the first run of free and unmapped chunks, by address, that is large enough (PyTorch's behaviour,
        11.5). Needs the lock."""
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
        """Reserves addresses for all of the device's memory, and an eighth more (PyTorch's behaviour, 11.2)."""
        cdef object sub_allocator = self.source.sub_allocator
        cdef Range range = Range()
        _free, total = checked_memory_info(sub_allocator.memory_info(), sub_allocator)
        range.slot = round_up_to(self.slot_of(growing), 1 if self.strict else sub_allocator.mapping_granularity)
        acquire_lock(self.lock[0])
        range.stream = self.pool.bin_sets[growing.bin_set].lane.stream
        self.lock.release()
        range.nbytes = round_up_to(total + total // 8, range.slot)
        range.bin_set = growing.bin_set
        range.pages = []
        range.holes.reserve(2)
        range.ptr = ~<uint64_t>0
        self.ranges.append(range)       # makes room in the list before there are addresses
        try:
            self.add_calls(1)
            range.ptr = call_reserve(sub_allocator, range.nbytes)
        except BaseException:
            self.remove(range)
            raise
        self.sort_last()
        return self.take_in(range, growing)

    cdef void sort_last(self) noexcept:
        """Puts the last range where it belongs by address."""
        cdef Py_ssize_t i = len(self.ranges) - 1
        cdef Range last = self.ranges[i]
        while i > 0 and (<Range>self.ranges[i - 1]).ptr > last.ptr:
            self.ranges[i] = self.ranges[i - 1]
            i -= 1
        self.ranges[i] = last

    cdef int take_in(self, Range range, Growing* growing) except -1:
        cdef ChunkHandle handle = NO_HOST_MEMORY
        cdef cbool overlaps
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
            self.remove(range)      # and it is not ours to give back
            raise SubAllocatorError(f"{self.source.sub_allocator!r}.reserve returned {range.ptr:#x}, which is in use")
        if handle == NO_HOST_MEMORY:
            self.unreserve(range, None)
            raise out_of_host_memory()
        return 0

    cdef Range range_of(self, uint64_t ptr):
        """The range that an address lies in."""
        cdef Py_ssize_t low = 0, high = len(self.ranges), middle
        while high - low > 1:
            middle = (low + high) // 2
            if (<Range>self.ranges[middle]).ptr <= ptr:
                low = middle
            else:
                high = middle
        return <Range>self.ranges[low]

    cdef bint map_front(self, ChunkHandle handle, uint64_t nbytes) except -1:
        """Maps memory to the first bytes of an unmapped chunk, rounded up to whole slots. False: there is none."""
        cdef uint64_t ptr = self.part_of(handle).ptr
        cdef Range range = self.range_of(ptr)
        cdef cbool begun
        cdef bint done = False
        nbytes = round_up_to(nbytes, range.slot)
        range.holes.reserve(range.holes.size() + 2)
        range.expect_pages(ptr, nbytes)
        acquire_lock(self.lock[0])
        begun = begin_mapping(self.pool, handle, nbytes)
        if begun:
            self.note_holes(range, self.pool.chunks[handle].next)
        self.lock.release()
        try:
            if not begun:
                raise out_of_host_memory()
            done = self.create_pages(range, ptr, nbytes)
            if done:
                self.put_pages(range, ptr, nbytes)
                self.finish_mapping(range, handle)
        except BaseException:
            done = False
            raise
        finally:
            if not begun:
                self.drop_pages(range, ptr, nbytes)
            elif not done:
                self.give_up_mapping(range, handle)
            self.touched.nbytes = 0
        return done

    cdef void give_up_mapping(self, Range range, ChunkHandle handle) noexcept:
        """Takes back what was made and is not mapped."""
        cdef FreePart part = self.part_of(handle)
        cdef uint64_t ptr = part.ptr
        cdef Page page
        cdef bint is_mapped = False
        while ptr < part.ptr + part.size:
            page = range.page_at(ptr)
            is_mapped = is_mapped or (page is not None and page.is_mapped)
            ptr += range.slot
        self.drop_pages(range, part.ptr, part.size)
        acquire_lock(self.lock[0])
        cancel_mapping(self.pool, handle, is_mapped)
        self.note_holes(range, NO_CHUNK)
        self.lock.release()
        if is_mapped:
            self.settle(range, handle)

    cdef void drop_pages(self, Range range, uint64_t ptr, uint64_t nbytes) noexcept:
        """Releases the pages that were made for addresses and are not mapped, the first first."""
        cdef uint64_t end = min(ptr + nbytes, range.ptr + <uint64_t>len(range.pages) * range.slot)
        cdef Page page
        while ptr < end:
            page = range.page_at(ptr)
            if page is not None and not page.is_mapped:
                range.forget_page(ptr)
                if page.number is not None:
                    self.release_page(page, None)
            ptr += range.slot

    cdef int finish_mapping(self, Range range, ChunkHandle handle) except -1:
        cdef FreePart part = self.part_of(handle)
        acquire_lock(self.lock[0])
        cdef cbool done = end_mapping(self.pool, handle)
        self.note_holes(range, NO_CHUNK)
        self.touched.nbytes = 0 if done else self.touched.nbytes
        self.lock.release()
        if not done:
            self.unmap_pages(range, part.ptr, part.size, part.size, None)
            raise out_of_host_memory()
        self.note_change()
        return 0

    cdef bint create_pages(self, Range range, uint64_t ptr, uint64_t nbytes) except -1:
        """Makes the pages that are entered there. False: there is no memory for all of them."""
        cdef uint64_t end = ptr + nbytes
        cdef Page page
        while ptr < end:
            page = range.page_at(ptr)
            self.add_calls(1)
            page.number = call_create(self.source.sub_allocator, page.nbytes)
            if page.number is None:
                return False
            ptr += range.slot
        return True

    cdef int put_pages(self, Range range, uint64_t ptr, uint64_t nbytes) except -1:
        """Maps pages, all or none. If that fails, those that stayed mapped are marked as mapped."""
        cdef object sub_allocator = self.source.sub_allocator
        cdef uint64_t at = ptr
        cdef list numbers = []
        while at < ptr + nbytes:
            numbers.append(range.page_at(at).number)
            at += range.slot
        self.touched = Place(ptr, nbytes)
        try:
            self.add_calls(len(numbers))
            sub_allocator.map(ptr, numbers)
        except BaseException as error:
            self.mark_mapped(range, ptr, nbytes, getattr(error, "lost", ()))
            raise
        self.mark_mapped(range, ptr, nbytes, None)
        try:
            self.add_calls(1)
            sub_allocator.set_access(ptr, nbytes)
        except BaseException:
            self.unmap_pages(range, ptr, nbytes, nbytes, None)
            raise
        return 0

    cdef void mark_mapped(self, Range range, uint64_t ptr, uint64_t nbytes, runs) noexcept:
        """Pages are mapped now: those in some runs of addresses, or all (None)."""
        cdef uint64_t end = ptr + nbytes
        while ptr < end:
            range.page_at(ptr).is_mapped = runs is None or lies_in(ptr, runs)
            ptr += range.slot

    # -- giving back --------------------------------------------------------------------------------------------------

    cdef uint64_t give_back(self, vector[FreePart]& parts, Faults faults) noexcept:
        """Unmaps the whole slots inside of free chunks (PyTorch's behaviour, 11.7). Returns the bytes; what the
        sub-allocator fails with goes to `faults`."""
        cdef uint64_t released = 0
        cdef FreePart part
        for part in parts:
            released += self.unmap_part(self.range_of(part.ptr), &part, faults)
        return released

    cdef uint64_t unmap_part(self, Range range, FreePart* part, Faults faults) noexcept:
        cdef uint64_t start = range.ptr + round_up_to(part.ptr - range.ptr, range.slot)
        cdef uint64_t end = range.ptr + (part.ptr + part.size - range.ptr) // range.slot * range.slot
        cdef ChunkHandle handle = self.begin_to_unmap(range, part, start, end)
        if handle >= NO_HOST_MEMORY:
            return 0
        if not self.wait_for(range, faults):
            acquire_lock(self.lock[0])
            range.must_wait = not cancel_unmapping(self.pool, handle)
            self.some_stuck = self.some_stuck or range.must_wait
            self.lock.release()
            return 0
        self.unmap_pages(range, start, end - start, range.slot if self.strict else end - start, faults)
        start = self.settle(range, handle)
        self.drop_if_unused(range, faults)
        return start

    cdef ChunkHandle begin_to_unmap(self, Range range, FreePart* part, uint64_t start, uint64_t end) noexcept:
        """Lets a part of a free chunk leave. NO_CHUNK: there are no whole slots, or another thread has taken it.
        NO_HOST_MEMORY: there is none for the records."""
        cdef Chunk* chunk
        cdef ChunkHandle handle = NO_CHUNK
        if start >= end or not self.make_room(range):
            return NO_CHUNK
        acquire_lock(self.lock[0])
        chunk = &self.pool.chunks[part.handle]
        if chunk.state == FREE and chunk.ptr == part.ptr and chunk.size == part.size:
            handle = begin_unmapping(self.pool, part.handle, start, end)
        self.lock.release()
        return handle

    cdef bint make_room(self, Range range) noexcept:
        """Makes room in the list of what is unmapped."""
        try:
            range.holes.reserve(range.holes.size() + 2)
            return True
        except MemoryError:
            return False

    cdef bint wait_for(self, Range range, Faults faults) noexcept:
        """Waits for the work of a range's stream. False: that failed."""
        try:
            self.source.sub_allocator.wait(range.stream)
            return True
        except BaseException as error:
            faults.add(error)
            return False

    cdef void unmap_pages(self, Range range, uint64_t ptr, uint64_t nbytes, uint64_t step, Faults faults) noexcept:
        """Unmaps and releases the pages at these addresses, `step` bytes in each call. Those that cannot be unmapped
        stay in the range's table."""
        cdef uint64_t at = ptr, slot
        cdef Place before = self.touched    # that of a mapping which failed
        cdef Page page
        while at < ptr + nbytes:
            self.touched = Place(at, step)
            try:
                self.add_calls(1)
                self.source.sub_allocator.unmap(at, step)
            except BaseException as error:
                if faults is not None:
                    faults.add(error)
            else:
                slot = at
                while slot < at + step:
                    page = range.page_at(slot)
                    page.is_mapped = False
                    range.forget_page(slot)
                    self.release_page(page, faults)
                    slot += range.slot
            self.touched = before
            at += step

    cdef uint64_t settle(self, Range range, ChunkHandle handle) noexcept:
        """Tells the pool which slots of a leaving chunk have gone. Returns the bytes that have."""
        cdef uint64_t gone = 0, size, end
        cdef FreePart part
        cdef ChunkHandle rest
        cdef bint has_gone
        while handle < NO_HOST_MEMORY:
            part = self.part_of(handle)
            end = part.ptr + part.size
            has_gone = range.page_at(part.ptr) is None
            size = range.slot
            while part.ptr + size < end and (range.page_at(part.ptr + size) is None) == has_gone:
                size += range.slot
            acquire_lock(self.lock[0])
            rest = end_unmapping(self.pool, handle, size, has_gone)
            self.note_holes(range, handle)
            self.lock.release()
            gone += size if has_gone and rest != NO_HOST_MEMORY else 0
            handle = rest
            self.some_stuck = self.some_stuck or not has_gone or rest == NO_HOST_MEMORY
        self.note_change()
        return gone

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

    cdef uint64_t try_stuck_again(self, Faults faults) noexcept:
        """Tries again to unmap, to release and to unreserve what the sub-allocator failed with. Returns the bytes that
        went."""
        cdef Range range
        cdef Py_ssize_t i = len(self.ranges)
        cdef bint some_stuck = self.some_stuck
        cdef uint64_t released = 0
        self.try_unreleased_again(faults)
        self.some_stuck = False
        while i > 0:
            i -= 1
            range = self.ranges[i]
            if some_stuck and range.is_known:
                released += self.unmap_again(range, faults)
            if some_stuck or not range.is_known:
                self.drop_if_unused(range, faults)
        return released

    cdef uint64_t unmap_again(self, Range range, Faults faults) noexcept:
        """Tries to unmap what should have left a range. Returns the bytes that went."""
        cdef uint64_t ptr, end = range.ptr, released = 0
        cdef FreePart part
        cdef ChunkHandle handle = self.leaving_from(range, end)
        if handle == NO_CHUNK:
            return 0
        if not self.make_room(range) or (range.must_wait and not self.wait_for(range, faults)):
            self.some_stuck = True
            return 0
        range.must_wait = False
        while handle != NO_CHUNK:
            part = self.part_of(handle)
            ptr, end = part.ptr, part.ptr + part.size
            while ptr < end:
                if range.page_at(ptr) is not None:
                    self.unmap_pages(range, ptr, range.slot, range.slot, faults)
                ptr += range.slot
            released += self.settle(range, handle)
            handle = self.leaving_from(range, end)
        return released

    cdef ChunkHandle leaving_from(self, Range range, uint64_t ptr) noexcept:
        """The first chunk that is to leave a range, from this address on; or NO_CHUNK."""
        cdef ChunkHandle handle = NO_CHUNK
        acquire_lock(self.lock[0])
        if range.is_known:
            handle = self.pool.regions[range.ptr + range.nbytes].first
        while handle != NO_CHUNK and (self.pool.chunks[handle].ptr < ptr or self.pool.chunks[handle].state != LEAVING):
            handle = self.pool.chunks[handle].next
        self.lock.release()
        return handle

    cdef void drop_unused(self, Faults faults) noexcept:
        """Gives the addresses of ranges back that have never held memory, which PyTorch keeps."""
        cdef Py_ssize_t i = len(self.ranges)
        while i > 0:
            i -= 1
            self.drop_if_unused(self.ranges[i], faults)

    cdef void drop_if_unused(self, Range range, Faults faults) noexcept:
        """Gives the addresses of a range back if it is one unmapped chunk, or the pool has forgotten it."""
        acquire_lock(self.lock[0])
        if range.is_known and range.holes.size() == 1 and self.pool.chunks[range.holes[0]].size == range.nbytes:
            remove_range(self.pool, range.ptr, range.nbytes)
            range.is_known = False
        self.lock.release()
        if not range.is_known:
            self.unreserve(range, faults)

    cdef void unreserve(self, Range range, Faults faults) noexcept:
        """Gives back the addresses of a range that the pool has forgotten. If that fails, the range stays in the list,
        for another try."""
        if range.count_mapped():
            return
        try:
            if not range.is_gone:
                self.call_unreserve(range.ptr, range.nbytes)
            self.remove(range)
        except BaseException as error:
            if faults is not None:
                faults.add(error)

    cdef void remove(self, Range range) noexcept:
        """Takes a range that has no addresses off the list. If the host has no memory for that, the next release does
        it."""
        range.is_gone = True
        try:
            self.ranges.remove(range)
        except MemoryError:
            pass

    cdef void close(self, Faults faults) noexcept:
        """Gives all memory and all addresses back. The next call tries what the sub-allocator fails with again."""
        cdef Range range
        cdef Py_ssize_t i = 0, before
        acquire_lock(self.lock[0])
        for range in self.ranges:
            if range.is_known:
                remove_range(self.pool, range.ptr, range.nbytes)
                range.is_known = False
        self.lock.release()
        self.try_unreleased_again(faults)
        while i < len(self.ranges):
            before = len(self.ranges)
            self.empty(self.ranges[i], faults)
            self.unreserve(self.ranges[i], faults)
            i += len(self.ranges) == before

    cdef void empty(self, Range range, Faults faults) noexcept:
        """Unmaps all that is mapped, in runs as long as they can be."""
        cdef uint64_t start = range.ptr, end, last = range.ptr + <uint64_t>len(range.pages) * range.slot
        if not range.count_mapped():
            return
        self.wait_for(range, faults)    # even if the device fails, its memory is given back
        while start < last:
            end = start
            while end < last and range.page_at(end) is not None:
                end += range.slot
            if end > start:
                self.unmap_pages(range, start, end - start, end - start, faults)
            start = max(end, start + range.slot)

    # -- sleep --------------------------------------------------------------------------------------------------------

    cdef list ranges_of(self, uint64_t tag):
        cdef Range range
        cdef list found = []
        for range in self.ranges:
            if range.is_known and self.is_of_tag(range.bin_set, tag):
                found.append(range)
        return found

    cdef bint is_asleep(self, Range range) noexcept:
        return range.is_known and self.is_set_asleep(range.bin_set)

    cdef int list_mapped(self, Nap nap) except -1:
        cdef Range range
        cdef uint64_t start, end, last
        cdef list pages
        for range in self.ranges_of(nap.tag.number):
            start = range.ptr
            last = range.ptr + <uint64_t>len(range.pages) * range.slot
            while start < last:
                pages = []
                end = start
                while end < last and range.page_at(end) is not None:
                    pages.append(range.page_at(end))
                    end += range.slot
                if pages:
                    add_run(nap, start, end - start, pages, True)
                start = max(end, start + range.slot)
        return 0

    cdef int list_needed(self, Nap nap) except -1:
        cdef Range range
        cdef Page page
        cdef Span span
        cdef vector[Span] spans
        cdef cbool listed
        cdef uint64_t done
        cdef list pages
        for range in self.ranges_of(nap.tag.number):
            spans.clear()
            acquire_lock(self.lock[0])
            listed = self.list_slots(range, False, spans)
            self.lock.release()
            if not listed:
                raise out_of_host_memory()
            for span in spans:
                pages = []
                done = 0
                while done < span.nbytes:
                    page = Page()
                    page.nbytes = range.slot
                    pages.append(page)
                    done += range.slot
                add_run(nap, span.ptr, span.nbytes, pages, False)
        return 0

    cdef cbool list_slots(self, Range range, cbool live_only, vector[Span]& out) noexcept nogil:
        """The slots of a range that chunks lie in, or live ones, where they lie end to end together. False: the host
        has no memory for the list. Needs the lock."""
        cdef ChunkHandle handle = self.pool.regions[range.ptr + range.nbytes].first
        cdef Chunk* chunk
        cdef uint64_t start, end
        while handle != NO_CHUNK:
            chunk = &self.pool.chunks[handle]
            handle = chunk.next
            if chunk.state in (UNMAPPED, LEAVING) or (live_only and chunk.state == FREE):
                continue
            start = range.ptr + (chunk.ptr - range.ptr) // range.slot * range.slot
            end = range.ptr + round_up_to(chunk.ptr + chunk.size - range.ptr, range.slot)
            if out.size() and out.back().ptr + out.back().nbytes >= start:
                out.back().nbytes = max(out.back().ptr + out.back().nbytes, end) - out.back().ptr
            elif not try_push_span(out, Span(start, end - start)):
                return False
        return True

    cdef void note_runs(self, Nap nap) noexcept:
        cdef Run run
        cdef Range range
        cdef Page page
        cdef uint64_t ptr
        for run in nap.runs:
            range = self.range_of(run.ptr)
            ptr = run.ptr
            for page in run.pages:
                range.pages[(ptr - range.ptr) // range.slot] = page if page.is_mapped else None
                ptr += range.slot

    cdef void shrink(self, Tag tag) noexcept:
        cdef Range range
        cdef ChunkHandle handle
        cdef FreePart part
        cdef vector[FreePart] parts
        for range in self.ranges_of(tag.number):
            parts.clear()
            acquire_lock(self.lock[0])
            handle = self.pool.regions[range.ptr + range.nbytes].first
            while handle != NO_CHUNK:
                part = FreePart(handle, self.pool.chunks[handle].ptr, self.pool.chunks[handle].size)
                if self.pool.chunks[handle].state == FREE and not try_push_part(parts, part):
                    break
                handle = self.pool.chunks[handle].next
            self.lock.release()
            for part in parts:
                self.release_part(range, &part)
            handle = self.leaving_from(range, range.ptr)
            while handle != NO_CHUNK and self.make_room(range):
                part = self.part_of(handle)
                self.settle(range, handle)
                handle = self.leaving_from(range, part.ptr + part.size)

    cdef uint64_t release_part(self, Range range, FreePart* part) noexcept:
        """Gives up the whole slots inside of a free chunk that have no memory any more."""
        cdef uint64_t start = range.ptr + round_up_to(part.ptr - range.ptr, range.slot)
        cdef uint64_t end = range.ptr + (part.ptr + part.size - range.ptr) // range.slot * range.slot
        cdef ChunkHandle handle = self.begin_to_unmap(range, part, start, end)
        return self.settle(range, handle) if handle < NO_HOST_MEMORY else 0

    cdef uint64_t bytes_held(self) noexcept:
        cdef Range range
        cdef uint64_t held = 0
        for range in self.ranges:
            if self.is_asleep(range):
                held += range.count_mapped() * range.slot
        return held

    cdef uint64_t bytes_asleep(self) noexcept:
        cdef Range range
        cdef Span span
        cdef vector[Span] spans
        cdef uint64_t found = 0
        for range in list(self.ranges):
            spans.clear()
            acquire_lock(self.lock[0])
            if self.is_asleep(range):
                self.list_slots(range, True, spans)
            self.lock.release()
            for span in spans:
                found += span.nbytes
        return found

    # -- what can be seen ---------------------------------------------------------------------------------------------

    cdef dict figures(self):
        """How much there is of everything, for `page_stats`."""
        cdef Range range
        cdef Page page
        cdef uint64_t reservations = 0, reserved = 0, bytes = 0, pages = 0, lost = 0, lost_bytes = 0, leaving
        for range in list(self.ranges):
            reservations += not range.is_gone
            reserved += 0 if range.is_gone else range.nbytes
            pages += range.count_mapped()
            bytes += range.count_mapped() * range.slot
            leaving = self.lost_in(range)
            lost += leaving
            lost_bytes += leaving * range.slot
        page = self.unreleased
        while page is not None:
            pages += 1
            bytes += page.nbytes
            lost_bytes += page.nbytes
            page = page.next
        return {"reservations": reservations, "reserved_address_bytes": reserved, "pages": pages,
                "page_bytes": bytes, "lost_slots": lost, "lost_bytes": lost_bytes}

    cdef uint64_t lost_in(self, Range range) noexcept:
        """The slots of a range that could not be unmapped; while a thread maps or unmaps, 0."""
        cdef uint64_t lost = 0
        cdef ChunkHandle handle
        cdef FreePart part
        if self.mapper:
            return 0
        if not range.is_known:
            return range.count_mapped()
        if self.is_asleep(range):
            return range.count_mapped()
        handle = self.leaving_from(range, range.ptr)
        while handle != NO_CHUNK:
            part = self.part_of(handle)
            lost += part.size // range.slot
            handle = self.leaving_from(range, part.ptr + part.size)
        return lost
