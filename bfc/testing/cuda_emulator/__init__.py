"""An emulated CUDA driver: tests of CUDA code on machines without a GPU.

It is a `libcuda.so.1` in C, compiled when first asked for and kept in the user's cache. Load it
before anything calls CUDA, and steer it through the `Driver` that `load` returns:

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
per-thread default stream, events, host functions, stream capture without graphs. Work runs at once
unless a test holds its stream. Any call can be made to fail, every call is logged, and what a real
driver would have punished is written down as a complaint. Copies of two and three dimensions work.

**What it does not do.** It runs no kernels: modules and libraries take any code, and a launch
stands in its stream's queue but does nothing, so what its kernel would have written is not there.
There are no graphs, no arrays and copies of them, no sharing with other processes; those calls give
CUDA_ERROR_NOT_SUPPORTED. It does not satisfy the CUDA runtime (cudart), and hence neither CuPy nor
PyTorch, which ask whose driver they run on; cuda-python, cuda.core and Numba's driver calls run. It
takes no time to speak of, so nothing can be measured on it. Linux only. It refuses a process that
has another libcuda loaded.

Handles of primary contexts and default pools outlive a reset, for libraries keep them. A context
that such a library uses again is alive then, though nobody has retained it; freeing what is left
from before a reset succeeds and does nothing. Calls of cuGetProcAddress, cuGetErrorName and
cuGetErrorString are not logged.

With BFC_EMULATOR_LEAKS=1 in its environment a process says at its end what it has leaked, and its
status is 99 if it would have been 0.

The sources in C stand beside these. In order:

    symbols.h
    emulator.h
    library.py      compiles and loads it
    driver.py       how it is steered
"""

from bfc.testing.cuda_emulator.driver import ERRORS as ERRORS
from bfc.testing.cuda_emulator.driver import Allocation as Allocation
from bfc.testing.cuda_emulator.driver import Call as Call
from bfc.testing.cuda_emulator.driver import Driver as Driver
from bfc.testing.cuda_emulator.driver import load as load
from bfc.testing.cuda_emulator.driver import preamble as preamble
from bfc.testing.cuda_emulator.driver import script as script
from bfc.testing.cuda_emulator.library import build as build
