"""The table of C functions of `bfc_allocator.h`, for tests. ctypes calls it as C does: without the
GIL."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from bfc.allocators._allocator import Allocator
from bfc.integrations import _torch_table
from bfc.integrations.torch_backend import capsule
from bfc.pytorch.words import FIELDS, GROUPS

NAME = b"bfc.allocator"
ROOM = 4096
OK, OUT_OF_MEMORY, NOT_LIVE, FAILED = range(4)

INT, WORD, SIZE, PTR = ctypes.c_int, ctypes.c_int64, ctypes.c_size_t, ctypes.c_void_p
WHY = (PTR, SIZE)

#: The functions in their order: what each takes behind `self`, and whether it says why it failed.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "allocate": (INT, INT, SIZE, WORD, PTR, *WHY),
    "free": (INT, PTR),
    "record_stream": (INT, PTR, WORD, *WHY),
    "copy": (INT, PTR, PTR, SIZE, WORD, *WHY),
    "empty": (INT, *WHY),
    "stats": (INT, INT, PTR, *WHY),
    "reset_accumulated_stats": (INT, INT, *WHY),
    "reset_peak_stats": (INT, INT, *WHY),
    "memory_info": (INT, INT, PTR, PTR, *WHY),
    "device_of": (INT, PTR),
    "retain": (None,),
    "release": (None,),
}
GROUP_FIGURES = len(GROUPS) * 3 * len(FIELDS)
SINGLES = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc")
SINGLES += ("num_device_free", "max_split_size", "invalid_frees")


class Structure(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("self", PTR),
        *((name, PTR) for name in FUNCTIONS),
    )


class Stats(ctypes.Structure):
    _fields_ = (
        ("groups", WORD * GROUP_FIGURES),
        ("oversize", WORD * (2 * len(FIELDS))),
        *((name, WORD) for name in SINGLES),
    )


def at(found: object) -> Structure:
    """What lies in a capsule."""
    ask = ctypes.pythonapi.PyCapsule_GetPointer
    ask.restype, ask.argtypes = PTR, (ctypes.py_object, ctypes.c_char_p)
    return Structure.from_address(ask(found, NAME))


class Table:
    """The functions for some pools. Those that can fail return the result and why."""

    def __init__(self, *pools: Allocator, opened: Callable[[int], Allocator] | None = None) -> None:
        self.capsule = capsule(pools) if opened is None else _torch_table.Table(opened, 1).capsule()
        self.structure = at(self.capsule)
        self.functions: dict[str, Callable[..., Any]] = {
            name: ctypes.CFUNCTYPE(types[0], PTR, *types[1:])(getattr(self.structure, name))
            for name, types in FUNCTIONS.items()
        }

    @property
    def address(self) -> ctypes.c_void_p:
        """For C: a `const bfc_allocator *`."""
        return ctypes.c_void_p(ctypes.addressof(self.structure))

    def call(self, name: str, *arguments: Any) -> Any:
        return self.functions[name](self.structure.self, *arguments)

    def ask(self, name: str, *arguments: Any, room: int = ROOM) -> tuple[int, str]:
        why = ctypes.create_string_buffer(b"nothing", ROOM)
        result = self.call(name, *arguments, why, room)
        return result, "" if result == OK else why.value.decode()

    def try_allocate(self, nbytes: int, stream: int = 0, device: int = 0) -> tuple[int, str, int]:
        ptr = ctypes.c_void_p(1)
        result, why = self.ask("allocate", device, nbytes, stream, ctypes.byref(ptr))
        return result, why, ptr.value or 0

    def allocate(self, nbytes: int, stream: int = 0, device: int = 0) -> int:
        result, why, ptr = self.try_allocate(nbytes, stream, device)
        assert result == OK, why
        assert ptr
        return ptr

    def free(self, ptr: int) -> int:
        result: int = self.call("free", ptr)
        return result

    def record_stream(self, ptr: int, stream: int) -> tuple[int, str]:
        return self.ask("record_stream", ptr, stream)

    def device_of(self, ptr: int) -> int:
        device: int = self.call("device_of", ptr)
        return device

    def stats(self, device: int = 0) -> dict[str, int]:
        """The figures by PyTorch's keys, and `invalid_frees`."""
        found = Stats()
        result, why = self.ask("stats", device, ctypes.byref(found))
        assert result == OK, why
        names = [
            f"{group}.{kind}" for group in GROUPS for kind in ("all", "small_pool", "large_pool")
        ]
        keys = [f"{name}.{field}" for name in names for field in FIELDS]
        keys += [f"oversize_{of}.{field}" for of in ("allocations", "segments") for field in FIELDS]
        figures = dict(zip(keys, [*found.groups, *found.oversize], strict=True))
        return figures | {name: getattr(found, name) for name in SINGLES}

    def memory_info(self, device: int = 0) -> tuple[int, str, int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        result, why = self.ask("memory_info", device, ctypes.byref(free), ctypes.byref(total))
        return result, why, free.value, total.value
