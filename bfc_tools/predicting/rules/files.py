"""`torch.save` and safetensors, which write a line, and loading what was saved: the same shapes.

From torch/serialization.py (`_load`: each tensor is moved to where `map_location` says). A
checkpoint that is loaded onto the device, and not to the host first, takes its memory once more.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import mmap
import os
import pickle
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from bfc.libraries import torch
from bfc_tools.predicting.rules.interface import on_cuda
from bfc_tools.predicting.rules.operators import around, file

#: What a file begins with that tensors were saved into; behind it stands what finds them again.
MAGIC = b"bfc predict: shapes of tensors, kept until the prediction ends "
LENGTH = len(MAGIC) + 17


class Shelf:
    """What the program has saved: tensors as shapes on the host, which take nothing on the device.

    A file has a line that finds it again, so that copies of the file, and parts of it, do, too.
    """

    def __init__(self) -> None:
        self._kept: dict[bytes, _Saved] = {}

    def put(self, what: Any) -> bytes:
        """Keeps what was saved; returns what its file is to hold."""
        line = MAGIC + secrets.token_hex(8).encode() + b"\n"
        self._kept[line] = _Saved(what)
        return line

    def get(self, file: Any) -> Any:
        """What was saved into a file, a path or bytes, or None. An open file stays where it is if
        it holds nothing of ours."""
        if isinstance(file, (bytes, bytearray, memoryview)):
            return self._kept.get(bytes(file[:LENGTH]))
        if isinstance(file, (str, os.PathLike)):
            if not os.path.isfile(file):
                return None
            with open(file, "rb") as opened:
                return self._kept.get(opened.read(LENGTH))
        try:
            place = file.tell()
            line = file.read(LENGTH)
        except (AttributeError, OSError, ValueError):  # it is no file, or cannot be read twice
            return None
        found = self._kept.get(line) if isinstance(line, bytes) else None
        if found is None:
            file.seek(place)
        return found


class _Storage:
    """What a function as `map_location` gets: a storage on the host, that it may move."""

    def __init__(self, device: Any = "cpu") -> None:
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
        if not isinstance(value, (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._tensors), value
            self._tensors.append(_shape_of(value))
        return self._numbers[id(value)][0]


class _Kept:
    """What is known of a tensor that was saved."""

    def __init__(self, tensor: Any) -> None:
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


@around(source=file("torch/serialization.py", "_load", read="2.15.0"))
@contextmanager
def saved(recorder: Any) -> Iterator[None]:
    """While a prediction runs, checkpoints are kept as shapes."""
    shelf, build = Shelf(), torch.load

    def keep(what: Any) -> bytes:
        recorder.assume("torch.save", "keeps shapes, and no values")
        return shelf.put(what)

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, (str, os.PathLike)):
            folder = os.path.dirname(os.path.abspath(os.fsdecode(f)))
            if not os.path.isdir(folder):
                raise RuntimeError(f"Parent directory {folder} does not exist.")
            with open(f, "wb") as file:
                file.write(keep(obj))
        else:
            f.write(keep(obj))

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        kept = shelf.get(f)
        if kept is not None:
            return kept.load(map_location)
        with patch.object(recorder, "checkpoint", _reader(f)):
            return build(f, _as_places(map_location), *args, **kwargs)

    place = torch._utils._restore_device_fake_mode

    def placed(tensor: Any) -> Any:
        """A tensor of a checkpoint, which takes memory where it is put: PyTorch only says so."""
        placed = place(tensor)
        if on_cuda(placed):
            recorder.track_storage(placed.untyped_storage(), "torch.load")
        return placed

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(torch, "save", save))
        stack.enter_context(patch.object(torch, "load", load))
        stack.enter_context(patch.object(torch._utils, "_restore_device_fake_mode", placed))
        for holder, name, function in _safetensors(recorder, keep, shelf.get):
            stack.enter_context(patch.object(holder, name, function))
        yield


def _reader(file: Any) -> Callable[[int, int], Any] | None:
    """What returns a storage with bytes of a file, which stays mapped as it is now; or None."""
    try:
        if isinstance(file, (str, os.PathLike)):
            with open(file, "rb") as opened:
                whole: Any = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        elif isinstance(file, io.BytesIO):
            whole = bytearray(file.getvalue())
        else:
            whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (AttributeError, OSError, ValueError):  # it is empty, or no file: torch.load says so
        return None

    def read(offset: int, size: int) -> Any:
        if not size:
            return torch.UntypedStorage(0)
        part = torch.frombuffer(whole, dtype=torch.uint8, count=size, offset=offset)
        return part.untyped_storage()

    return read


class _Places(dict[Any, Any]):
    """A function as `map_location`, in the form in which tensors without values can be placed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def get(self, device: Any, default: Any = None) -> Any:
        """Where the function puts a storage of a device; where it was if it does not say."""
        return getattr(self._function(_Storage(), str(device)), "device", default)


def _as_places(location: Any) -> Any:
    return _Places(location) if callable(location) else location


@around(source=file("torch/jit/_serialization.py", "load", read="2.15.0"))
@contextmanager
def scripted(recorder: Any) -> Iterator[None]:
    """What `torch.jit.load` makes in C++ has values, and is read onto the host; its parameters are
    then shapes, where `map_location` says."""
    from torch.utils._python_dispatch import _disable_current_modes

    build, script = torch.jit.load, torch.jit._script
    real = script.RecursiveScriptModule.save

    def save(module: Any, f: Any, **extra: Any) -> None:
        with tempfile.NamedTemporaryFile() as made, open(f, "wb") as file:
            real(module, made.name, **extra)
            shutil.copyfileobj(made, file)

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is None:
            recorder.assume("torch.jit.load without map_location: where its tensors are", "cpu")
        with _disable_current_modes():
            made = build(_content(f), "cpu", *args, **kwargs)
        return made.to("cpu" if map_location is None else map_location)

    with (
        patch.object(torch.jit, "load", load),
        patch.object(script.RecursiveScriptModule, "save", save),
        patch.object(script.ScriptModule, "save", save),  # which traced modules have
    ):
        yield


def _content(file: Any) -> Any:
    """What C++ reads: it does not find a file that lies over the user's."""
    if isinstance(file, (str, os.PathLike)) and os.path.isfile(file):
        with open(file, "rb") as opened:
            return io.BytesIO(opened.read())
    return file


def _safetensors(
    recorder: Any, keep: Callable[[Any], bytes], find: Callable[[Any], Any]
) -> Iterator[tuple[Any, str, Any]]:
    """(module, name, what stands there) of the functions of safetensors, where that is installed,
    in all modules that have them: they read and write memory by its address."""
    if importlib.util.find_spec("safetensors") is None:
        return
    package, real = (importlib.import_module(f"safetensors{name}") for name in ("", ".torch"))
    load_file, load, opened = real.load_file, real.load, package.safe_open

    def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        with open(filename, "wb") as file:
            file.write(keep((dict(tensors), metadata)))

    def save_bytes(tensors: Any, metadata: Any = None) -> bytes:
        return keep((dict(tensors), metadata))

    def save_model(model: Any, filename: Any, metadata: Any = None, *args: Any, **kw: Any) -> None:
        save_file(_each_once(model.state_dict()), filename, metadata)

    def load_ours(filename: Any, device: Any = "cpu", *args: Any, **kwargs: Any) -> Any:
        kept = find(filename)
        if kept is None:
            return load_file(filename, device, *args, **kwargs)
        return kept.load(_place(device))[0]

    def load_bytes(data: Any) -> Any:
        kept = find(data)
        return load(data) if kept is None else kept.load("cpu")[0]

    def safe_open(filename: Any, framework: Any, device: Any = "cpu", *args: Any, **kw: Any) -> Any:
        kept = find(filename)
        if kept is not None:
            return _Opened(kept.load("cpu"), _place(device))
        if framework not in ("pt", "torch", "pytorch"):
            return opened(filename, framework, device, *args, **kw)
        with _no_shapes():
            return _WithValues(recorder, opened(filename, framework, "cpu", *args, **kw), device)

    def is_complete(tensor: Any) -> bool:
        """Whether a tensor has all of its storage: by size, since it has no address."""
        size = int(tensor.numel()) * int(tensor.element_size())
        return size == int(tensor.untyped_storage().nbytes())

    replaced = {
        real.save_file: save_file,
        real.save: save_bytes,
        real.save_model: save_model,
        load_file: load_ours,
        load: load_bytes,
        opened: safe_open,
        getattr(real, "_is_complete", None): is_complete,
    }
    by_id = {id(old): new for old, new in replaced.items() if old is not None}
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        for name, value in list(names.items()) if type(names) is dict else ():
            if id(value) in by_id:
                yield module, name, by_id[id(value)]


def _no_shapes() -> Any:
    """A block in which tensors have values."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


class _WithValues:
    """As what `safetensors.safe_open` returns for a file that others wrote, or a slice of it: its
    tensors are shapes on the device, and on the host they have values, too."""

    def __init__(self, recorder: Any, opened: Any, device: Any) -> None:
        self._recorder, self._opened, self._device = recorder, opened, device

    def __enter__(self) -> _WithValues:
        self._opened.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._opened, name)
        return functools.partial(self._call, found) if callable(found) else found

    def __getitem__(self, part: Any) -> Any:
        return self._call(self._opened.__getitem__, part)

    def get_slice(self, name: str) -> _WithValues:
        """A tensor of which a part is to be read."""
        return _WithValues(self._recorder, self._opened.get_slice(name), self._device)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _no_shapes():
            found = function(*args, **kwargs)
        return _each(found, self._placed)

    def _placed(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return self._recorder.fake(value).to(_place(self._device))


def _place(device: Any) -> str:
    return f"cuda:{device}" if isinstance(device, int) else str(device)


def _each_once(tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors that share their memory once, under the first of their names in the alphabet."""
    names: dict[Any, str] = {}
    for name in sorted(tensors):
        names.setdefault(tensors[name].untyped_storage()._cdata, name)
    kept = set(names.values())
    return {name: tensor for name, tensor in tensors.items() if name in kept}


class _Opened:
    """As what `safetensors.safe_open` returns."""

    def __init__(self, held: tuple[Any, Any], device: str) -> None:
        self._tensors, self._metadata = held
        self._device = device

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def metadata(self) -> Any:
        return self._metadata

    def keys(self) -> list[str]:
        return list(self._tensors)

    offset_keys = keys

    def get_tensor(self, name: str) -> Any:
        return self._tensors[name].to(self._device)

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._tensors[name], self._device)


class _Slice:
    """As a slice of safetensors."""

    def __init__(self, tensor: Any, device: str) -> None:
        self._tensor, self._device = tensor, device

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return str(self._tensor.dtype)

    def __getitem__(self, part: Any) -> Any:
        return self._tensor[part].clone().to(self._device)
