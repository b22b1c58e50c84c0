"""Has the host compute what kernels would: on the emulated driver they do nothing.

Emulated memory is memory of this process, at its own address. So what an operator reads and writes
of tensors on a GPU is given to it as tensors of the host, where it is; only a new result is copied
to the GPU. Views and allocations are left to PyTorch, and so are tensors of more than LARGEST
bytes. What a graph has captured is computed each time behind its replay, in the order of the
capture: right, unless the graph copies into what an earlier part of it reads.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

LARGEST = 4 << 30
#: Operators that allocate, or say something of a tensor.
LEFT = ("empty", "new_empty", "set_", "record_stream", "detach", "lift_fresh", "is_pinned")
LEFT += ("_unsafe_view",)


class Place(NamedTuple):
    """Where a tensor on a GPU lies. It keeps no memory."""

    address: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def place(x: torch.Tensor) -> Place:
    return Place(x.data_ptr(), x.dtype, tuple(x.shape), x.stride())


def memory(at: Place) -> torch.Tensor:
    """The same memory, as a tensor of the host."""
    if 0 in at.shape:
        return torch.empty_strided(at.shape, at.strides, dtype=at.dtype)
    span = 1 + sum((n - 1) * step for n, step in zip(at.shape, at.strides, strict=True))
    held = (ctypes.c_byte * (span * at.dtype.itemsize)).from_address(at.address)
    return torch.as_strided(torch.frombuffer(held, dtype=at.dtype), at.shape, at.strides)


def on_host(x: torch.Tensor) -> torch.Tensor:
    """As `memory`, once what its stream was given is done. The driver says what is wrong with
    memory that is not there."""
    if x.numel():
        first = torch.empty(0, dtype=torch.uint8, device=x.device)
        at = x.storage_offset() * x.element_size()
        first.set_(x.untyped_storage(), at, (1,), (1,)).cpu()
    return memory(place(x))


def on_gpu(x: torch.Tensor, device: Any) -> torch.Tensor:
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    on_host(made).copy_(x)
    return made


def is_gpu(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_cuda


class Step(NamedTuple):
    """An operator that was captured: where its tensors lie."""

    func: Callable[..., Any]
    given: Any  #: positional and named arguments
    result: Any

    def run(self) -> None:
        given, named = at_host(self.given)
        result = self.func(*given, **named)
        for it, at in zip(tree_flatten(result)[0], tree_flatten(self.result)[0], strict=True):
            if isinstance(at, Held) and isinstance(it, torch.Tensor):
                memory(at.place).copy_(it)


class Held:
    """A place among arguments, as one leaf of a tree."""

    def __init__(self, x: torch.Tensor) -> None:
        self.place = place(x)


def as_held(tree: Any) -> Any:
    return tree_map(lambda x: Held(x) if is_gpu(x) else x, tree)


def at_host(tree: Any) -> Any:
    return tree_map(lambda x: memory(x.place) if isinstance(x, Held) else x, tree)


class Graphs:
    """What graphs have captured."""

    def __init__(self) -> None:
        self.steps: weakref.WeakKeyDictionary[Any, list[Step]] = weakref.WeakKeyDictionary()
        self.open: list[Step] = []  # by the capture that is open

    def follow(self) -> None:
        """From now on."""
        begins, replays = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.replay

        def capture_begin(graph: Any, *given: Any, **named: Any) -> None:
            begins(graph, *given, **named)
            self.open = self.steps[graph] = []

        def replay(graph: Any) -> None:
            replays(graph)
            torch.cuda.synchronize()
            for step in self.steps.get(graph, ()):
                step.run()

        torch.cuda.CUDAGraph.capture_begin = capture_begin
        torch.cuda.CUDAGraph.replay = replay


GRAPHS = Graphs()


class OnTheHost(TorchDispatchMode):
    """For as long as it is entered, in one thread. `begin` does more."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operator imports all of torch._dynamo

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flat, spec = tree_flatten((args, kwargs))
        there = [x for x in flat if is_gpu(x)]
        wanted = torch.device(kwargs.get("device") or (there[0].device if there else "cpu"))
        name = func._schema.name.removeprefix("aten::")
        if (
            not (there or wanted.type == "cuda")
            or func.is_view
            or name.startswith(LEFT)
            or any(x.nbytes > LARGEST for x in there)
        ):
            return func(*args, **kwargs)
        if torch.cuda.is_current_stream_capturing():
            return captured(func, args, kwargs)
        if name in ("full", "ones", "zeros"):
            return filled(func, args, kwargs)
        if "device" in kwargs:
            kwargs["device"] = "cpu"
            flat, spec = tree_flatten((args, kwargs))
        theirs = {id(x): on_host(x) for x in there}
        given, named = tree_unflatten([theirs.get(id(x), x) for x in flat], spec)
        result = func(*given, **named)
        back = {id(theirs[id(x)]): x for x in there}

        def put_back(x: Any) -> Any:
            """A result of the host's, where the program expects it."""
            if id(x) in back:
                return back[id(x)]
            is_new = isinstance(x, torch.Tensor) and wanted.type == "cuda"
            return on_gpu(x, wanted) if is_new else x

        return tree_map(put_back, result)


def captured(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    result = func(*args, **kwargs)
    given = args, kwargs | ({"device": "cpu"} if "device" in kwargs else {})
    GRAPHS.open.append(Step(func, as_held(given), as_held(result)))
    return result


def filled(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A new tensor of one value, which may be too large to be made twice."""
    made = func(*args, **kwargs)  # the kernel that is to fill it does nothing
    if made.nbytes <= LARGEST:
        value = {"ones": 1, "zeros": 0}.get(func._schema.name.removeprefix("aten::"))
        on_host(made).fill_(args[1] if value is None else value)
    return made


def begin() -> None:
    """From now on, in this thread. What prints tensors leaves all modes."""
    as_text = torch._tensor_str._str

    def text(x: Any, **named: Any) -> str:
        return str(as_text(on_host(x) if is_gpu(x) else x, **named))

    torch._tensor_str._str = text
    GRAPHS.follow()
    OnTheHost().__enter__()
