"""`torch.save` and safetensors, which write nothing, and loading what was saved: the same shapes.

From torch/serialization.py (`_load`: each tensor is moved to where `map_location` says). A
checkpoint that is loaded onto the device, and not to the host first, takes its memory once more.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from bfc.predicting.rules.interface import around


class Shelf:
    """What the program has saved, by the file: tensors as shapes on the host, which take nothing
    on the device."""

    def __init__(self) -> None:
        self._by_path: dict[str, Any] = {}
        self._by_file: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def put(self, file: Any, what: Any) -> None:
        """Keeps what was saved."""
        kept = _each(what, _shape_of)
        if isinstance(file, (str, os.PathLike)):
            self._by_path[os.path.abspath(file)] = kept
        else:
            self._by_file[file] = kept

    def get(self, file: Any) -> Any:
        """What was saved into a file, or None."""
        if isinstance(file, (str, os.PathLike)):
            return self._by_path.get(os.path.abspath(file))
        try:
            return self._by_file.get(file)
        except TypeError:  # a file that has no weak references was never saved to
            return None


class _Kept:
    """What is known of a tensor that was saved."""

    def __init__(self, tensor: Any) -> None:
        import torch

        self.shape, self.strides = tuple(tensor.shape), tuple(tensor.stride())
        self.dtype, self.device = tensor.dtype, tensor.device
        self.parameter = isinstance(tensor, torch.nn.Parameter)
        self.requires_grad = bool(tensor.requires_grad and tensor.is_leaf)

    def made(self, location: Any) -> Any:
        """A tensor like it."""
        import torch

        device = self.device
        if isinstance(location, (str, torch.device)):
            device = torch.device(location)
        elif isinstance(location, dict):
            device = torch.device(location.get(str(device), device))
        elif location is not None:  # a function of a storage and the name of its device
            device = torch.device("cpu")
        made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        if self.parameter:
            return torch.nn.Parameter(made, self.requires_grad)
        return made.requires_grad_(self.requires_grad)


def _shape_of(value: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensor

    return _Kept(value) if isinstance(value, FakeTensor) else value


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same dicts, lists and tuples with each of their leaves changed."""
    if isinstance(value, dict):
        made = {key: _each(one, change) for key, one in value.items()}
        try:
            return type(value)(made)
        except TypeError:  # a defaultdict, say
            return made
    if type(value) in (list, tuple):
        return type(value)(_each(one, change) for one in value)
    return change(value)


@around
@contextmanager
def saved(recorder: Any) -> Iterator[None]:
    """While a prediction runs, checkpoints are kept as shapes."""
    import torch

    shelf, build = Shelf(), torch.load

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        recorder.assume("torch.save", "writes nothing")
        shelf.put(f, obj)

    def load(
        f: Any,
        map_location: Any = None,
        *args: Any,
        otherwise: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        kept = shelf.get(f)
        if kept is None and otherwise is not None:
            return otherwise()
        if kept is None:
            return build(f, map_location, *args, **kwargs)
        return _each(kept, lambda one: one.made(map_location) if isinstance(one, _Kept) else one)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(torch, "save", save))
        stack.enter_context(patch.object(torch, "load", load))
        for name, function in _safetensors(save, load).items():
            stack.enter_context(patch(f"safetensors.torch.{name}", function))
        yield


def _safetensors(save: Callable[..., None], load: Callable[..., Any]) -> dict[str, Any]:
    """The functions of safetensors, where that is installed: it reads memory by its address."""
    if importlib.util.find_spec("safetensors") is None:
        return {}
    build = importlib.import_module("safetensors.torch").load_file

    def save_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        save(tensors, filename)

    def save_model(model: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        save(model.state_dict(), filename)

    def load_file(filename: Any, device: Any = "cpu") -> Any:
        return load(filename, device, otherwise=lambda: build(filename, device))

    return {"save_file": save_file, "save_model": save_model, "load_file": load_file}
