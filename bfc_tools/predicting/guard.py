"""The device "cuda" of a PyTorch that has none: where PyTorch keeps what it asks of a device."""

from __future__ import annotations

import ctypes
import os
from types import ModuleType
from typing import Any

from bfc.errors import DeviceUnavailableError
from bfc.pytorch import _fake_device
from bfc.pytorch.extension import torch_from, torch_version
from bfc_tools.predicting.releases import NEWEST, OLDEST, release_of

#: c10::impl::device_guard_impl_registry, at::detail::getCUDAHooks() and the table of virtual
#: functions of at::CUDAHooksInterface.
REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
GET_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
PLAIN_HOOKS = "_ZTVN2at18CUDAHooksInterfaceE"
#: In front of a table's functions: an offset, and the type.
AHEAD = 2
#: The first functions of the hooks that a predicted device answers, and the last, counted from
#: behind (ATen/detail/AcceleratorHooksInterface.h and CUDAHooksInterface.h).
FIRST_HOOKS = {
    "isBuilt": 2,
    "isAvailable": 3,
    "hasPrimaryContext": 4,
    "init": 5,
    "deviceCount": 6,
    "getCurrentDevice": 8,
    "current_device": 26,
}
LAST_HOOKS = {"getNumGPUs": -2, "deviceSynchronize": -1}


def supported_torch() -> Any:
    """torch. Raises DeviceUnavailableError where there is none, or one that is not known."""
    torch = torch_from(OLDEST.version, "bfc.predict needs", "pip install torch")
    if torch_version(torch) > NEWEST.version:
        raise DeviceUnavailableError(
            f"bfc.predict knows torch {OLDEST.name} to {NEWEST.name}, and this is "
            f"torch {torch.__version__}: install one of these, or a newer bfc"
        )
    return torch


def load() -> ModuleType:
    """The module that shows PyTorch a device. Raises RuntimeError where this torch is built
    otherwise than its release."""
    torch = supported_torch()
    release = release_of(torch_version(torch))
    try:
        registry = _address("libc10.so", REGISTRY)
        hooks = ctypes.CFUNCTYPE(ctypes.c_void_p)(_address("libtorch_cpu.so", GET_HOOKS))()
        plain = _address("libtorch_cpu.so", PLAIN_HOOKS)
    except (OSError, ValueError) as error:
        raise RuntimeError(f"{_other(torch)}: {error}") from error
    words = _size(plain) // ctypes.sizeof(ctypes.c_void_p)
    if words != AHEAD + release.hooks:
        raise RuntimeError(f"{_other(torch)}: its hooks have {words - AHEAD} functions")
    last = {name: release.hooks + slot for name, slot in LAST_HOOKS.items()}
    guards = {name: slot for slot, name in enumerate(release.guard)}
    _fake_device.prepare(registry, hooks, plain, words, guards, FIRST_HOOKS | last)
    return _fake_device


def _other(torch: Any) -> str:
    return f"torch {torch.__version__} is not built as PyTorch's own of that release are"


def _address(library: str, name: str) -> int:
    """Where a name lies in a library that this process has loaded."""
    loaded = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return ctypes.addressof(ctypes.c_byte.in_dll(loaded, name))


class _Symbol(ctypes.Structure):
    """Of <elf.h>: Elf64_Sym."""

    _fields_ = (
        ("name", ctypes.c_uint32),
        ("info", ctypes.c_uint8),
        ("other", ctypes.c_uint8),
        ("section", ctypes.c_uint16),
        ("value", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
    )


def _size(address: int) -> int:
    """How many bytes the object has that begins at an address, by the library's own table."""
    information = (ctypes.c_void_p * 4)()
    symbol = ctypes.POINTER(_Symbol)()
    of_symbol = 1  # RTLD_DL_SYMENT
    look = ctypes.CDLL(None).dladdr1
    look.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    if not look(address, information, ctypes.byref(symbol), of_symbol) or not symbol:
        return 0
    return int(symbol.contents.size)
