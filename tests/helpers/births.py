"""Runs a script on the CPU, as one of several processes that send each other data, and writes which
storages its tensors had, as they were made and freed: `births.py SCRIPT OUTPUT`.

Storages have numbers, in the order in which they were made. The output has `events`, each of which
is the number of a storage that is made, or `~` of it where it is freed; `sizes`, by number; and
`sent`: the numbers of those that a collective was given. A thread of gloo's holds these until it
has seen that all have theirs, so that they may be freed later than the program lets them go.
"""

from __future__ import annotations

import json
import runpy
import sys
import threading
import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

#: Storages of so few bytes are left out: numbers on the host, such as an optimizer's steps.
SMALL = 64
COLLECTIVES = ("c10d::", "_c10d_functional::")
#: What gradients do in place where no mode looks on: how many storages end where they make anew.
IN_PLACE = {"aten::add": 2, "aten::index_put": 1, "aten::scatter": 1}
#: Tensors that have others, and no memory of their own.
WRAPPERS = (DTensor, AsyncCollectiveTensor)
#: Where DistributedDataParallel writes numbers about parameters on the host, and sends copies.
WRITERS = ("_verify_params_across_processes", "Reducer._rebuild_buckets")


def in_a_graph() -> bool:
    """Whether the code of a compiled graph runs, which adds as it says."""
    frame: Any = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith("<eval_with_key>"):
        frame = frame.f_back
    return frame is not None


class Births(TorchDispatchMode):
    """Notes each storage that an operator's result is the first to have, and its end."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[int] = []
        self.sizes: list[int] = []
        self.names: list[str] = []  # of the operators that made them
        self.sent: set[int] = set()
        self.written: set[int] = set()  # numbers about parameters, and what is sent of them
        self.writes = False
        self._sums: dict[int, int] = {}  # by the number of a sum of gradients, what it was added to
        self._live: dict[int, tuple[int, int, Any]] = {}
        self._pauses = 0
        self._thread = threading.get_ident()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether `torch.compile` compiles under this mode: it sees what the graphs run."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, WRAPPERS) for one in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        fake = any(issubclass(one, FakeTensor) for one in types)
        if not fake and not self._pauses and threading.get_ident() == self._thread:
            made = len(self.sizes)
            self._see(result, name)
            if func._schema.is_mutable:
                self._see(args, name)
            in_backward = torch._C._current_graph_task_id() != -1
            if name in IN_PLACE and in_backward and not in_a_graph():
                before = self._live.get(args[0].untyped_storage()._cdata)
                if before is not None and self.sizes[made:] == [before[1]]:  # no view of more
                    self._sums[made] = before[0]
            if name.startswith(COLLECTIVES):
                self._send((args, result))
        return result

    def pause(self) -> None:
        """Sees nothing, until `resume`."""
        self._pauses += 1

    def resume(self) -> None:
        """Goes on where `pause` had it stop."""
        self._pauses -= 1

    def _see(self, value: Any, name: str) -> None:
        if isinstance(value, tuple | list):
            for one in value:
                self._see(one, name)
        elif isinstance(value, torch.Tensor) and not isinstance(value, (FakeTensor, *WRAPPERS)):
            made = len(self.sizes)
            self.storage(value.untyped_storage(), name)
            if self.writes and not value.is_floating_point():
                self.written |= {*range(made, len(self.sizes))}

    def _send(self, value: Any) -> None:
        if isinstance(value, tuple | list):
            for one in value:
                self._send(one)
        elif isinstance(value, torch.Tensor):
            number = self._live.get(value.untyped_storage()._cdata)
            self.sent |= {number[0]} if number else set()

    def storage(self, storage: Any, name: str) -> None:
        """Notes a storage that is new, or has another size."""
        key, nbytes = storage._cdata, storage.nbytes()
        before = self._live.pop(key, None)
        if before is not None and before[1] == nbytes:
            self._live[key] = before
            return
        if nbytes:
            number = len(self.sizes)
            watch = weakref.ref(storage, lambda one: self._died(key, one))
            self._live[key] = number, nbytes, watch
            self.sizes.append(nbytes)
            self.names.append(name)
            self.events.append(number)
        if before is not None:
            self.events.append(~before[0])

    def resized(self, storage: Any) -> None:
        """Notes what is no operator."""
        if storage._cdata in self._live:
            self.storage(storage, "resize_")

    def _died(self, key: int, watch: Any) -> None:
        number, _, now = self._live.get(key, (0, 0, None))
        if now is watch:
            del self._live[key]
            self.events.append(~number)

    def as_without_a_mode(self) -> dict[str, Any]:
        """The output as it is where no mode looks on: there PyTorch adds gradients in place. Here a
        sum is made, and both that it is made of are freed at once, unless one is held. So it is
        with zeros that are filled."""
        events, stands_for = list(self.events), {}
        for total, first in self._sums.items():
            at = events.index(total)
            ends = IN_PLACE[self.names[total]]
            freed = [it for it in events[at + 1 : at + 1 + ends] if it < 0]
            if ~first in freed and len(freed) == ends:
                del events[at + 1 + freed.index(~first)], events[at]
                stands_for[total] = first
        for total, first in reversed(stands_for.items()):
            first = stands_for.get(first, first)
            events = [~first if it == ~total else it for it in events]
            self.sent |= {first} if total in self.sent else set()
        on_the_host = self.written - self.sent  # where parameters are on a GPU
        events = [
            it
            for it in events
            if self.sizes[max(it, ~it)] > SMALL and max(it, ~it) not in on_the_host
        ]
        return {"events": events, "sizes": self.sizes, "sent": sorted(self.sent)} | {
            "names": self.names
        }


def follow_what_is_written(births: Births, name: str) -> None:
    """Marks what a function of `torch.distributed` makes as numbers about parameters."""
    path, _, name = name.rpartition(".")
    holder = getattr(torch.distributed, path) if path else torch.distributed
    function = getattr(holder, name)

    def writing(*given: Any) -> Any:
        births.writes = True
        try:
            return function(*given)
        finally:
            births.writes = False

    setattr(holder, name, writing)


def main() -> None:
    script, output = sys.argv[1:]
    births = Births()
    resize = torch.UntypedStorage.resize_

    def resized(storage: Any, nbytes: int) -> Any:
        found = resize(storage, nbytes)
        births.resized(storage)
        return found

    work = torch._C._distributed_c10d.Work
    wait = work.wait

    def waited(self: Any, *given: Any) -> Any:
        births.pause()  # of what gloo copies through
        try:
            return wait(self, *given)
        finally:
            births.resume()

    for name in WRITERS:
        follow_what_is_written(births, name)
    work.wait = waited
    torch.UntypedStorage.resize_ = resized
    sys.argv = [script]
    with births:
        runpy.run_path(script, run_name="__main__")
        births._live.clear()
    with open(output, "w") as file:
        json.dump(births.as_without_a_mode(), file)


if __name__ == "__main__":
    main()
