"""Ranges of addresses, and the transactions in which memory is mapped into them and given back."""

cimport cython
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.interpreter._process cimport Deferral
from bfc._core cimport ChunkHandle, PageBitmap, PlanServer, Pool
from bfc.suballocators._native_mapping cimport NativeMapping
from bfc.allocators._lock cimport Lock
from bfc.allocators._source cimport Source
from bfc.allocators._fences cimport Fences
from bfc.allocators._tags cimport Tag, Tags


@cython.final
cdef class Faults:
    cdef object first
    cdef object interrupt               # the first error that is not an Exception, such as a Ctrl-C
    cdef size_t count

    cdef Faults restart(self)
    cdef void add(self, error) noexcept


@cython.final
cdef class Page:
    cdef object number                  # as `create` returned it; None: it is still to be made
    cdef uint64_t nbytes
    cdef bint is_mapped
    cdef Page next                      # in the list of those that the sub-allocator did not take back


cdef inline uint64_t round_up_to(uint64_t size, uint64_t step) noexcept nogil:
    return (size + step - 1) // step * step

cdef uint64_t call_reserve(sub_allocator, device, uint64_t nbytes) except 0
cdef object call_create(sub_allocator, device, uint64_t nbytes)
cdef bint lies_in(uint64_t address, runs) noexcept
cdef uint64_t bytes_from(Page page) noexcept
cdef list driver_numbers(list pages)
cdef int raise_faults(sub_allocator, Faults faults) except -1


cdef struct Place:                  # addresses
    uint64_t ptr
    uint64_t nbytes                     # 0: none


cdef struct FreePart:               # a chunk of a range
    ChunkHandle handle
    uint64_t ptr
    uint64_t size


cdef struct Calls:                  # those that were made so far
    uint64_t creates
    uint64_t maps                       # of pages
    uint64_t set_accesses
    uint64_t unmaps
    uint64_t releases
    uint64_t stream_waits
    uint64_t stitches
    uint64_t most                       # calls that one request made
    double seconds                      # spent in the sub-allocator


@cython.final
cdef class AddressRange:
    cdef uint64_t ptr
    cdef uint64_t nbytes
    cdef uint64_t slot                  # bytes of each of its pages
    cdef uint32_t bin_set
    cdef uint64_t stream
    cdef uint64_t asked_of              # the stream that says when earlier work is done
    cdef bint is_known                  # whether the pool knows it: until the allocator closes
    cdef bint is_gone                   # its addresses are given back, or were never had
    cdef bint has_table                 # of the pages in its slots
    cdef bint some_stuck                # memory that could not be unmapped
    cdef bint is_captured               # whether its stream captured a graph when pages were last looked for
    cdef PlanServer* plan               # whose region it is; NULL: of none
    cdef int region
    cdef bint must_wait                 # whether to wait for its stream before what is leaving is unmapped

    # What one of the subclasses of AddressRanges looks up in it.
    cdef list pages                     # of Page or None, by slot
    cdef PageBitmap* bitmap             # the same, where pages have numbers: that of its set of bins; NULL: none
    cdef vector[ChunkHandle] holes      # its unmapped chunks, in address order
    cdef ChunkHandle tail               # the unmapped chunk at its end; NO_CHUNK: there is none


@cython.final
cdef class MappedRun:
    cdef uint64_t ptr
    cdef uint64_t nbytes
    cdef list pages                 # of Page, end to end; a page may stand in several runs
    cdef bint is_mapped
    cdef list lost                  # what of it stayed mapped: (address, bytes); None: nothing
    cdef uint64_t tag               # its tag, where a subclass keeps it for later
    cdef bint is_block              # a region of a private pool, which is mapped in one piece

    cdef void note_unmapped(self) noexcept


cdef struct Live:                   # an allocation
    uint64_t ptr
    uint64_t nbytes
    uint64_t stream
    int64_t allocation_id
    ChunkHandle handle


@cython.final
cdef class TagTransition:
    cdef Tag tag
    cdef object way                 # where its contents go; None: nowhere
    cdef object kept                # the HostCopy they went to
    cdef list runs                  # of MappedRun: what is unmapped, or mapped again
    cdef list pages                 # of Page: those of the runs, each once
    cdef vector[Live] live
    cdef uint64_t aside             # bytes that are set aside from the limit meanwhile
    cdef bint is_waking
    cdef bint is_up                 # all of it is mapped, and awake

    cdef bint misses_pages(self) noexcept
    cdef void settle_pages(self) noexcept


cdef class AddressRanges:
    cdef Lock* lock                     # the allocator's
    cdef Pool pool
    cdef Source source
    cdef object device                  # what maps: the C functions of the sub-allocator, or the sub-allocator
    cdef NativeMapping native           # those functions; None: there are only methods
    cdef list ranges                    # of AddressRange
    cdef Page fresh                     # the first page that is made, or about to be, and is in no slot yet
    cdef Page unreleased                # the first page that the sub-allocator did not take back
    cdef Faults closing                 # made beforehand, for the close() of an allocator that is dropped
    cdef Deferral deferral              # of the mapper
    cdef unsigned long mapper           # the thread that maps or unmaps now; 0: none. Guarded by the lock
    cdef uint64_t limit                 # the most bytes that the allocator may take
    cdef bint is_on                     # new memory is mapped
    cdef size_t count                   # of what must be unmapped, unreserved or released in the end
    cdef uint64_t changes               # counts what was mapped and unmapped
    cdef Calls calls
    cdef bint must_close                # as soon as the mapper leaves
    cdef bint is_refused                # the sub-allocator had no memory for a page

    # What the mapper's call is about. A child that is forked meanwhile cannot know whether it was done. Nothing else
    # uses any of it.
    cdef Place touched                  # where it maps or unmaps, from before the call until the books say what came
    cdef Place going                    # the reservation that goes back
    cdef Page leaving                   # the page that is released; None: none
    cdef Page offered                   # the first of those that are to be released again after it

    # What stayed mapped after a `put` that failed.
    cdef object lost                    # as the sub-allocator said: (address, bytes), or nothing
    cdef Place lost_row                 # all of it

    # What _sleep.pyx keeps.
    cdef Fences fences                  # the allocator's
    cdef Tags tags                      # the allocator's
    cdef list moving                    # of TagTransition, while tags fall asleep or wake; else None
    cdef uint64_t held                  # bytes that are mapped where tags sleep, since they could not be unmapped

    cdef int attach(self, Lock* lock, Pool pool, Source source, Fences fences, Tags tags) except -1

    cdef bint enter(self, uint64_t set_aside) except -1
    cdef void leave(self) noexcept
    cdef void close_after_all(self) noexcept
    cdef int give_all_back(self) except -1
    cdef cbool are_some(self) noexcept nogil
    cdef set streams_asked(self)
    cdef void close_late(self) noexcept

    # What a subclass keeps: which page is mapped in which slot, and what lies unmapped.
    cdef cbool open_table(self, AddressRange range) noexcept nogil
    cdef void close_table(self, AddressRange range) noexcept
    cdef uint64_t slots_of(self, AddressRange range) noexcept
    cdef bint has_page(self, AddressRange range, uint64_t ptr) noexcept
    cdef bint may_be_unmapped(self, AddressRange range, uint64_t ptr) noexcept
    cdef int enter_pages(self, AddressRange range, uint64_t ptr, list pages) except -1
    cdef void drop_slot(self, AddressRange range, uint64_t ptr, Faults faults) noexcept
    cdef bint unmap_elsewhere(self, AddressRange range, uint64_t ptr, uint64_t nbytes, Faults faults) noexcept
    cdef void note_unmapped(self, AddressRange range, ChunkHandle added) noexcept nogil
    cdef size_t count_what_is_mapped(self) noexcept
    cdef uint64_t page_bytes_at(self, uint64_t ptr) noexcept
    cdef void close(self, Faults faults) noexcept
    cdef int list_mapped(self, TagTransition transition) except -1   # adds what is mapped of a tag to runs and pages
    cdef int list_needed(self, TagTransition transition) except -1   # what must be mapped so that it can wake
    cdef void note_runs(self, TagTransition transition) noexcept     # enters what its runs and pages have become
    cdef void shrink(self, uint64_t tag) noexcept       # gives up addresses of a sleeping tag that nothing lives in
    cdef uint64_t bytes_held(self) noexcept
    cdef uint64_t bytes_asleep(self) noexcept
    cdef dict stats(self)
    cdef str in_words(self)
    cdef str against_pieces(self)
    cdef uint64_t bytes_beside_regions(self) noexcept
    cdef const char* first_fault(self) noexcept nogil
    cdef void set_limit(self, uint64_t limit, uint64_t allowed) noexcept nogil
    cdef int check_settings(self, settings) except -1
    cdef bint extend(self, uint64_t address, uint64_t rounded) except -1

    cdef int reserve(self, AddressRange range) except -1
    cdef int take_in(self, AddressRange range) except -1
    cdef uint64_t create(self, uint64_t wanted, uint64_t nbytes) except? 0xFFFFFFFFFFFFFFFF
    cdef void release_fresh(self) noexcept
    cdef uint64_t map_fresh(self, AddressRange range, ChunkHandle handle) except 0
    cdef int put(self, uint64_t ptr, list pages, uint64_t nbytes) except -1
    cdef int put_by_methods(self, uint64_t ptr, list numbers, uint64_t nbytes) except -1
    cdef int put_natively(self, uint64_t ptr, list numbers, uint64_t nbytes) except -1
    cdef void undo_mapping(self, uint64_t ptr, uint64_t nbytes) noexcept
    cdef void forget_lost(self) noexcept
    cdef bint has_lost(self) noexcept
    cdef bint is_lost(self, uint64_t ptr) noexcept
    cdef void give_up(self, AddressRange range, ChunkHandle handle) noexcept

    cdef uint64_t unmap_leaving(self, AddressRange range, ChunkHandle handle, bint one_by_one,
                                Faults faults) noexcept
    cdef void unmap_slots(self, AddressRange range, uint64_t ptr, uint64_t nbytes, uint64_t step,
                          Faults faults) noexcept
    cdef uint64_t settle(self, AddressRange range, ChunkHandle handle) noexcept
    cdef uint64_t unmap_again(self, AddressRange range, bint one_by_one, Faults faults) noexcept
    cdef ChunkHandle leaving_from(self, AddressRange range, uint64_t ptr) noexcept
    cdef FreePart part_of(self, ChunkHandle handle) noexcept
    cdef uint64_t count_mapped(self, AddressRange range) noexcept
    cdef set streams_of(self, AddressRange range)
    cdef bint wait_for(self, AddressRange range, Faults faults) noexcept
    cdef void empty(self, AddressRange range, Faults faults) noexcept
    cdef void unreserve(self, AddressRange range, Faults faults) noexcept
    cdef void remove(self, AddressRange range) noexcept
    cdef void forget_ranges(self) noexcept

    cdef void release_page(self, Page page, Faults faults) noexcept
    cdef uint64_t unreleased_bytes(self) noexcept
    cdef void try_unreleased_again(self, Faults faults) noexcept

    cdef void take_over(self) noexcept
    cdef void end_calls_of_other(self) noexcept
    cdef void forget_touched(self, AddressRange range) noexcept
    cdef ChunkHandle growing_in(self, AddressRange range) noexcept

    cdef int call_unmap(self, uint64_t ptr, uint64_t nbytes) except -1
    cdef int call_unreserve(self, uint64_t ptr, uint64_t nbytes) except -1
    cdef void add_calls(self, uint64_t count) noexcept nogil
    cdef void note_change(self) noexcept nogil

    cdef cbool is_of_tag(self, uint32_t bin_set, uint64_t number) noexcept nogil
    cdef bint belongs_to(self, AddressRange range, uint64_t tag) noexcept
    cdef bint is_set_asleep(self, uint32_t bin_set) noexcept
    cdef list ranges_of(self, uint64_t tag)
