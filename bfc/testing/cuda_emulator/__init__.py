"""An emulated CUDA driver, for tests on machines without a GPU.

Tests load it before cuda-python makes its first call, and steer it through the Driver that
:func:`load` gives them::

    from bfc.testing import cuda_emulator

    driver = cuda_emulator.load()
    driver.reset(devices=1, total=1 << 30)
    driver.fail("cuMemAlloc", at=3)
    ...
    assert driver.complaints == []

What it does: devices, primary and created contexts, device, managed, pinned, stream-ordered and
mapped memory that copies and fills really write, streams with the rules of the legacy and the
per-thread default stream, events, host functions, stream capture without graphs. Work runs at once
unless a test holds its stream. Copies of two and three dimensions work, those of arrays do not.
Modules and libraries take any code, and a launch stands in its stream's queue but does nothing:
what its kernel would have written is not there. What it lacks: graphs, arrays, sharing with other
processes; those calls give CUDA_ERROR_NOT_SUPPORTED. Nor does it satisfy the CUDA runtime (cudart),
and hence CuPy, which test whose driver they run on.

Handles of primary contexts and default pools outlive a reset, for libraries keep them. A context
that such a library uses again is alive then, though nobody has retained it; freeing what is left
from before a reset succeeds and does nothing. Calls of cuGetProcAddress, cuGetErrorName and
cuGetErrorString are not logged.

With BFC_EMULATOR_LEAKS=1 in its environment a process says at its end what it has leaked, and its
status is 99 if it would have been 0.
"""

from bfc.testing.cuda_emulator.driver import ERRORS as ERRORS
from bfc.testing.cuda_emulator.driver import Allocation as Allocation
from bfc.testing.cuda_emulator.driver import Call as Call
from bfc.testing.cuda_emulator.driver import Driver as Driver
from bfc.testing.cuda_emulator.driver import build as build
from bfc.testing.cuda_emulator.driver import load as load
from bfc.testing.cuda_emulator.driver import preamble as preamble
from bfc.testing.cuda_emulator.driver import script as script
