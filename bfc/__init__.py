"""A GPU memory allocator that you can use, see into and trust. Importing it calls no driver and no
NumPy."""

from bfc import cuda, integrations
from bfc._allocator import Allocator
from bfc._bfc import BFCAllocator
from bfc._buffer import Buffer, BufferView
from bfc._core import SharedCounter
from bfc.errors import (
    ClosedError,
    DeviceUnavailableError,
    DriverError,
    InvalidPointerError,
    InvariantError,
    OutOfMemoryError,
    SubAllocatorError,
    TraceError,
)
from bfc.integrations import use
from bfc.snapshot import BinInfo, ChunkInfo, RegionInfo, Snapshot, Stats
from bfc.suballocators import (
    CUDASubAllocator,
    Device,
    Fence,
    HostSubAllocator,
    SimulatedSubAllocator,
    SubAllocator,
)
from bfc.trace import Replay, Trace

__version__ = "0.1.0"

__all__ = [
    "Allocator",
    "BFCAllocator",
    "BinInfo",
    "Buffer",
    "BufferView",
    "CUDASubAllocator",
    "ChunkInfo",
    "ClosedError",
    "Device",
    "DeviceUnavailableError",
    "DriverError",
    "Fence",
    "HostSubAllocator",
    "InvalidPointerError",
    "InvariantError",
    "OutOfMemoryError",
    "RegionInfo",
    "Replay",
    "SharedCounter",
    "SimulatedSubAllocator",
    "Snapshot",
    "Stats",
    "SubAllocator",
    "SubAllocatorError",
    "Trace",
    "TraceError",
    "cuda",
    "integrations",
    "use",
]
