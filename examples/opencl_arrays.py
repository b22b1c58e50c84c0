"""Arrays of pyopencl, and what is computed from them, in one pool of OpenCL memory.

Needs `pip install 'bfc-allocator[opencl]'`, and an OpenCL device: the processor is one with
`pip install pocl-binary-distribution`. Its compiler does not take processors newer than 2022.

    $ python examples/opencl_arrays.py
    8192 bytes in use
    the last of x: 999.0
    0 bytes in use at the end
"""

import numpy as np
import pyopencl.array

import bfc

source = bfc.OpenCLSubAllocator(capacity="64 MiB")  # the first device
queue = source.queue
with bfc.BFCAllocator(source, allow_growth=True) as pool:
    take = bfc.integrations.pyopencl.allocator(pool)
    values = np.arange(1000, dtype="float32")
    x = pyopencl.array.to_device(queue, values, allocator=take)
    y = 2 * x + 1  # the results come from the same pool
    assert (y.get() == 2 * values + 1).all()
    print(f"{pool.stats().bytes_in_use} bytes in use")

    # A copy of ours: NumPy to OpenCL memory, with a cast on the way.
    bfc.copy(x, np.arange(1000))
    print("the last of x:", x.get()[-1])
    del x, y
    print(f"{pool.stats().bytes_in_use} bytes in use at the end")
