"""A buffer: one allocation with an owner, and the protocols through which other libraries use it."""

from libc.stdint cimport int64_t, uint64_t

from bfc._core cimport ChunkHandle
from bfc.buffers._exchange cimport _Layout


cdef enum:
    HOST_STREAM = 0xFFFFFFFFFFFFFFFF    # stands for the stream of memory that the host uses
    NO_CONSUMER = 0xFFFFFFFFFFFFFFFF

cdef class Buffer


cdef class BufferOwner:
    """What a buffer belongs to and gives its chunk back to. Allocators derive from it, so this file imports none of
    them."""

    cdef readonly object sub_allocator      # where its memory comes from
    cdef readonly object device
    cdef readonly bint host_accessible
    cdef int64_t exports            # views of this memory that other libraries hold
    cdef int require_set_up(self) except -1
    # Makes a consumer's stream wait for the buffer's own stream. The consumer may use the buffer until consumer_left is
    # called. Returns the handle of the consumer's stream, or NO_CONSUMER if it is the buffer's own stream.
    cdef uint64_t hand_to_stream(self, ChunkHandle handle, int64_t allocation_id, uint64_t made_on, consumer) except? 0
    cdef void consumer_left(self, int64_t allocation_id, uint64_t stream) noexcept
    # Copies after what is queued on the stream, and waits until that is done.
    cdef int copy_bytes(self, uint64_t destination, uint64_t source, uint64_t nbytes, uint64_t stream) except -1
    # What DLPack calls data and byte_offset.
    cdef tuple exchange_address(self, uint64_t address)
    # Waits for what is queued on the stream now.
    cdef int wait_for(self, uint64_t stream) except -1
    cdef Buffer another(self, Py_ssize_t nbytes, uint64_t stream)
    # A stream as users see it: None if the host is the user. And as __cuda_array_interface__ requires it: never 0.
    cdef object visible_stream(self, uint64_t stream)
    cdef object interface_stream(self, uint64_t stream)
    cdef int free_handle(self, ChunkHandle handle, int64_t allocation_id) except -1
    cdef void free_handle_from_finaliser(self, ChunkHandle handle, int64_t allocation_id) noexcept
    cdef bint is_live(self, ChunkHandle handle, int64_t allocation_id) noexcept
    # The error to raise if memory is not live, or sleeps.
    cdef object why_not(self, ChunkHandle handle, int64_t allocation_id)
    cdef bint sync_exported(self, ChunkHandle handle, int64_t allocation_id, int64_t* exports) noexcept
    cdef void last_view_gone(self) noexcept


cdef class Buffer:
    cdef BufferOwner owner
    cdef ChunkHandle handle
    cdef int64_t allocation_id      # 0: freed, of 0 bytes, or a view
    cdef uint64_t start
    cdef uint64_t made_on
    cdef int64_t exports
    cdef readonly Py_ssize_t nbytes
    cdef readonly bint read_only
    cdef bint is_freed(self) except -1
    cdef uint64_t address(self) except? 0xFFFFFFFFFFFFFFFF
    cdef int hold(self) except -1
    cdef void let_go(self) noexcept
    cdef Buffer memory(self)
    cdef _Layout items(self)
    cdef tuple extents(self)
    cdef int require_host(self, what) except -1
    cdef int require_bytes(self, what) except -1
    cdef int copy_bytes(self, uint64_t destination, uint64_t source) except -1
    cdef object fitting(self, array)
    cdef bint goes_as(self, tuple there, tuple here) except -1
    cdef Buffer twin(self)
    cdef object exported(self, tuple there, consumer, bint versioned, uint64_t flags)


cdef inline void become(Buffer self, BufferOwner owner, ChunkHandle handle, int64_t allocation_id, uint64_t start,
                        Py_ssize_t nbytes, uint64_t stream) noexcept:
    """Gives an allocation to an empty buffer."""
    self.owner = owner
    self.handle = handle
    self.allocation_id = allocation_id
    self.start = start
    self.nbytes = nbytes
    self.made_on = stream


cdef class BufferView(Buffer):
    cdef readonly Buffer base
    cdef readonly tuple shape
    cdef _Layout layout


cdef class _Share:
    cdef Buffer shown
    cdef uint64_t consumer          # the stream that uses the memory as long as this lives, or NO_CONSUMER
