"""Where regions come from: one file a source, on the contract of `base`."""

from bfc.suballocators.base import Device, Fence, SubAllocator
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
