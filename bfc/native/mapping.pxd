"""A sub-allocator's calls that map memory, as C functions (include/bfc_mapping.h)."""

from libc.stddef cimport size_t
from libc.stdint cimport uint64_t

cdef extern from "bfc_mapping.h":
    const char* BFC_NATIVE_MAPPING
    int BFC_NO_ROOM

    ctypedef struct bfc_mapping_fault:
        int call
        int result
        uint64_t address
        uint64_t nbytes
        int undoing
        uint64_t lost

    ctypedef struct bfc_native_mapping:
        void* self
        int (*reserve)(void*, uint64_t nbytes, uint64_t* address, bfc_mapping_fault*) noexcept nogil
        int (*unreserve)(void*, uint64_t address, uint64_t nbytes, bfc_mapping_fault*) noexcept nogil
        int (*create)(void*, uint64_t nbytes, uint64_t* page, bfc_mapping_fault*) noexcept nogil
        int (*release)(void*, uint64_t page, bfc_mapping_fault*) noexcept nogil
        int (*map)(void*, uint64_t address, const uint64_t* pages, size_t count, bfc_mapping_fault*) noexcept nogil
        int (*set_access)(void*, uint64_t address, uint64_t nbytes, bfc_mapping_fault*) noexcept nogil
        int (*unmap)(void*, uint64_t address, uint64_t nbytes, bfc_mapping_fault*) noexcept nogil
        int (*raise_error)(void*, const bfc_mapping_fault*) except -1
