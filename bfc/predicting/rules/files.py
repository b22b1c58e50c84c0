"""`torch.save` and safetensors, which write nothing, and loading what was saved: the same shapes.

From torch/serialization.py (`_load`: each tensor is moved to where `map_location` says). A
checkpoint that is loaded onto the device, and not to the host first, takes its memory once more.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import pickle
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
        kept = _Saved(what)
        path = _path_of(file)
        if path is not None:
            self._by_path[path] = kept
        else:
            self._by_file[file] = kept

    def get(self, file: Any) -> Any:
        """What was saved into a file, or `UNKNOWN`."""
        path = _path_of(file)
        if path is not None:
            return self._by_path.get(path, UNKNOWN)
        try:
            return self._by_file.get(file, UNKNOWN)
        except TypeError:  # a file that has no weak references was never saved to
            return UNKNOWN

    def __bool__(self) -> bool:
        return bool(self._by_path or self._by_file)

    def move(self, old: Any, new: Any) -> bool:
        """Renames what was saved; returns whether anything was, into a file of that name."""
        source, target = _path_of(old), _path_of(new)
        if source is None or target is None:
            return False
        if source not in self._by_path:
            self._by_path.pop(target, None)  # another file takes its name
            return False
        self._by_path[target] = self._by_path.pop(source)
        return True

    def remove(self, file: Any) -> bool:
        """Forgets what was saved; returns whether anything was, into a file of that name."""
        return self._by_path.pop(_path_of(file) or "", UNKNOWN) is not UNKNOWN


#: What a file holds that the program has not saved; a program may save None.
UNKNOWN = object()


def _path_of(file: Any) -> str | None:
    """The path of a file that is named, or open and has a name; None for one in memory."""
    if not isinstance(file, (str, os.PathLike)):
        file = getattr(file, "name", None)
    return os.path.abspath(file) if isinstance(file, (str, os.PathLike)) else None


class _Storage:
    """What a function as `map_location` gets: a storage on the host, that it may move."""

    def __init__(self, device: Any = "cpu") -> None:
        import torch

        self.device = torch.device(device)

    def cpu(self) -> _Storage:
        return _Storage()

    def cuda(self, device: Any = None, non_blocking: bool = False) -> _Storage:
        if isinstance(device, int):
            return _Storage(f"cuda:{device}")
        return _Storage("cuda" if device is None else device)

    def to(self, device: Any, non_blocking: bool = False) -> _Storage:
        return _Storage(device)


class _Saved:
    """What was saved: pickled with all but the data of tensors, as `torch.save` does."""

    def __init__(self, what: Any) -> None:
        self._tensors: list[Any] = []
        file = io.BytesIO()
        try:
            _Pickler(file, self._tensors).dump(what)
            self._pickle: bytes | None = file.getvalue()
        except Exception:  # what refers to process groups, say
            self._pickle, self._what = None, _each(what, _shape_of)

    def load(self, location: Any) -> Any:
        """The same again, with new tensors."""
        storages: dict[int, Any] = {}

        def made(one: Any) -> Any:
            return one.made(location, storages) if isinstance(one, _Kept) else one

        if self._pickle is None:
            return _each(self._what, made)
        reader = pickle.Unpickler(io.BytesIO(self._pickle))
        tensor = functools.cache(lambda number: made(self._tensors[number]))
        reader.persistent_load = tensor  # type: ignore[method-assign]
        return reader.load()


class _Pickler(pickle.Pickler):
    """Puts numbers in the place of tensors. One that has values, as of a generator, is kept."""

    def __init__(self, file: Any, tensors: list[Any]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors
        self._numbers: dict[int, tuple[int, Any]] = {}  # with the tensor, which keeps its `id`

    def persistent_id(self, value: Any) -> int | None:
        import torch

        if not isinstance(value, (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._tensors), value
            self._tensors.append(_shape_of(value))
        return self._numbers[id(value)][0]


class _Kept:
    """What is known of a tensor that was saved."""

    def __init__(self, tensor: Any) -> None:
        import torch

        storage = tensor.untyped_storage()
        self.storage, self.offset = storage._cdata, tensor.storage_offset()
        self.shape, self.strides = tuple(tensor.shape), tuple(tensor.stride())
        last = sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        seen = self.offset + last + 1 if tensor.numel() else 0  # more, if its memory is given back
        self.elements = max(storage.nbytes() // tensor.element_size(), seen)
        self.dtype, self.device = tensor.dtype, tensor.device
        self.parameter = isinstance(tensor, torch.nn.Parameter)
        self.requires_grad = bool(tensor.requires_grad and tensor.is_leaf)

    def made(self, location: Any, storages: dict[int, Any]) -> Any:
        """A tensor like it, in the storage of those before it that had the same."""
        import torch

        device = self.device
        if isinstance(location, (str, torch.device)):
            device = torch.device(location)
        elif isinstance(location, dict):
            device = torch.device(location.get(str(device), device))
        elif location is not None:  # a function of a storage and the name of its device
            device = getattr(location(_Storage(), str(device)), "device", device)
        whole = storages.get(self.storage)
        if whole is None or whole.dtype != self.dtype:
            whole = torch.empty(self.elements, dtype=self.dtype, device=device)
            storages[self.storage] = whole
        with torch.no_grad():
            made = whole.as_strided(self.shape, self.strides, self.offset).detach()
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
        if kept is UNKNOWN and otherwise is not None:
            return otherwise()
        if kept is UNKNOWN:
            try:
                return build(f, map_location, *args, **kwargs)
            except (EOFError, FileNotFoundError) as error:
                if not shelf:
                    raise
                raise type(error)(f"{str(error) or 'it is empty'}. {NOT_THERE}") from error
        return kept.load(map_location)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(torch, "save", save))
        stack.enter_context(patch.object(torch, "load", load))
        for name in ("rename", "replace", "remove", "unlink"):
            change = shelf.move if name in ("rename", "replace") else shelf.remove
            stack.enter_context(patch.object(os, name, _on_shelf(change, getattr(os, name))))
        for name, function in _safetensors(save, load).items():
            stack.enter_context(patch(f"safetensors.torch.{name}", function))
        yield


#: What is said of a file that is not there, or empty.
NOT_THERE = (
    "In a prediction torch.save writes nothing: what was saved is found by the name of its file, "
    "and a copy of that file is not there"
)


def _on_shelf(change: Callable[..., bool], build: Callable[..., None]) -> Callable[..., None]:
    """A function of `os` that changes only what is kept, where the file is one that was saved."""

    remove = os.remove

    @functools.wraps(build)
    def call(*paths: Any, **options: Any) -> None:
        if any(value is not None for value in options.values()) or not change(*paths):
            build(*paths, **options)
        elif os.path.isfile(paths[0]) and not os.path.getsize(paths[0]):
            remove(paths[0])  # the program has opened it, to save into it

    return call


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
        location = f"cuda:{device}" if isinstance(device, int) else device
        return load(filename, location, otherwise=lambda: build(filename, device))

    return {"save_file": save_file, "save_model": save_model, "load_file": load_file}
