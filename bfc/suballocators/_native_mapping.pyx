"""A sub-allocator's C functions that map memory (include/bfc_mapping.h): as methods, and for callers without the GIL.

An allocator calls this in the place of a sub-allocator that has such functions. So each method takes, returns and
raises what the method of `SubAllocator` does, and the GIL is free during each call.
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport uint64_t
from libc.string cimport memset
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.native.mapping cimport BFC_NATIVE_MAPPING, BFC_NO_ROOM, bfc_mapping_fault, bfc_native_mapping

from bfc.errors import SubAllocatorError


cdef uint64_t number(value, str call) except? 0xFFFFFFFFFFFFFFFF:
    try:
        return value
    except (OverflowError, TypeError):
        raise SubAllocatorError(f"{call}({value!r}): that is no number of bytes, no address and no page") from None


@cython.no_gc       # nothing that it holds leads back to it, and finalisers of garbage still call it
cdef class NativeMapping:
    """The functions of one table, in a capsule. `name` is for messages, of functions that bring none themselves."""

    def __cinit__(self, capsule, str name not None):
        self.table = <bfc_native_mapping*>PyCapsule_GetPointer(capsule, BFC_NATIVE_MAPPING)
        self.capsule = capsule
        self.name = name

    cdef int check(self, int result, str call, bfc_mapping_fault* fault) except -1:
        """Raises the error for what a function has failed with."""
        if result == 0:
            return 0
        if self.table.raise_error != NULL:
            return self.table.raise_error(self.table.self, fault)
        error = SubAllocatorError(f"{call} of {self.name} failed with {result}")
        if fault.lost:
            error.lost = ((fault.address, fault.lost),)
        raise error

    cdef bint take(self, Takes function, str call, uint64_t nbytes, uint64_t* taken) except -1:
        """Calls a function that takes something. Returns False if there is none left."""
        cdef bfc_mapping_fault fault
        cdef int result
        memset(&fault, 0, sizeof(fault))
        with nogil:
            result = function(self.table.self, nbytes, taken, &fault)
        if result == BFC_NO_ROOM:
            return False
        self.check(result, call, &fault)
        return True

    cdef int ask_at(self, AsksAt function, str call, address, nbytes) except -1:
        """Calls a function of addresses."""
        cdef bfc_mapping_fault fault
        cdef uint64_t start = number(address, call), size = number(nbytes, call)
        cdef int result
        memset(&fault, 0, sizeof(fault))
        with nogil:
            result = function(self.table.self, start, size, &fault)
        return self.check(result, call, &fault)

    def reserve(self, nbytes):
        cdef bfc_mapping_fault fault
        cdef uint64_t size = number(nbytes, "reserve"), address
        if not self.take(self.table.reserve, "reserve", size, &address):
            return None
        try:
            return address
        except MemoryError:
            with nogil:
                self.table.unreserve(self.table.self, address, size, &fault)
            raise

    def unreserve(self, address, nbytes):
        self.ask_at(self.table.unreserve, "unreserve", address, nbytes)

    def create(self, nbytes):
        cdef bfc_mapping_fault fault
        cdef uint64_t page
        if not self.take(self.table.create, "create", number(nbytes, "create"), &page):
            return None
        try:
            return page
        except MemoryError:
            with nogil:
                self.table.release(self.table.self, page, &fault)
            raise

    def release(self, page):
        cdef bfc_mapping_fault fault
        cdef uint64_t which = number(page, "release")
        cdef int result
        memset(&fault, 0, sizeof(fault))
        with nogil:
            result = self.table.release(self.table.self, which, &fault)
        self.check(result, "release", &fault)

    def map(self, address, pages):
        cdef bfc_mapping_fault fault
        cdef uint64_t start = number(address, "map")
        cdef vector[uint64_t] numbers
        cdef int result
        for page in pages:
            numbers.push_back(number(page, "map"))
        memset(&fault, 0, sizeof(fault))
        with nogil:
            result = self.table.map(self.table.self, start, numbers.data(), numbers.size(), &fault)
        self.check(result, "map", &fault)

    def set_access(self, address, nbytes):
        self.ask_at(self.table.set_access, "set_access", address, nbytes)

    def unmap(self, address, nbytes):
        self.ask_at(self.table.unmap, "unmap", address, nbytes)

    cdef int put(self, uint64_t address, vector[uint64_t]& pages, uint64_t nbytes, cbool* is_mapped,
                 bfc_mapping_fault* fault) noexcept nogil:
        """Maps pages, and lets the device use them. Where that fails, `is_mapped` says which of the two has."""
        cdef int result
        memset(fault, 0, sizeof(fault[0]))
        result = self.table.map(self.table.self, address, pages.data(), pages.size(), fault)
        is_mapped[0] = result == 0
        return self.table.set_access(self.table.self, address, nbytes, fault) if result == 0 else result
