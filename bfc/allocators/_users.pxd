"""Which streams use memory."""

from libc.stdint cimport int64_t, uint64_t


cdef class Users:
    """Guarded by the GIL. It asks the source for fences, and never calls an allocator."""

    cdef object source                  # the sub-allocator
    cdef dict users                     # allocation id -> {stream: what the user passed for it, kept alive}
    cdef dict marked                    # allocation id -> [(stream, fence)], for streams that may be gone at the free

    cdef int mark_user(self, int64_t allocation_id, uint64_t stream) except -1      # whose fence may be None
    cdef int keep_user(self, int64_t allocation_id, uint64_t stream) except -1
    cdef object try_to_mark(self, int64_t allocation_id, uint64_t stream)
    cdef void could_not_mark(self, int64_t allocation_id, uint64_t stream, error, bint drained, put_off) noexcept
    cdef int forget(self, allocation_id) except -1
    cdef int clear(self) except -1

cdef int drop_done(list fences) except -1
cdef void report_unraisable(object error, object doing) noexcept
