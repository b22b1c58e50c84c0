"""Reserved addresses of a CUDA device, and the physical memory that is mapped to them: only the driver's calls.

`suballocators/cuda_pages.py` keeps the books of what is reserved and mapped. None of these calls takes a stream, or
waits for one.
"""

from libc.string cimport memset

from bfc.drivers.cuda._driver cimport (
    NOT_FOUND,
    NOT_INITIALIZED,
    OUT_OF_MEMORY,
    SUCCESS,
    check,
    cu,
    failed,
    forked,
    is_lost,
)
from bfc.drivers.cuda._device cimport DeviceMemory, PrimaryContext

from bfc.drivers.cuda._driver import attribute, driver_error, load

cdef enum:
    PINNED = 1                  # CUmemAllocationType
    ON_DEVICE = 1               # CUmemLocationType
    READ_WRITE = 3              # CUmemAccess_flags
    MINIMUM = 0                 # CUmemAllocationGranularity_flags
    # CUdevice_attribute
    HAS_VIRTUAL_MEMORY = 102
    HAS_DESCRIPTORS = 103
    HAS_RDMA = 110
    HAS_FABRIC_HANDLES = 128
    # CUmemAllocationHandleType
    NO_HANDLE = 0
    DESCRIPTOR = 1
    FABRIC = 8

HANDLE_TYPES = {"none": NO_HANDLE, "posix": DESCRIPTOR, "fabric": FABRIC}
_HANDLE_NAMES = {number: name for name, number in HANDLE_TYPES.items()}

_HINTS = {
    "cuMemCreate": "handle_type=\"none\", which every driver that maps memory can give",
    "cuMemMap": "larger pages, if there are very many: the driver holds only so many mappings",
    "cuMemSetAccess": "fewer peers: `nvidia-smi topo -m` shows which devices reach each other",
    "cuMemUnmap": "again, once all work that uses the memory has finished",
}


def why_not(int ordinal):
    """Why a device has no virtual memory; "" if it has. Raises DeviceUnavailableError if there is no driver."""
    cdef size_t granularity = 0
    if not attribute(ordinal, HAS_VIRTUAL_MEMORY):
        return f"device {ordinal} or its driver has no virtual memory management"
    cdef MemoryProperties wanted = on_device(ordinal)
    cdef CUresult result = cu.memory_granularity(&granularity, &wanted, MINIMUM)
    if failed(result):
        return ("the driver is too old to map memory: update it" if result == NOT_FOUND
                else str(mapping_error(result, "cuMemGetAllocationGranularity")))
    return ""


def can_access(int ordinal, int peer):
    """Whether a device can be given access to memory of another. Raises DriverError."""
    cdef int can = 0
    load()
    check(cu.can_access_peer(&can, peer, ordinal), f"cuDeviceCanAccessPeer({peer}, {ordinal})")
    return bool(can)


cdef MemoryProperties on_device(int ordinal) noexcept:
    cdef MemoryProperties wanted
    memset(&wanted, 0, sizeof(wanted))
    wanted.type = PINNED
    wanted.location.type = ON_DEVICE
    wanted.location.id = ordinal
    return wanted


cdef object mapping_error(CUresult result, str call, str arguments=""):
    """The DriverError of a call. A hint for the result is preferred to a hint for the call."""
    error = driver_error(f"{call}({arguments})", result)
    return error if error.hint else driver_error(error.call, result, _HINTS.get(call, ""))


cdef CUresult release_handle(uint64_t handle, size_t _nbytes) noexcept nogil:
    return cu.memory_release(handle)


cdef class VirtualMemory:
    """Virtual memory of one device.

    `handle_type` is "none", "posix" or "fabric". A device without fabric handles gives file descriptors: the driver
    may say so at once, or refuse the first page.
    """

    def __cinit__(self):
        self.context = PrimaryContext.__new__(PrimaryContext)

    def __init__(self, DeviceMemory memory not None, str handle_type not None):
        cdef size_t granularity = 0
        if self.context.retained:
            raise RuntimeError("virtual memory is set up once")
        cdef int ordinal = memory.ordinal
        self.context = memory.context
        self.wanted = on_device(ordinal)
        self.wanted.handle_types = HANDLE_TYPES[handle_type]
        if self.wanted.handle_types == FABRIC and not attribute(ordinal, HAS_FABRIC_HANDLES):
            self.wanted.handle_types = DESCRIPTOR
        if self.wanted.handle_types == DESCRIPTOR and not attribute(ordinal, HAS_DESCRIPTORS):
            raise ValueError(f"device {ordinal} gives no handles for other processes: take handle_type=\"none\"")
        self.wanted.rdma = attribute(ordinal, HAS_RDMA) != 0
        check(cu.memory_granularity(&granularity, &self.wanted, MINIMUM), "cuMemGetAllocationGranularity")
        self.granularity = granularity

    @property
    def handle_type(self):
        """The kind of handle that pages have."""
        return _HANDLE_NAMES[self.wanted.handle_types]

    # -- addresses -----------------------------------------------------------------------------------------------------

    def reserve(self, uint64_t nbytes):
        """See SubAllocator.reserve."""
        cdef uint64_t address = 0
        cdef int mode
        cdef CUresult result
        with nogil:
            result = self.context.enter(&mode)
            if result == SUCCESS:
                result = cu.address_reserve(&address, nbytes, 0, 0, 0)
                self.context.leave(mode)
        if result == OUT_OF_MEMORY:
            return None
        if failed(result):
            raise mapping_error(result, "cuMemAddressReserve", f"{nbytes} bytes")
        try:
            return address
        except MemoryError:
            with nogil:
                self.let_go(address, nbytes)
            raise

    def unreserve(self, uint64_t address, uint64_t nbytes):
        """See SubAllocator.unreserve."""
        cdef CUresult result
        with nogil:
            result = self.let_go(address, nbytes)
        if failed(result):
            raise mapping_error(result, "cuMemAddressFree", f"{address:#x}, {nbytes} bytes")

    cdef CUresult let_go(self, uint64_t address, uint64_t nbytes) noexcept nogil:
        return self.end(cu.address_free, address, nbytes)

    cdef CUresult end(self, Ending call, uint64_t what, uint64_t nbytes) noexcept nogil:
        """Makes a call that gives something back, even if the context was reset: this memory belongs to no
        context."""
        cdef int mode
        if forked:
            return SUCCESS
        if not self.context.retained:
            return NOT_INITIALIZED
        cdef bint entered = self.context.enter(&mode) == SUCCESS
        cdef CUresult result = call(what, nbytes)
        if entered:
            self.context.leave(mode)
        return SUCCESS if is_lost(result) else result

    # -- pages ---------------------------------------------------------------------------------------------------------

    def create(self, uint64_t nbytes):
        """A handle of new memory, or None. Raises DriverError."""
        cdef uint64_t handle = 0
        cdef CUresult result
        with nogil:
            result = self.make(nbytes, &handle)
        if result == OUT_OF_MEMORY:
            return None
        if failed(result):
            raise mapping_error(result, "cuMemCreate", f"{nbytes} bytes on device {self.context.ordinal}")
        try:
            return handle
        except MemoryError:
            with nogil:
                self.drop(handle)
            raise

    cdef CUresult make(self, uint64_t nbytes, uint64_t* handle) noexcept nogil:
        cdef int mode
        cdef CUresult result = self.context.enter(&mode)
        if result != SUCCESS:
            return result
        result = cu.memory_create(handle, nbytes, &self.wanted, 0)
        if (result not in (SUCCESS, OUT_OF_MEMORY) and not self.has_created
                and self.wanted.handle_types == FABRIC):
            self.wanted.handle_types = DESCRIPTOR
            result = cu.memory_create(handle, nbytes, &self.wanted, 0)
        if result == SUCCESS:
            self.has_created = True
        self.context.leave(mode)
        return result

    def release(self, uint64_t handle):
        """Releases a handle. Raises DriverError."""
        cdef CUresult result
        with nogil:
            result = self.drop(handle)
        if failed(result):
            raise mapping_error(result, "cuMemRelease", f"{handle:#x}")

    cdef CUresult drop(self, uint64_t handle) noexcept nogil:
        return self.end(release_handle, handle, 0)

    # -- mappings ------------------------------------------------------------------------------------------------------

    def map(self, uint64_t address, list handles, list sizes):
        """Maps handles end to end, all or none. Returns None, or on failure a tuple: the error, the error of
        undoing it or None, and the bytes that are still mapped."""
        cdef vector[uint64_t] pages = handles
        cdef vector[uint64_t] lengths = sizes
        cdef size_t done = 0
        cdef uint64_t end = address
        cdef CUresult result, undone = SUCCESS
        with nogil:
            result = self.put(address, pages, lengths, &done, &end)
            if result != SUCCESS and done:
                undone = self.hide(address, end - address)
        if not failed(result):
            return None
        error = mapping_error(result, "cuMemMap", f"{end:#x}, {lengths[done]} bytes")
        if not failed(undone):
            return error, None, 0
        return error, mapping_error(undone, "cuMemUnmap", f"{address:#x}, {end - address} bytes"), end - address

    cdef CUresult put(self, uint64_t address, vector[uint64_t]& handles, vector[uint64_t]& sizes,
                      size_t* done, uint64_t* end) noexcept nogil:
        cdef int mode
        cdef CUresult result = self.context.enter(&mode)
        if result != SUCCESS:
            return result
        while result == SUCCESS and done[0] < handles.size():
            result = cu.memory_map(end[0], sizes[done[0]], 0, handles[done[0]], 0)
            if result == SUCCESS:
                end[0] += sizes[done[0]]
                done[0] += 1
        self.context.leave(mode)
        return result

    def unmap(self, uint64_t address, uint64_t nbytes):
        """See SubAllocator.unmap."""
        cdef CUresult result
        with nogil:
            result = self.hide(address, nbytes)
        if failed(result):
            raise mapping_error(result, "cuMemUnmap", f"{address:#x}, {nbytes} bytes")

    cdef CUresult hide(self, uint64_t address, uint64_t nbytes) noexcept nogil:
        return self.end(cu.memory_unmap, address, nbytes)

    def set_access(self, uint64_t address, uint64_t nbytes, devices, bint allowed=True):
        """Gives some devices access to mapped memory, or takes it from them, in one call. Raises DriverError."""
        cdef vector[Access] access
        cdef Access one
        cdef int device
        for device in devices:
            one.location.type = ON_DEVICE
            one.location.id = device
            one.flags = READ_WRITE if allowed else 0
            access.push_back(one)
        cdef CUresult result
        with nogil:
            result = self.allow(address, nbytes, access)
        if failed(result):
            raise mapping_error(result, "cuMemSetAccess", f"{address:#x}, {nbytes} bytes")

    cdef CUresult allow(self, uint64_t address, uint64_t nbytes, vector[Access]& access) noexcept nogil:
        cdef int mode
        cdef CUresult result = self.context.enter(&mode)
        if result == SUCCESS:
            result = cu.memory_set_access(address, nbytes, access.data(), access.size())
            self.context.leave(mode)
        return result
