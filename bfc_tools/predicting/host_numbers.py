"""Whole numbers that PyTorch's C++ writes into tensors on the host, sends to other processes by way
of the GPU, and reads: what `DistributedDataParallel` does with its buckets."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_WHOLE = (torch.int32, torch.int64)


class HostNumbers(TorchDispatchMode):  # type: ignore[misc]
    """In a block, whole numbers on the host are real. What they are copied to on the GPU is a fake
    tensor, as all else, and comes back with the same numbers. `answer` is what a number on the GPU
    is, if one is asked."""

    def __init__(self, answer: int) -> None:
        super().__init__()
        self._answer = answer
        self._copied: dict[int, Any] = {}  # by the id of a fake tensor: what it was copied from

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [one for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
        fakes = [isinstance(one, FakeTensor) for one in tensors]
        match func._schema.name:
            case "aten::empty" if kwargs.get("dtype") in _WHOLE and _on_host(kwargs):
                return self._really(func, args, kwargs)
            case "aten::_to_copy" if not any(fakes) and not _on_host(kwargs):
                into = torch.empty(args[0].shape, dtype=args[0].dtype, device=kwargs["device"])
                self._copied[id(into)] = args[0]
                return into
            case "aten::copy_" if fakes == [True, False]:
                self._copied[id(args[0])] = args[1]
                return args[0]
            case "aten::copy_" if fakes == [False, True]:
                return self._really(func, (args[0], self._copied[id(args[1])]), {})
            case "aten::_local_scalar_dense":
                return self._answer
        if tensors and not any(fakes):
            return self._really(func, args, kwargs)
        return func(*args, **kwargs)

    def _really(self, func: Any, args: Any, kwargs: Any) -> Any:
        with _disable_current_modes():
            return func(*args, **kwargs)


def _on_host(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is None or torch.device(device).type == "cpu"
