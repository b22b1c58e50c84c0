"""A sub-allocator that gives blocks to a `PinnedAllocator`, and takes them back: which blocks are on their way there,
which it did not take back, and how long its calls take."""

import time

cimport cython

from bfc.native.nothrow cimport try_make_room, try_push_back
from bfc.interpreter._signals cimport Deferral, defer_handlers, resume_handlers
from bfc.suballocators._contract cimport ask_for_block, offer_again

from bfc.errors import SubAllocatorError, out_of_host_memory

cdef enum:
    ALIGNMENT = 256


cdef void count_since(Timer* timer, object start) noexcept:
    """Counts the time since `start`. As upstream, a shortest time of 0 means that there is none yet."""
    cdef int64_t microseconds
    try:
        microseconds = (time.perf_counter_ns() - start) // 1000
    except MemoryError:
        return          # the host has no memory for the time: that is not worth an error
    timer.total += microseconds
    timer.count += 1
    timer.longest = max(timer.longest, microseconds)
    timer.shortest = min(timer.shortest, microseconds) if timer.shortest else microseconds


# The garbage collector must not clear the reference to the sub-allocator before the blocks have gone back to it.
@cython.final
@cython.no_gc_clear
cdef class Source:
    """Guarded by the GIL. It never calls an allocator."""

    def __cinit__(self):
        self.rejected = []

    cdef bint ask(self, uint64_t size, threads, Range* block) except -1:
        """Asks the sub-allocator for a block, and returns whether there was room. `threads` is how many register it
        with CUDA; None: it is not registered."""
        source = self.sub_allocator
        way = source.alloc
        if threads is not None and hasattr(source, "alloc_registered"):
            def way(alignment, nbytes):
                return source.alloc_registered(alignment, nbytes, threads)

        start = time.perf_counter_ns()
        cdef bint got = False
        try:
            if not self.keep_room():
                raise out_of_host_memory()
            got = ask_for_block(source, way, ALIGNMENT, size, False, &block.ptr, &block.nbytes, self.rejected)
        finally:
            self.taken -= not got
        if got:
            count_since(&self.alloc_time, start)
        return got

    cdef cbool keep_room(self) noexcept nogil:
        """Makes room for one more block in both lists, before it is asked for. The caller counts it in `taken`."""
        self.taken += 1
        return try_make_room(self.leaving, self.taken) and try_make_room(self.unreturned, self.taken)

    cdef cbool leave(self, Range block) noexcept nogil:
        """Puts a block among those that `give_back` gives back. Returns False if the host has no memory for that."""
        return try_push_back(self.leaving, block)

    cdef int give_back_block(self, Range block) except -1:
        """Gives a block back that the source gave, and that is not used after all."""
        if not self.leave(block):
            self.free_timed(block, True)
        return self.give_back()

    cdef int give_back(self, bint idle=True) except -1:
        """Gives the blocks in `leaving` back. Raises SubAllocatorError if the sub-allocator does not take one; that is
        kept for another try. `idle`: no queued work uses any of them."""
        cdef Range block
        cdef Deferral deferral
        if self.leaving.empty():
            return 0
        fault, failed, interrupt = None, 0, None
        defer_handlers(&deferral)
        while self.leaving.size() and interrupt is None:
            block = self.leaving.back()
            self.leaving.pop_back()
            try:
                self.free_timed(block, idle)
            except BaseException as error:
                try_push_back(self.unreturned, block)
                interrupt = None if isinstance(error, Exception) else error
                fault, failed = fault or error, failed + 1
        resume_handlers(&deferral)
        if interrupt is not None:
            raise interrupt
        if fault is not None:
            raise SubAllocatorError(f"{self.sub_allocator!r}.free failed for {failed} block(s), first with {fault!r}; "
                                    f"empty_cache() and close() try again") from fault
        return 0

    cdef int free_timed(self, Range block, bint idle) except -1:
        start = time.perf_counter_ns()
        if idle:
            self.sub_allocator.free_idle(block.ptr, block.nbytes)
        else:
            self.sub_allocator.free(block.ptr, block.nbytes)
        self.taken -= 1
        count_since(&self.free_time, start)
        return 0

    cdef void offer_unreturned_again(self) noexcept nogil:
        """Lists what the sub-allocator did not take back, to be given back once more."""
        while self.unreturned.size() and try_push_back[Range](self.leaving, self.unreturned.back()):
            self.unreturned.pop_back()

    cdef int offer_rejected_again(self) except -1:
        offer_again(self.sub_allocator, self.rejected)
        return 0

    cdef bint has_nothing(self) noexcept:
        """Whether every block has gone back."""
        return self.unreturned.empty() and self.leaving.empty()
