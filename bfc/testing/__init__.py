"""Tools for tests of allocators: Hypothesis strategies and a state machine, slow models, a contract
for sub-allocators, sub-allocators that misbehave, a leak check, and a CUDA driver without a GPU.

Nothing here is loaded by `import bfc`. The strategies and the machine need Hypothesis, the contract
pytest: `pip install 'bfc-allocator[testing]'`; all else works without them.
`docs/how-to/fuzzing.md` shows how to begin.

>>> from bfc.testing import Misbehaving
>>> source = Misbehaving("1 GiB")
>>> source.on("alloc", 1, returns=None)
>>> source.alloc(256, 4096) is None
True

In order:

    leaks.py, sources.py, ground.py
    contract.py, strategies.py
    cuda_emulator.py        the door to the package bfc_cuda_emulator
    differential.py         each step on an allocator and on a model of the package bfc_slow_models
    machine.py              Hypothesis's state machine
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bfc.snapshots.leaks import Leak as Leak
    from bfc.testing import cuda_emulator as cuda_emulator
    from bfc.testing.contract import SubAllocatorContract as SubAllocatorContract
    from bfc.testing.differential import Twins as Twins
    from bfc.testing.leaks import LeakError as LeakError
    from bfc.testing.leaks import leak_check as leak_check
    from bfc.testing.machine import AllocatorMachine as AllocatorMachine
    from bfc.testing.sources import IntegerSource as IntegerSource
    from bfc.testing.sources import Misbehaving as Misbehaving
    from bfc.testing.strategies import requests as requests
    from bfc.testing.strategies import settings as settings
    from bfc.testing.strategies import sizes as sizes
    from bfc.testing.strategies import stream_events as stream_events
    from bfc.testing.strategies import traces as traces

#: The module of each public name. One is loaded when its name is first asked for.
_HOMES = {
    "AllocatorMachine": "machine",
    "IntegerSource": "sources",
    "Leak": "leaks",
    "LeakError": "leaks",
    "Misbehaving": "sources",
    "SubAllocatorContract": "contract",
    "Twins": "differential",
    "cuda_emulator": "cuda_emulator",
    "leak_check": "leaks",
    "requests": "strategies",
    "settings": "strategies",
    "sizes": "strategies",
    "stream_events": "strategies",
    "traces": "strategies",
}
_EXTRAS = {"hypothesis": "Hypothesis", "pytest": "pytest", "_pytest": "pytest"}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    try:
        module = importlib.import_module(f"bfc.testing.{home}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        raise ModuleNotFoundError(
            f"bfc.testing.{name} needs {_EXTRAS[package]}: pip install 'bfc-allocator[testing]'",
            name=error.name,
        ) from error
    found = module if home == name else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
