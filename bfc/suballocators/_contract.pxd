from libc.stdint cimport uint64_t

cdef int ask_for_block(object source, object alloc, uint64_t alignment, uint64_t nbytes, bint strict,
                       uint64_t* address, uint64_t* received, list rejected) except -1
cdef int offer_again(object source, list rejected) except -1
