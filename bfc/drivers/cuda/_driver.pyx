"""The CUDA driver, through cuda-python's C functions. One build works with cuda-bindings 12.9 and 13.

The functions come from `cuda.bindings.cydriver.__pyx_capi__`, whose capsules are named by their C signature. So there
is no header, no library to link, and no Python call on the way to the driver. Nothing is loaded before the first device
is used.
"""


from cpython.exc cimport PyErr_Clear
from cpython.pycapsule cimport PyCapsule_GetPointer

from bfc.interpreter._process cimport call_in_child

from bfc.errors import DeviceUnavailableError, DriverError, SubAllocatorError

_SIGNATURES = (
    ("cuInit", "unsigned int"),
    ("cuDriverGetVersion", "int *"),
    ("cuGetErrorName", "CUresult, char const **"),
    ("cuGetErrorString", "CUresult, char const **"),
    ("cuDeviceGetCount", "int *"),
    ("cuDeviceGet", "CUdevice *, int"),
    ("cuDeviceGetName", "char *, int, CUdevice"),
    ("cuDeviceTotalMem", "size_t *, CUdevice"),
    ("cuDeviceGetAttribute", "int *, CUdevice_attribute, CUdevice"),
    ("cuDevicePrimaryCtxGetState", "CUdevice, unsigned int *, int *"),
    ("cuCtxGetDevice", "CUdevice *"),
    ("cuDevicePrimaryCtxRetain", "CUcontext *, CUdevice"),
    ("cuDevicePrimaryCtxRelease", "CUdevice"),
    ("cuCtxGetId", "CUcontext, unsigned PY_LONG_LONG *"),
    ("cuCtxPushCurrent", "CUcontext"),
    ("cuCtxPopCurrent", "CUcontext *"),
    ("cuCtxSynchronize", "void"),
    ("cuThreadExchangeStreamCaptureMode", "CUstreamCaptureMode *"),
    ("cuMemGetInfo", "size_t *, size_t *"),
    ("cuMemAlloc", "CUdeviceptr *, size_t"),
    ("cuMemFree", "CUdeviceptr"),
    ("cuMemAllocManaged", "CUdeviceptr *, size_t, unsigned int"),
    ("cuMemHostAlloc", "void **, size_t, unsigned int"),
    ("cuMemFreeHost", "void *"),
    ("cuMemHostRegister", "void *, size_t, unsigned int"),
    ("cuMemHostUnregister", "void *"),
    ("cuPointerGetAttribute", "void *, CUpointer_attribute, CUdeviceptr"),
    ("cuMemAllocAsync", "CUdeviceptr *, size_t, CUstream"),
    ("cuMemFreeAsync", "CUdeviceptr, CUstream"),
    ("cuMemcpyAsync", "CUdeviceptr, CUdeviceptr, size_t, CUstream"),
    ("cuMemsetD8Async", "CUdeviceptr, unsigned char, size_t, CUstream"),
    ("cuEventCreate", "CUevent *, unsigned int"),
    ("cuEventRecord", "CUevent, CUstream"),
    ("cuEventQuery", "CUevent"),
    ("cuEventSynchronize", "CUevent"),
    ("cuEventDestroy", "CUevent"),
    ("cuStreamCreate", "CUstream *, unsigned int"),
    ("cuStreamDestroy", "CUstream"),
    ("cuStreamWaitEvent", "CUstream, CUevent, unsigned int"),
    ("cuStreamSynchronize", "CUstream"),
    ("cuStreamIsCapturing", "CUstream, CUstreamCaptureStatus *"),
    ("cuStreamGetId", "CUstream, unsigned PY_LONG_LONG *"),
    ("cuDeviceCanAccessPeer", "int *, CUdevice, CUdevice"),
    ("cuMemGetAllocationGranularity", "size_t *, CUmemAllocationProp const *, CUmemAllocationGranularity_flags"),
    ("cuMemAddressReserve", "CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned PY_LONG_LONG"),
    ("cuMemAddressFree", "CUdeviceptr, size_t"),
    ("cuMemCreate", "CUmemGenericAllocationHandle *, size_t, CUmemAllocationProp const *, unsigned PY_LONG_LONG"),
    ("cuMemRelease", "CUmemGenericAllocationHandle"),
    ("cuMemMap", "CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned PY_LONG_LONG"),
    ("cuMemUnmap", "CUdeviceptr, size_t"),
    ("cuMemSetAccess", "CUdeviceptr, size_t, CUmemAccessDesc const *, size_t"),
)

cdef bint loaded = False
cdef bint found = False         # a driver was found, so it can be asked what an error means
forked = False

_FORKED = ("CUDA was used before this process was forked, and does not work in the child: start processes with "
           "multiprocessing's \"spawn\" or \"forkserver\"")

_HINTS = {
    NOT_INITIALIZED: _FORKED,
    INVALID_CONTEXT: "the device's context was reset, and its memory with it: close this allocator and make another",
    CONTEXT_IS_DESTROYED:
        "the device's context was reset, and its memory with it: close this allocator and make another",
    INVALID_HANDLE: "the stream was destroyed, or belongs to another device",
    NOT_FOUND: "this driver is too old for the call: update it",
    700: "a kernel touched memory that is not its own, and the context is lost: compute-sanitizer finds which",
    719: "a kernel failed, and the context is lost: compute-sanitizer finds which",
}

#: Hints for errors of memory calls while a CUDA graph is captured.
_CAPTURE_HINTS = {
    900: "a CUDA graph is being captured: allocate before, or free after the capture",
    906: "a CUDA graph is being captured, and the default stream may not be used meanwhile",
    CAPTURES_OTHERS: "a CUDA graph is being captured on this stream, which may not wait for others: allocate before, "
                     "or within `with allocator.capture(stream):`",
    CAPTURED: "a CUDA graph is being captured on this stream: free or hand over the memory after the capture",
}


cdef void forget_the_driver() noexcept nogil:
    """Runs in a forked child, before any of Python's fork hooks."""
    global forked
    # Only if CUDA was used: otherwise the child may use it like any other process.
    forked = loaded


call_in_child(forget_the_driver)


# -- loading -----------------------------------------------------------------------------------------------------------

def load():
    """Finds the driver and initialises it, once. Raises DeviceUnavailableError, which says what is missing."""
    global loaded
    if forked:
        raise DeviceUnavailableError(_FORKED)
    if loaded:
        return
    try:
        # Here and not at the top: the package is optional.
        from cuda.bindings import cydriver
    except ImportError as error:
        raise DeviceUnavailableError(
            f"CUDA needs the package cuda-bindings ({error}): pip install 'bfc-allocator[cuda]'") from error
    cdef void** functions = <void**>&cu
    for index, (name, arguments) in enumerate(_SIGNATURES):
        signature = f"CUresult ({arguments})".encode()
        try:
            # By name and signature, so that one build works with cuda-bindings 12.9 and 13, and needs no cuda.h.
            functions[index] = PyCapsule_GetPointer(cydriver.__pyx_capi__[name], signature)
        except (KeyError, ValueError) as error:
            raise DeviceUnavailableError(f"the installed cuda-bindings has no {name} as bfc calls it: bfc works with "
                                         f"12.9 and 13") from error
    initialise()
    # Last: a load that failed can be tried again.
    loaded = True


cdef int initialise() except -1:
    global found
    cdef CUresult result = cu.init(0)
    try:
        if result == NOT_FOUND:
            raise_pending()
    except RuntimeError as error:
        raise DeviceUnavailableError(
            f"no NVIDIA driver was found ({first_line(error)}): install one, or run where nvidia-smi works") from error
    found = True
    if result == NO_DEVICE:
        raise DeviceUnavailableError("the NVIDIA driver found no device: check nvidia-smi and CUDA_VISIBLE_DEVICES")
    if result:
        raise DeviceUnavailableError(f"the NVIDIA driver does not start: {failure(result, 'cuInit')}")
    return 0


cdef int raise_pending() except? -1:
    """Raises the exception that cuda-python has set if it did not find the driver's library."""
    return -1


cdef str first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


cdef object failure(CUresult result, str call):
    """The exception for the result of a call about memory."""
    if result == NOT_LIVE:
        return SubAllocatorError(f"{call} is not a live block")
    return driver_error(call, result, _CAPTURE_HINTS.get(result, ""))


def driver_error(call, CUresult result, hint=""):
    """The DriverError for the result of a call. Without `hint`, the usual hint for such errors is used."""
    cdef const char* name = NULL
    cdef const char* text = NULL
    # cuGetErrorName needs a driver that works in this process.
    if forked or not found:
        result = NOT_INITIALIZED
        named, said, hint = "CUDA_ERROR_NOT_INITIALIZED", "initialization error", ""
    else:
        cu.error_name(result, &name)
        cu.error_text(result, &text)
        named = name.decode() if name != NULL else f"CUDA error {result}"
        said = text.decode() if text != NULL else "the driver has no text for it"
    return DriverError(call, result, named, said, hint or _HINTS.get(result, ""))


cdef bint failed(CUresult result) noexcept:
    """Whether a call failed. Drops the exception that cuda-python sets if the driver lacks the function."""
    if result == NOT_FOUND:
        PyErr_Clear()
    return result != SUCCESS


cdef int check(CUresult result, str call) except -1:
    if failed(result):
        raise failure(result, call)
    return 0


def device_count():
    """The number of devices that the driver shows this process. Raises DeviceUnavailableError."""
    cdef int count = 0
    load()
    check(cu.device_count(&count), "cuDeviceGetCount")
    return count


def attribute(int ordinal, int number):
    """A CUdevice_attribute of a device. Raises DriverError."""
    cdef int value = 0
    load()
    check(cu.device_attribute(&value, number, ordinal), f"cuDeviceGetAttribute({number}, {ordinal})")
    return value


def describe(ordinal):
    """(name, total bytes) of a device. Needs no context, and makes none. Raises DriverError."""
    cdef int handle = 0
    cdef size_t total = 0
    cdef char text[256]
    load()
    check(cu.device_get(&handle, ordinal), f"cuDeviceGet({ordinal})")
    check(cu.device_name(text, 256, handle), f"cuDeviceGetName({ordinal})")
    check(cu.device_total(&total, handle), f"cuDeviceTotalMem({ordinal})")
    return (<const char*>text).decode(errors="replace"), total


def driver_version():
    """(major, minor) of the newest CUDA version that the driver supports. Raises DeviceUnavailableError."""
    cdef int version = 0
    load()
    check(cu.driver_version(&version), "cuDriverGetVersion")
    return version // 1000, version % 1000 // 10


cdef int first_active_device() except -2:
    """The first device with an active primary context; -1 if no device has one."""
    cdef int device, active
    cdef unsigned int flags
    for device in range(device_count()):
        active = 0
        check(cu.context_state(device, &flags, &active), f"cuDevicePrimaryCtxGetState({device})")
        if active:
            return device
    return -1


def device_in_use():
    """The device whose context is current in this thread, or else the first with an active primary context, or else 0.
    Code that can use any device should use this one, so that it creates no further context. Raises
    DeviceUnavailableError."""
    cdef int device = 0
    load()
    if cu.context_device(&device) == SUCCESS:
        return device
    return max(0, first_active_device())
