"""Where regions come from: one file for each kind of memory. In order:

_native_mapping.pyx   C functions that map memory, as methods
base.py           the contract
_books.pyx        the books of where the pages of a sub-allocator are mapped
host_pages.py     mapped host memory
_cuda_pages.pyx   mapped memory of a CUDA device
held_streams.py   streams whose work is held back until it is let go
simulated_captures.py   which streams of a simulated device capture graphs
simulated.py, host.py, cuda.py, opencl.py
"""

from bfc.devices import Device, Fence
from bfc.suballocators.base import SubAllocator
from bfc.suballocators.cuda import CUDASubAllocator
from bfc.suballocators.host import HostSubAllocator
from bfc.suballocators.opencl import OpenCLSubAllocator
from bfc.suballocators.simulated import SimulatedSubAllocator

__all__ = [
    "CUDASubAllocator",
    "Device",
    "Fence",
    "HostSubAllocator",
    "OpenCLSubAllocator",
    "SimulatedSubAllocator",
    "SubAllocator",
]
