"""One function that copies between any two of host, pinned, CUDA and OpenCL memory.

Importing this loads no NumPy and no driver; the first copy does. In order:

    layout.py           arithmetic of shapes and strides
    host.py             copies on the host, by NumPy
    waiting.py          keeps objects alive until a stream has finished with them
    kernels.py          the source of the copy kernel
    view.py             a `View`: items in some memory
    readers.py          the protocols through which memory is found: `view_of`
    copy_stream.py      what the engine needs from a stream
    launch.py           decisions before a launch
    cuda_stream.py, opencl_stream.py
    engine.py           the checks, and the path between two kinds of memory
    _fast.pyx           copies between two NumPy arrays; all else goes to the engine
"""

from bfc.copying._fast import copy

__all__ = ["copy"]
