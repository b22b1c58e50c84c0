"""Values that stand somewhere after all: in a file that the program has read, or in an array.

A tensor that is only a shape has none. Where it was made of such memory, this is kept by its
storage, so that a program that asks for its values on the host gets them. Nothing is read before
that: a checkpoint of many gigabytes costs no memory and no time.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

#: Operators whose result on the host has the values of an argument: of which one.
COPIES = {"_to_copy": 0, "clone": 0, "copy_": 1}


class RealValues:
    """Of each storage that is only a size, where its bytes are."""

    def __init__(self) -> None:
        self._read: dict[int, Callable[[], Any]] = {}
        self._watches: dict[int, object] = {}

    def __bool__(self) -> bool:
        return bool(self._read)

    def put(self, storage: Any, read: Callable[[], Any]) -> None:
        """Notes which function returns the storage with the bytes of another one."""
        key = storage._cdata
        self._read[key] = read
        self._watches[key] = weakref.ref(storage, lambda _: self._forget(key))

    def put_tensor(self, fake: Any, real: Any) -> None:
        """Notes that a tensor which is only a shape was made of one on the host."""
        if type(real) not in (torch.Tensor, torch.nn.Parameter) or not _is_plain(real, "cpu"):
            return
        storage, bytes_of = fake.untyped_storage(), real.untyped_storage()
        if storage._cdata in self._watches:  # a part of what was noted, and perhaps written to
            return
        same = storage.nbytes() == bytes_of.nbytes()
        if same and fake.storage_offset() == real.storage_offset():
            self.put(storage, lambda: bytes_of)

    def copied(self, name: str, args: Any, result: Any) -> None:
        """Notes what a copy on the host holds: it is made again once somebody asks."""
        real = self.get(args[COPIES[name]]) if self._read else None
        if real is None or not _is_plain(result, "cpu"):
            return
        storage, dtype = result.untyped_storage(), result.dtype
        shape, strides = tuple(result.shape), tuple(result.stride())
        if storage.nbytes() != result.numel() * result.element_size():
            return  # only a part was written

        @functools.cache
        def made() -> Any:
            with _disable_current_modes(), torch.no_grad():
                into = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
                return into.copy_(real).untyped_storage()

        self.put(storage, made)

    def drop(self, key: int) -> None:
        """Notes that a storage was written to."""
        self._read.pop(key, None)

    def _forget(self, key: int) -> None:
        self._read.pop(key, None)
        self._watches.pop(key, None)

    def get(self, tensor: Any) -> Any:
        """A tensor on the host with the values of one that is only a shape; or None."""
        if not self._read or not isinstance(tensor, FakeTensor) or not _is_plain(tensor, "cpu"):
            return None
        read = self._read.get(tensor.untyped_storage()._cdata)
        if read is None:
            return None
        shape, strides = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        offset = int(tensor.storage_offset())
        with _disable_current_modes(), torch.no_grad():
            made = torch.empty(0, dtype=tensor.dtype, device="cpu")
            return made.set_(read(), offset, shape, strides)


def _is_plain(tensor: Any, device: str) -> bool:
    strided = tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
    return strided and tensor.device.type == device and not tensor.is_quantized
