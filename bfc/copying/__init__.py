"""One function that copies between any two of host, pinned, CUDA and OpenCL memory.

Importing this loads no NumPy and no driver; the first copy does. In order:

    layout.py           numbers alone: the fewest dimensions of a walk, rows, pieces of a launch
    host.py             NumPy
    waiting.py          what a stream still reads, kept until it has finished
    kernels.py          the one kernel
    view.py             what a view is: items in some memory
    readers.py          the protocols that lead to memory: `view_of`
    copy_stream.py      what the engine asks of a stream
    launch.py           what is settled before a launch
    cuda_stream.py, opencl_stream.py
    engine.py           the order of exits, and the way between two kinds of memory
    _fast.pyx           two arrays of NumPy's own; all else goes to the engine
"""

from bfc.copying._fast import copy

__all__ = ["copy"]
