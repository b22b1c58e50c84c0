"""An emulated CUDA driver: tests of CUDA code on machines without a GPU.

It is a `libcuda.so.1` in C, compiled when it is first loaded, and kept in the user's cache. Load it
before anything calls CUDA, and control it through the `Driver` that `load` returns:

>>> from bfc.testing import cuda_emulator
>>> driver = cuda_emulator.load()
>>> driver.reset(devices=1, total=1 << 30)
>>> driver.fail("cuMemAlloc", at=2)
>>> import bfc
>>> source = bfc.CUDASubAllocator()
>>> first = source.alloc(256, 4096)
>>> source.alloc(256, 4096) is None
True
>>> source.free(*first)
>>> driver.live(), driver.complaints
({}, [])

**What it does.** Devices, primary and created contexts, device, managed, pinned, stream-ordered and
mapped memory that copies and fills really write, streams with the rules of the legacy and the
per-thread default stream, events, host functions, stream capture and the graphs that come of it.
Work runs at once unless a test holds its stream. Any call can be made to fail, and every call is
logged. Mistakes that a real driver would have punished are noted as complaints. Copies of two and
three dimensions work.

**What it does not do.** It runs no kernels: modules and libraries take any code, and a launch waits
in its stream's queue and then does nothing, so that nothing is there that its kernel would write.
A graph comes of a capture: none is put together node by node, or launched into another capture, and
none has conditional nodes. The nodes of a launch run one after the other, in the order of capture.
There are no arrays and copies of them; those calls give CUDA_ERROR_NOT_SUPPORTED. Memory, pages and
events can be shared with other processes on emulated drivers: what its process frees, others read
as zero, and a wait for another process's event keeps the caller until that event was recorded. The
CUDA runtime (cudart) checks whose driver it runs on and refuses this one, and so do CuPy and
PyTorch; cuda-python, cuda.core and Numba's driver calls run. Its calls take almost no time, so do
not measure time on it. It runs on Linux only, and refuses a process that has loaded another
libcuda.

Handles of primary contexts and default pools outlive a reset, since libraries keep them. If such a
library uses a context again, it is alive, though nobody has retained it; freeing what is left from
before a reset succeeds and does nothing. Calls of cuGetProcAddress, cuGetErrorName and
cuGetErrorString are not logged.

With BFC_EMULATOR_LEAKS=1 in its environment a process says at its end what it has leaked, and its
status is 99 if it would have been 0.

Its sources are a package of their own, `bfc_cuda_emulator`.
"""

from bfc_cuda_emulator import ERRORS, Allocation, Call, Driver, build, load, preamble, script

__all__ = ["ERRORS", "Allocation", "Call", "Driver", "build", "load", "preamble", "script"]
