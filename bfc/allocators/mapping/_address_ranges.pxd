"""Ranges of addresses, and the transactions in which memory is mapped into them and given back."""

cimport cython
from cpython.object cimport PyObject
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr
from libcpp.vector cimport vector

from bfc.native.mapping cimport bfc_mapping_fault, bfc_native_mapping
from bfc.interpreter._process cimport Deferral
from bfc._core cimport ChunkHandle, PageBitmap, PlanServer, Pool
from bfc.suballocators._native_mapping cimport NativeMapping
from bfc.allocators._lock cimport Lock
from bfc.allocators._source cimport Source
from bfc.allocators._fences cimport Fences
from bfc.allocators._tags cimport Tag, Tags

cdef extern from "Python.h":
    ctypedef struct PyThreadState

cdef extern from "mapped_ranges.hpp" namespace "bfc" nogil:
    cdef cppclass Page "bfc::DevicePage":
        uint64_t number
        uint64_t nbytes
        cbool is_made
        cbool is_mapped
        shared_ptr[Page] next

    cdef cppclass Place:
        Place()
        Place(uint64_t ptr, uint64_t nbytes)
        uint64_t ptr
        uint64_t nbytes
        cbool has(uint64_t address)

    cdef cppclass AddressRange:
        uint64_t ptr
        uint64_t nbytes
        uint64_t slot
        uint32_t bin_set
        uint64_t stream
        uint64_t asked_of
        cbool is_known
        cbool is_gone
        cbool has_table
        cbool some_stuck
        cbool is_captured
        PlanServer* plan
        int region
        cbool must_wait
        vector[shared_ptr[Page]] pages
        PageBitmap* bitmap
        vector[ChunkHandle] holes
        ChunkHandle tail

    cdef cppclass AddressRangeList:
        size_t size()
        AddressRange* at(size_t i)
        AddressRange* open()
        void remove(AddressRange* range)
        void forget_gone()
        void sort_last()

    cdef cppclass Retired:
        uint64_t ptr
        uint64_t nbytes
        uint64_t stream
        vector[uint32_t] pages
        vector[Place] mapped
        void* event
        PyObject* fence
        cbool is_stuck

    cdef cppclass RecordsGuard:
        void begin()
        void end()
        cbool is_native()
        PyThreadState* let_go()
        void take_back(PyThreadState* state)
        void pause()
        void go_on()
        void reset()
        void begin_reading(Lock& allocators)
        void end_reading(Lock& allocators)

    shared_ptr[Page] new_page(uint64_t nbytes) noexcept
    shared_ptr[Retired] new_retired(uint64_t ptr, uint64_t nbytes) noexcept
    PyThreadState* let_gil_go() noexcept
    void take_gil_back(PyThreadState* state) noexcept

ctypedef shared_ptr[Page] PageRef
ctypedef shared_ptr[Retired] RetiredRef

cdef enum:
    NOWHERE = 0xFFFFFFFFFFFFFFFF        # the start of a range whose addresses are being asked for

cdef enum Verb:                         # of a sub-allocator that maps; `put` has the other two
    RESERVE
    UNRESERVE
    CREATE
    RELEASE
    UNMAP


@cython.final
cdef class Faults:
    cdef object first
    cdef object interrupt               # the first error that is not an Exception, such as a Ctrl-C
    cdef size_t count

    cdef Faults restart(self)
    cdef void add(self, error) noexcept


cdef inline uint64_t round_up_to(uint64_t size, uint64_t step) noexcept nogil:
    return (size + step - 1) // step * step

cdef uint64_t call_reserve(sub_allocator, device, uint64_t nbytes) except 0
cdef object call_create(sub_allocator, device, uint64_t nbytes)
cdef int note_number(Page* page, object number) except -1
cdef object number_of(uint64_t kept)
cdef bint lies_in(uint64_t address, runs) noexcept
cdef int raise_faults(sub_allocator, Faults faults) except -1


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
cdef class MappingDevice:
    cdef Source source
    cdef object target                  # what maps: the C functions of the sub-allocator, or the sub-allocator
    cdef NativeMapping native           # those functions; None: there are only methods
    cdef bfc_native_mapping* table      # their table; NULL
    cdef uint64_t granularity           # of addresses
    cdef RecordsGuard guard             # of what stands here
    cdef object error                   # what a step has failed with
    cdef object later                   # and what has failed in cleaning up behind it

    # What the mapper's call is about. A child that is forked meanwhile cannot know whether it was done. Nothing else
    # uses any of it.
    cdef Place touched                  # where it maps or unmaps, from before the call until the books say what came
    cdef Place going                    # the reservation that goes back
    cdef PageRef leaving                # the page that is released

    cdef Calls counts
    cdef bint without_calls             # what is unmapped and released now went when its tag fell asleep

    # What stayed mapped after a `put` that failed.
    cdef vector[Place] lost             # as the sub-allocator said
    cdef Place lost_row                 # all of it
    cdef bint is_refused                # the sub-allocator had no memory for a page

    cdef int find(self) except -1
    cdef int fail(self, object error) noexcept
    cdef int fail_for_memory(self) noexcept nogil
    cdef int keep_memory_error(self) noexcept with gil
    cdef int drop_error(self, Faults faults, cbool raises_interrupts) noexcept nogil
    cdef int pass_error_on(self, Faults faults, cbool raises_interrupts) noexcept with gil
    cdef PyObject* take_error(self) noexcept with gil
    cdef int check(self, int64_t result) except -1
    cdef int refuse_overlap(self, uint64_t ptr) noexcept nogil
    cdef int keep_overlap(self, uint64_t ptr) noexcept with gil
    cdef int put(self, uint64_t ptr, vector[PageRef]& pages, uint64_t nbytes) noexcept nogil
    cdef int put_in_python(self, uint64_t ptr, vector[uint64_t]& numbers, uint64_t nbytes) noexcept with gil
    cdef int put_natively(self, uint64_t ptr, vector[uint64_t]& numbers, uint64_t nbytes) noexcept nogil
    cdef void note_lost(self, object error, uint64_t ptr, uint64_t nbytes) noexcept
    cdef void undo_mapping(self, uint64_t ptr, uint64_t nbytes) noexcept nogil
    cdef void forget_lost(self) noexcept nogil
    cdef cbool has_lost(self) noexcept nogil
    cdef cbool is_lost(self, uint64_t ptr) noexcept nogil
    cdef int call(self, Verb verb, uint64_t address, uint64_t nbytes, uint64_t* taken) noexcept nogil
    cdef int call_natively(self, Verb verb, uint64_t address, uint64_t nbytes, uint64_t* taken) noexcept nogil
    cdef int call_in_python(self, Verb verb, uint64_t address, uint64_t nbytes, uint64_t* taken) noexcept with gil
    cdef int fail_natively(self, int result, const char* call, bfc_mapping_fault* fault) noexcept nogil
    cdef int keep_native_error(self, int result, const char* call, bfc_mapping_fault* fault) noexcept with gil
    cdef int refuse_addresses(self, uint64_t nbytes, uint64_t address, cbool none) noexcept nogil
    cdef int keep_refusal(self, uint64_t nbytes, uint64_t address, cbool none) noexcept with gil
    cdef int unmap(self, uint64_t ptr, uint64_t nbytes) noexcept nogil
    cdef int unreserve(self, uint64_t ptr, uint64_t nbytes) noexcept nogil
    cdef void add_calls(self, uint64_t count) noexcept nogil


@cython.final
cdef class MappedRun:
    cdef uint64_t ptr
    cdef uint64_t nbytes
    cdef vector[PageRef] pages      # end to end; a page may stand in several runs
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
    cdef vector[PageRef] pages      # those of the runs, each once
    cdef vector[Live] live
    cdef uint64_t aside             # bytes that are set aside from the limit meanwhile
    cdef bint is_waking
    cdef bint is_up                 # all of it is mapped, and awake

    cdef int add(self, MappedRun run) except -1
    cdef bint misses_pages(self) noexcept
    cdef void settle_pages(self) noexcept


cdef class AddressRanges:
    cdef MappingDevice device
    cdef Lock* lock                     # the allocator's
    cdef Pool pool
    cdef Source source
    cdef AddressRangeList ranges
    cdef PageRef fresh                  # the first page that is made, or about to be, and is in no slot yet
    cdef PageRef unreleased             # the first page that the sub-allocator did not take back
    cdef PageRef offered                # the first of those that are being released again
    cdef Faults closing                 # made beforehand, for the close() of an allocator that is dropped
    cdef Deferral deferral              # of the mapper
    cdef unsigned long mapper           # the thread that maps or unmaps now; 0: none. Guarded by the lock
    cdef uint64_t limit                 # the most bytes that the allocator may take
    cdef bint is_on                     # new memory is mapped
    cdef size_t count                   # of what must be unmapped, unreserved or released in the end
    cdef uint64_t changes               # counts what was mapped and unmapped
    cdef bint must_close                # as soon as the mapper leaves

    # What _sleep.pyx keeps.
    cdef Fences fences                  # the allocator's
    cdef Tags tags                      # the allocator's
    cdef list moving                    # of TagTransition, while tags fall asleep or wake; else None
    cdef uint64_t held                  # bytes that are mapped where tags sleep, since they could not be unmapped

    cdef int attach(self, Lock* lock, Pool pool, Source source, Fences fences, Tags tags) except -1

    cdef bint enter(self, uint64_t set_aside) except -1
    cdef void leave(self) noexcept
    cdef cbool enter_natively(self, uint64_t set_aside) noexcept nogil
    cdef void leave_natively(self) noexcept nogil
    cdef int give_all_back(self) except -1
    cdef cbool are_some(self) noexcept nogil
    cdef set streams_asked(self)

    # What a subclass keeps: which page is mapped in which slot, and what lies unmapped.
    cdef cbool open_table(self, AddressRange* range) noexcept nogil
    cdef void close_table(self, AddressRange* range) noexcept nogil
    cdef uint64_t slots_of(self, AddressRange* range) noexcept nogil
    cdef cbool has_page(self, AddressRange* range, uint64_t ptr) noexcept nogil
    cdef cbool may_be_unmapped(self, AddressRange* range, uint64_t ptr) noexcept nogil
    cdef int enter_pages(self, AddressRange* range, uint64_t ptr, vector[PageRef]& pages) noexcept nogil
    cdef void drop_slot(self, AddressRange* range, uint64_t ptr, Faults faults) noexcept nogil
    cdef cbool unmap_elsewhere(self, AddressRange* range, uint64_t ptr, uint64_t nbytes, Faults faults) noexcept nogil
    cdef void note_unmapped(self, AddressRange* range, ChunkHandle added) noexcept nogil
    cdef size_t count_beside_ranges(self) noexcept nogil
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
    cdef int check_timing(self) except -1
    cdef int check_pages(self, str method) except -1
    cdef bint extend(self, uint64_t address, uint64_t rounded) except -1

    cdef int reserve(self, AddressRange* range) noexcept nogil
    cdef int take_in(self, AddressRange* range) noexcept nogil
    cdef int64_t create(self, uint64_t wanted, uint64_t nbytes) noexcept nogil
    cdef void release_fresh(self) noexcept nogil
    cdef int64_t map_fresh(self, AddressRange* range, ChunkHandle handle) noexcept nogil
    cdef void give_up(self, AddressRange* range, ChunkHandle handle) noexcept nogil

    cdef uint64_t unmap_leaving(self, AddressRange* range, ChunkHandle handle, cbool one_by_one,
                                Faults faults) noexcept nogil
    cdef uint64_t settle(self, AddressRange* range, ChunkHandle handle) noexcept nogil
    cdef uint64_t unmap_again(self, AddressRange* range, bint one_by_one, Faults faults) noexcept
    cdef ChunkHandle leaving_from(self, AddressRange* range, uint64_t ptr) noexcept
    cdef FreePart part_of(self, ChunkHandle handle) noexcept nogil
    cdef uint64_t count_mapped(self, AddressRange* range) noexcept nogil
    cdef bint wait_for(self, AddressRange* range, Faults faults) noexcept
    cdef void empty(self, AddressRange* range, Faults faults) noexcept
    cdef void unreserve(self, AddressRange* range, Faults faults) noexcept nogil
    cdef void remove(self, AddressRange* range) noexcept nogil
    cdef void forget_ranges(self) noexcept

    cdef void release_page(self, PageRef page, Faults faults) noexcept nogil
    cdef uint64_t unreleased_bytes(self) noexcept
    cdef void try_unreleased_again(self, Faults faults) noexcept nogil

    cdef void take_over(self) noexcept
    cdef void forget_touched(self, AddressRange* range) noexcept

    cdef void note_change(self) noexcept nogil


cdef cbool is_of_tag(AddressRanges memory, uint32_t bin_set, uint64_t number) noexcept nogil
cdef cbool belongs_to(AddressRanges memory, AddressRange* range, uint64_t tag) noexcept nogil
cdef cbool is_set_asleep(AddressRanges memory, uint32_t bin_set) noexcept nogil
cdef int list_ranges(AddressRanges memory, uint64_t tag, vector[AddressRange*]& found) except -1
cdef cbool is_native(AddressRanges memory) noexcept nogil
