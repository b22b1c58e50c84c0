"""A GPU memory allocator that you can use, see into and trust.

Importing it calls no driver, and imports neither NumPy, nor `trace/`, `plans/` and `bfc_tools`,
which come when they are asked for. Each line of the list imports only from lines above it. In
order:

    include/                                      headers, for others, too
    native/, version.py, units.py, streams.py, devices.py   words, and structures in C++
    interpreter/, errors.py
    libraries.py                                  others', imported when needed; tables of pandas
    _core.pyx, files.py, compiling.py, drivers/   the engine; all code that calls a driver
    cuda.py, pytorch/, suballocators/             PyTorch's terms; where regions come from
    snapshots/, buffers/
    allocators/                                   an allocator and its parts, for both policies
    backings/                                     what memory lies behind its chunks
    policies/, pinned/                            TensorFlow's and PyTorch's
    trace/, copying/, opencl.py
    plans/                                        places for the blocks of a run that repeats
    integrations/                                 other libraries
    study.py                                      the door to the package bfc_tools
    testing/                                      it uses `bfc` as a user does
    __main__.py
"""

import typing as _typing
from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec

from bfc.interpreter.subinterpreters import is_subinterpreter as _is_subinterpreter

if _find_spec("bfc._core") is None:
    raise ImportError(
        f"{__path__[0]} is not compiled: run `make dev` in the checkout, or `pip install .` there "
        "and leave its folder before the import"
    )

if _is_subinterpreter():
    # Calls that need Python take the GIL with PyGILState_Ensure, which would wait for ever there.
    raise ImportError(
        "bfc cannot be used in a subinterpreter: import it in the main interpreter, or in a "
        "process of its own (under mod_wsgi: WSGIApplicationGroup %{GLOBAL})"
    )

try:
    from bfc import cuda, integrations, opencl, pinned
except ImportError as _error:
    _error.add_note(
        f"if {__path__[0]} is a checkout, it was built from other sources: run `make dev`"
    )
    raise
if _find_spec("bfc_tools") is None:  # which is loaded when it is first asked for
    raise ImportError(
        f"{__path__[0]} was installed before bfc_tools stood beside it: run `make dev` in the "
        "checkout, or install it again"
    )

from bfc._core import SharedCounter
from bfc.allocators import _plans as _allocator_plans
from bfc.allocators._allocator import Allocator
from bfc.allocators.graph_pool import GraphPool
from bfc.buffers._buffer import Buffer, BufferView
from bfc.buffers._scopes import owner, use_stream
from bfc.copying import copy
from bfc.errors import (
    AsleepError,
    ClosedError,
    DeviceUnavailableError,
    DriverError,
    InvalidPointerError,
    InvariantError,
    OutOfMemoryError,
    PlanError,
    PolicyError,
    SettingsError,
    SubAllocatorError,
    TraceError,
)
from bfc.include import get_include
from bfc.integrations import use
from bfc.pinned import PinnedAllocator
from bfc.policies._bfc import BFCAllocator
from bfc.policies._caching import CachingAllocator
from bfc.policies.ends import AllocationEnd, EndPolicy
from bfc.policies.mem_pool import MemPool, use_mem_pool
from bfc.pytorch.pinned_settings import PinnedSettings
from bfc.pytorch.settings import CachingSettings
from bfc.snapshots.asleep import SleepReport
from bfc.snapshots.leaks import Leak, Leaks
from bfc.snapshots.refusal import set_oom_report
from bfc.snapshots.snapshot import (
    BinInfo,
    ChunkInfo,
    Frame,
    HistoryEntry,
    RegionInfo,
    Snapshot,
    Stats,
    TagInfo,
)
from bfc.suballocators import (
    CUDASubAllocator,
    Device,
    Fence,
    HostSubAllocator,
    OpenCLSubAllocator,
    SimulatedSubAllocator,
    SubAllocator,
)
from bfc.version import __version__ as __version__

if _typing.TYPE_CHECKING:
    from bfc import plans as plans
    from bfc import study as study
    from bfc import trace as trace
    from bfc.plans import Plan
    from bfc.trace import Occupancy, Replay, Timeline, Trace
    from bfc_tools.browser.report import report
    from bfc_tools.predicting.largest import Largest, largest
    from bfc_tools.predicting.prediction import Prediction
    from bfc_tools.predicting.session import predict
    from bfc_tools.study.advice import Advice, AdviceRow
    from bfc_tools.study.advise import advise
    from bfc_tools.study.diff import diff
    from bfc_tools.study.growth import Diff, Growth, MomentGrowth
else:
    #: The module of each name that an allocator works without: traces, plans, and all of
    #: `bfc_tools`. One is loaded when its name is first asked for.
    _HOMES = {
        "Advice": "bfc_tools.study.advice",
        "AdviceRow": "bfc_tools.study.advice",
        "Diff": "bfc_tools.study.growth",
        "Growth": "bfc_tools.study.growth",
        "Largest": "bfc_tools.predicting.largest",
        "MomentGrowth": "bfc_tools.study.growth",
        "Occupancy": "bfc.trace",
        "Plan": "bfc.plans",
        "Prediction": "bfc_tools.predicting.prediction",
        "Replay": "bfc.trace",
        "Timeline": "bfc.trace",
        "Trace": "bfc.trace",
        "advise": "bfc_tools.study.advise",
        "diff": "bfc_tools.study.diff",
        "largest": "bfc_tools.predicting.largest",
        "plans": "bfc.plans",
        "predict": "bfc_tools.predicting.session",
        "report": "bfc_tools.browser.report",
        "study": "bfc.study",
        "trace": "bfc.trace",
    }

    def _first_recording(allocator: object, iterations: object) -> object:
        """What `record_plan` calls until plans are imported."""
        from bfc.plans.recording import Recording  # which takes this one's place

        return Recording(allocator, iterations)

    _allocator_plans.set_recording(_first_recording)

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = _import_module(_HOMES[name])
        is_module = module.__name__ == f"{__name__}.{name}"
        found = globals()[name] = module if is_module else getattr(module, name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})


__all__ = [
    "Advice",
    "AdviceRow",
    "AllocationEnd",
    "Allocator",
    "AsleepError",
    "BFCAllocator",
    "BinInfo",
    "Buffer",
    "BufferView",
    "CUDASubAllocator",
    "CachingAllocator",
    "CachingSettings",
    "ChunkInfo",
    "ClosedError",
    "Device",
    "DeviceUnavailableError",
    "Diff",
    "DriverError",
    "EndPolicy",
    "Fence",
    "Frame",
    "GraphPool",
    "Growth",
    "HistoryEntry",
    "HostSubAllocator",
    "InvalidPointerError",
    "InvariantError",
    "Largest",
    "Leak",
    "Leaks",
    "MemPool",
    "MomentGrowth",
    "Occupancy",
    "OpenCLSubAllocator",
    "OutOfMemoryError",
    "PinnedAllocator",
    "PinnedSettings",
    "Plan",
    "PlanError",
    "PolicyError",
    "Prediction",
    "RegionInfo",
    "Replay",
    "SettingsError",
    "SharedCounter",
    "SimulatedSubAllocator",
    "SleepReport",
    "Snapshot",
    "Stats",
    "SubAllocator",
    "SubAllocatorError",
    "TagInfo",
    "Timeline",
    "Trace",
    "TraceError",
    "advise",
    "copy",
    "cuda",
    "diff",
    "get_include",
    "integrations",
    "largest",
    "opencl",
    "owner",
    "pinned",
    "predict",
    "report",
    "set_oom_report",
    "use",
    "use_mem_pool",
    "use_stream",
]
