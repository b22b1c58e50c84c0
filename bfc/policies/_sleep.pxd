"""Sleep and wake: memory goes and comes back while its addresses stay. A part of every allocator that maps memory."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport ChunkHandle
from bfc.allocators._fences cimport Fences
from bfc.allocators._tags cimport Tag, Tagged
from bfc.allocators._allocator cimport Allocator
from bfc.policies._mapper cimport Mapper, Page


@cython.final
cdef class Run:
    cdef uint64_t ptr
    cdef uint64_t nbytes
    cdef list pages                 # of Page, end to end; a page may stand in several runs
    cdef bint is_mapped
    cdef list lost                  # what of it stayed mapped: (address, bytes); None: nothing
    cdef uint64_t tag               # its tag, where a subclass keeps it for later

    cdef void note_unmapped(self) noexcept


cdef struct Live:                   # an allocation
    uint64_t ptr
    uint64_t nbytes
    uint64_t stream
    int64_t allocation_id
    ChunkHandle handle


@cython.final
cdef class Nap:
    cdef Tag tag
    cdef object way                 # where its contents go; None: nowhere
    cdef object kept                # the Stash they went to
    cdef list runs                  # of Run: what is unmapped, or mapped again
    cdef list pages                 # of Page: those of the runs, each once
    cdef vector[Live] live
    cdef uint64_t aside             # bytes that are set aside from the limit meanwhile
    cdef bint is_waking
    cdef bint is_up                 # all of it is mapped, and awake

    cdef bint misses_pages(self) noexcept
    cdef void settle_pages(self) noexcept


cdef class Sleeper(Mapper):
    cdef Fences fences              # the allocator's
    cdef vector[uint64_t]* asleep   # the numbers of tags that nothing can be allocated in; guarded by the lock
    cdef list moving                # of Nap, while tags fall asleep or wake; else None
    cdef uint64_t held              # bytes that are mapped where tags sleep, since they could not be unmapped

    cdef int know_tags(self, Fences fences, vector[uint64_t]* asleep) except -1
    cdef object put_to_sleep(self, dict ways)
    cdef uint64_t wake_up(self, list tags, object fill, uint64_t allowed) except? 0xFFFFFFFFFFFFFFFF

    # What a subclass overrides, for the thread that maps.
    cdef cbool is_of_tag(self, uint32_t bin_set, uint64_t number) noexcept nogil
    cdef int list_mapped(self, Nap nap) except -1       # adds what is mapped of a tag to the nap's runs and pages
    cdef int list_needed(self, Nap nap) except -1       # what must be mapped so that it can wake
    cdef void note_runs(self, Nap nap) noexcept         # enters what the nap's runs and pages have become
    cdef void shrink(self, Tag tag) noexcept            # gives up addresses of a sleeping tag that nothing lives in
    cdef uint64_t bytes_held(self) noexcept
    cdef uint64_t bytes_asleep(self) noexcept

    cdef bint is_set_asleep(self, uint32_t bin_set) noexcept
    cdef int enter_or_wait(self) except -1
    cdef int sleep_all(self, list naps) except -1
    cdef int block(self, uint64_t number) except -1
    cdef void unblock(self, uint64_t number) noexcept
    cdef int mark(self, Nap nap) except -1
    cdef void unmark(self, Nap nap) noexcept
    cdef int list_live(self, Nap nap, cbool* exported, uint64_t* unmapped) except -1 nogil
    cdef void set_aside(self, Nap nap, int64_t nbytes) noexcept nogil
    cdef int wait_for_users(self, list naps) except -1
    cdef int take_down(self, list naps) except -1
    cdef bint bring_back(self, list naps) noexcept
    cdef int put_up(self, list naps) except -1
    cdef int map_run(self, Run run, list mapped) except -1
    cdef void unmap_quietly(self, Run run) noexcept
    cdef void go_down(self, list naps) noexcept
    cdef list alive(self, kept)
    cdef void fall_asleep(self, list naps) noexcept
    cdef int give_up_held(self, Nap nap) except -1
    cdef void give_page_up(self, Page page) noexcept
    cdef bint take_room(self, list naps, uint64_t allowed, uint64_t* needed) except -1
    cdef int fill_in(self, Nap nap, object fill) except -1
    cdef void rise(self, list naps) noexcept
    cdef void note_held(self) noexcept
    cdef void take_over_naps(self) noexcept


cdef object put_tags_to_sleep(Allocator allocator, Sleeper sleeper, dict ways)
cdef int wake_tags(Allocator allocator, Sleeper sleeper, list tags, object fill, uint64_t allowed) except -1
cdef void add_run(Nap nap, uint64_t ptr, uint64_t nbytes, list pages, bint is_mapped)
