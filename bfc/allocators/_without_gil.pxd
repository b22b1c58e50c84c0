"""Allocate and free for callers that must not take the GIL."""

from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool

from bfc.allocators._allocator cimport Allocator

cdef cbool allocate_without_gil(Allocator allocator, uint64_t nbytes, uint64_t stream, const uint64_t* pool,
                                uint64_t* ptr) noexcept nogil
cdef cbool free_without_gil(Allocator allocator, uint64_t ptr, uint64_t stream, cbool waits) noexcept nogil
cdef cbool use_without_gil(Allocator allocator, uint64_t ptr, uint64_t stream) noexcept nogil
# For callers that may take the GIL where they answer False. The second follows a call from Python that has allocated
# for the home stream.
cdef cbool hit_on_any_stream(Allocator allocator, uint64_t nbytes, uint64_t stream, uint64_t* ptr) noexcept nogil
cdef cbool lead_from_home(Allocator allocator, uint64_t ptr, uint64_t stream) noexcept nogil

# These need the pool alone, and events of the driver where frees wait for streams. False: nothing has changed.
cdef cbool hit_without_gil(Allocator allocator, uint64_t nbytes, uint64_t stream, uint64_t* ptr) noexcept nogil
cdef cbool hit_in_pool_without_gil(Allocator allocator, uint64_t nbytes, uint64_t stream, const uint64_t* pool,
                                   uint64_t* ptr) noexcept nogil
cdef cbool note_use(Allocator allocator, uint64_t ptr, uint64_t stream) noexcept nogil
cdef cbool free_at_once_without_gil(Allocator allocator, uint64_t ptr) noexcept nogil
