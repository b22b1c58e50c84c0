"""Where regions come from: one file for each kind of memory. In order:

base.py           the contract
_contract.pyx     the call of a sub-allocator in Python, and whether its answer is a block
virtual.py        which pages of a sub-allocator are mapped where
host_pages.py     host memory that is mapped
cuda_pages.py     memory of a CUDA device that is mapped
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
