"""Regions of private pools that sleep with a tag: each has addresses of its own, which stay, and one page.

A captured graph names addresses, also of memory that it has freed, so nothing here is stitched, moved or lent. To the
pool they are regions like others; `Source` asks here for a new one, and gives it back here.
"""

from cython.operator cimport dereference as deref
from libc.stdint cimport uint64_t
from libcpp.map cimport map as cmap

from bfc._core cimport BinSet, Region
from bfc.allocators._lock cimport acquire_lock
from bfc.allocators._tags cimport NO_TAG
from bfc.allocators.mapping._address_ranges cimport (
    AddressRanges, MappedRun, Page, TagTransition, call_create, call_reserve, new_page, note_number, number_of,
    round_up_to,
)

from bfc.errors import out_of_host_memory


cdef class Blocks:
    """The blocks of an allocator. It stands in the place of the sub-allocator for such regions."""

    def __cinit__(self):
        self.by_address = {}

    def __contains__(self, address):
        return address in self.by_address

    def __len__(self):
        return len(self.by_address)

    def __repr__(self):
        return repr(self.sub_allocator())

    cdef object sub_allocator(self):
        if self.memory is None:
            raise TypeError("these blocks belong to no allocator: an allocator makes its own")
        return self.memory.source.sub_allocator

    def alloc(self, alignment, nbytes):
        """Like that of a sub-allocator."""
        sub_allocator = self.sub_allocator()
        cdef MappedRun run = MappedRun()
        cdef Page* page
        run.is_block = True
        # One page for the block, whatever its size: it never moves, and is unmapped as a whole.
        run.nbytes = round_up_to(nbytes, sub_allocator.mapping_granularity)
        run.pages.push_back(new_page(run.nbytes))
        page = run.pages[0].get()
        if page == NULL:
            raise out_of_host_memory()
        run.ptr = call_reserve(sub_allocator, sub_allocator, run.nbytes)
        try:
            # Before there is a page: a child that is forked in `create` must know the addresses.
            self.by_address[run.ptr] = run
        except MemoryError:
            sub_allocator.unreserve(run.ptr, run.nbytes)
            raise
        try:
            number = call_create(sub_allocator, sub_allocator, page.nbytes)
            if number is not None:
                note_number(page, number)
                map_block(sub_allocator, run)
                return run.ptr, run.nbytes
        except BaseException:
            self.give_up(run)
            raise
        self.give_up(run)
        return None

    cdef void give_up(self, MappedRun run) noexcept:
        """Gives back what there is of a region whose making has failed. What cannot be given back now is tried again by
        the next release, and counts against the limit until then."""
        try:
            self.free(run.ptr, run.nbytes)
        except BaseException:
            self.memory.source.keep_block(run.ptr, run.nbytes)

    def free(self, address, nbytes):
        """Like that of a sub-allocator; also what sleeps. What has been done already is not done again."""
        sub_allocator = self.sub_allocator()
        cdef MappedRun run = self.by_address[address]
        cdef Page* page = run.pages[0].get()
        if run.is_mapped or run.lost:
            sub_allocator.unmap(run.ptr, run.nbytes)
            run.note_unmapped()
            run.lost = None
        if page.is_made:
            sub_allocator.release(number_of(page.number))
            page.is_made = False
        sub_allocator.unreserve(run.ptr, run.nbytes)
        del self.by_address[address]

    cdef int list_for(self, TagTransition transition, bint mapped) except -1:
        """Adds those of a tag that are mapped, or are not."""
        cdef MappedRun run
        # A copy, since another thread may give a block back between two of them.
        for run in list(self.by_address.values()):
            if bool(run.is_mapped or run.lost) == mapped and tag_of(self.memory, run) == transition.tag.number:
                transition.add(run)
        return 0

    cdef uint64_t bytes_of(self, bint asleep, bint mapped) noexcept:
        """The bytes of those whose tag sleeps, or does not, and that are mapped, or are not."""
        cdef MappedRun run
        cdef uint64_t found = 0
        for run in list(self.by_address.values()):
            if bool(run.is_mapped or run.lost) == mapped and is_asleep(self.memory, run) == asleep:
                found += run.nbytes
        return found


cdef int map_block(sub_allocator, MappedRun run) except -1:
    cdef Page* page = run.pages[0].get()
    try:
        sub_allocator.map(run.ptr, [number_of(page.number)])
    except BaseException as error:
        run.lost = list(getattr(error, "lost", ()))     # what stays mapped
        raise
    run.is_mapped = page.is_mapped = True
    sub_allocator.set_access(run.ptr, run.nbytes)
    return 0


cdef BinSet* bin_set_of(AddressRanges memory, MappedRun run) noexcept:
    """That of the region of a block; NULL while the pool does not know it. Needs the lock."""
    cdef cmap[uint64_t, Region].iterator found = memory.pool.regions.find(run.ptr + run.nbytes)
    if found == memory.pool.regions.end():
        return NULL
    return &memory.pool.bin_sets[memory.pool.chunks[deref(found).second.first].bin_set]


cdef uint64_t tag_of(AddressRanges memory, MappedRun run) noexcept:
    # A lane that another thread opens moves the sets of bins.
    acquire_lock(memory.lock[0])
    cdef BinSet* owner = bin_set_of(memory, run)
    cdef uint64_t tag = memory.tags.tag_of(owner.lane.pool) if owner != NULL else <uint64_t>NO_TAG
    memory.lock.release()
    return tag


cdef bint is_asleep(AddressRanges memory, MappedRun run) noexcept:
    # A lane that another thread opens moves the sets of bins.
    acquire_lock(memory.lock[0])
    cdef BinSet* owner = bin_set_of(memory, run)
    cdef bint asleep = owner != NULL and owner.asleep != 0
    memory.lock.release()
    return asleep


cdef Blocks blocks_of(AddressRanges memory):
    """The blocks of an allocator, made when first asked for."""
    cdef Blocks made
    if memory.source.blocks is None:
        made = Blocks()
        made.memory = memory
        memory.source.blocks = made
        memory.source.has_blocks = True
    return memory.source.blocks
