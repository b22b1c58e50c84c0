"""Has the host compute what kernels would: on the emulated driver they do nothing.

What an operator reads of tensors on a GPU is copied to the host, computed there, and what it writes
is copied back. Views, allocations and plain copies are left to PyTorch. So is what is captured, so
that a graph that is replayed computes nothing, and tensors of more than LARGEST bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

LARGEST = 256 << 20
#: Operators that allocate, or say something of a tensor.
LEFT = ("empty", "new_empty", "set_", "record_stream", "detach", "lift_fresh", "is_pinned")


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """What a tensor spans of its storage."""
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    size, span = x.element_size(), 1 + last if x.numel() else 0
    flat = torch.empty(0, dtype=torch.uint8, device=x.device)
    return flat.set_(x.untyped_storage(), x.storage_offset() * size, (span * size,), (1,))


def on_host(x: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(bytes_of(x).cpu().view(x.dtype), x.shape, x.stride())


def on_gpu(x: torch.Tensor, device: Any) -> torch.Tensor:
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    bytes_of(made).copy_(bytes_of(x))
    return made


def is_gpu(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_cuda


class OnTheHost(TorchDispatchMode):
    """For as long as it is entered, in one thread. `begin` does more."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flat, spec = tree_flatten((args, kwargs))
        there = [x for x in flat if is_gpu(x)]
        wanted = torch.device(kwargs.get("device") or (there[0].device if there else "cpu"))
        if (
            not (there or wanted.type == "cuda")
            or func.is_view
            or func._schema.name.removeprefix("aten::").startswith(LEFT)
            or any(x.nbytes > LARGEST for x in there)
            or torch.cuda.is_current_stream_capturing()
        ):
            return func(*args, **kwargs)
        if "device" in kwargs:
            kwargs["device"] = "cpu"
            flat, spec = tree_flatten((args, kwargs))
        copies = {id(x): on_host(x) for x in there}
        given, named = tree_unflatten([copies.get(id(x), x) for x in flat], spec)
        result = func(*given, **named)
        if func._schema.is_mutable:
            for x in there:
                bytes_of(x).copy_(bytes_of(copies[id(x)]))
        back = {id(copies[id(x)]): x for x in there}

        def put_back(x: Any) -> Any:
            """A result of the host's, where the program expects it."""
            if id(x) in back:
                return back[id(x)]
            is_new = isinstance(x, torch.Tensor) and wanted.type == "cuda"
            return on_gpu(x, wanted) if is_new else x

        return tree_map(put_back, result)


def begin() -> None:
    """From now on, in this thread. What prints tensors leaves all modes."""
    as_text = torch._tensor_str._str

    def text(x: Any, **named: Any) -> str:
        return str(as_text(on_host(x) if is_gpu(x) else x, **named))

    torch._tensor_str._str = text
    OnTheHost().__enter__()
