"""Runs a script on the CPU, as one of several processes that send each other data, and writes which
storages its tensors had, as they were made and freed: `births.py SCRIPT OUTPUT`."""

from __future__ import annotations

import json
import runpy
import sys
import threading
import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

#: Storages of so few bytes are left out: numbers on the host, such as an optimizer's steps.
SMALL = 64


class Births(TorchDispatchMode):
    """Notes each storage that an operator's result is the first to have, and its end: its bytes,
    and minus these."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[int] = []
        self._sums: list[int] = []  # where gradients were added
        self._live: dict[int, tuple[int, Any]] = {}
        self._thread = threading.get_ident()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        fake = any(issubclass(one, FakeTensor) for one in types)
        if not fake and threading.get_ident() == self._thread:
            self._see(result, func._schema.name)
            if func._schema.is_mutable:
                self._see(args, func._schema.name)
        return result

    def _see(self, value: Any, name: str) -> None:
        if isinstance(value, tuple | list):
            for one in value:
                self._see(one, name)
        elif isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            self.storage(value.untyped_storage(), name)

    def storage(self, storage: Any, name: str) -> None:
        """Notes a storage that is new, or has another size."""
        key, nbytes = storage._cdata, storage.nbytes()
        before = self._live.pop(key, None)
        if before is not None and before[0] == nbytes:
            self._live[key] = before
            return
        if nbytes:
            watch = weakref.ref(storage, lambda one: self._died(key, one))
            self._live[key] = nbytes, watch
            self._add(nbytes, name)
        if before is not None:
            self._add(-before[0], name)

    def resized(self, storage: Any) -> None:
        """Notes what is no operator."""
        if storage._cdata in self._live:
            self.storage(storage, "resize_")

    def _died(self, key: int, watch: Any) -> None:
        nbytes, now = self._live.get(key, (0, None))
        if now is watch:
            del self._live[key]
            self._add(-nbytes, "")

    def _add(self, nbytes: int, name: str) -> None:
        if abs(nbytes) > SMALL:
            if name == "aten::add" and torch._C._current_graph_task_id() != -1:
                self._sums.append(len(self.events))
            self.events.append(nbytes)

    def as_without_a_mode(self) -> list[int]:
        """The events as where no mode looks on: PyTorch adds gradients in place there. Here a sum
        is made, and both that it is made of are freed at once, unless one is held."""
        left = list(self.events)
        for at in reversed(self._sums):
            if left[at + 1 : at + 3] == [-left[at]] * 2:
                del left[at : at + 2]
        return left


def main() -> None:
    script, output = sys.argv[1:]
    births = Births()
    resize = torch.UntypedStorage.resize_

    def resized(storage: Any, nbytes: int) -> Any:
        found = resize(storage, nbytes)
        births.resized(storage)
        return found

    torch.UntypedStorage.resize_ = resized
    sys.argv = [script]
    with births:
        runpy.run_path(script, run_name="__main__")
        births._live.clear()
    with open(output, "w") as file:
        json.dump(births.as_without_a_mode(), file)


if __name__ == "__main__":
    main()
