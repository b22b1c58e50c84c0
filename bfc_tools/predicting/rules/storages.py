"""Memory of the host that becomes a tensor: a storage, a part of a file, an array.

The tensor is only a shape, as all are; what it would hold is kept where it stands
(`real_values`). From PyTorch's torch/csrc/utils/tensor_new.cpp (asarray_from_storage) and
ATen/native/TensorFactories.cpp (from_file).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from bfc.libraries import torch
from bfc_tools.predicting.rules.interface import Call
from bfc_tools.predicting.rules.operators import answer, around, file, kernel, mark
from bfc_tools.predicting.rules.tensors import argument

mark("looks_elsewhere", "aten::set_", source=file("ATen/native/TensorFactories.cpp", read="2.6.0"))


@answer(
    "aten::set_",
    source=(
        file("ATen/native/cuda/TensorFactories.cu", read="2.6.0"),
        file("ATen/native/TensorFactories.cpp", read="2.6.0"),
    ),
)
def placed_in_storage(call: Call, run: Callable[..., Any]) -> Any:
    """A tensor that is given another storage; one with bytes becomes one that is only a size."""
    tensor, *given = call.args
    if not given or not isinstance(given[0], torch.UntypedStorage):
        return run()
    storage, *place = given
    recorder: Any = call.recording
    if storage.device.type == "cpu":
        faked = recorder.fake(_bytes_of(storage)).untyped_storage()
        return run((tensor, faked, *place))
    offset = storage._checkpoint_offset  # of a file that torch.load reads
    if offset is not None and recorder.checkpoint is not None:
        read, size = recorder.checkpoint, storage.nbytes()
        recorder.known.stored.put(storage, lambda: read(offset, size))
    return run()


@kernel(
    "aten::from_file", source=file("ATen/native/TensorFactories.cpp", "from_file", read="2.6.0")
)
def from_file(call: Call) -> Any:
    """A file whose bytes are those of a tensor. One that would be made is only assumed."""
    from torch.utils._python_dispatch import _disable_current_modes

    name, size = argument(call, "filename", None), argument(call, "size", 0)
    dtype = argument(call, "dtype", None) or torch.get_default_dtype()
    if argument(call, "shared", False) and not os.path.exists(name):
        return torch.empty(int(size or 0), dtype=dtype, device="cpu")
    recorder: Any = call.recording
    with _disable_current_modes():  # not shared: what is written there is thrown away
        real = torch.from_file(name, shared=False, size=size, dtype=dtype)
    return recorder.fake(real)


def _bytes_of(storage: Any) -> Any:
    """The bytes of a storage of the host, as a tensor that has them."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


@around(source=file("torch/csrc/utils/tensor_new.cpp", "asarray", read="2.6.0"))
@contextmanager
def arrays_of_storages(recorder: Any) -> Iterator[None]:
    """`torch.asarray` of a storage looks for its memory in C++, where a shape has none."""
    from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

    build = torch.asarray

    def asarray(obj: Any, **options: Any) -> Any:
        of_storage = isinstance(obj, (torch.UntypedStorage, torch.TypedStorage))
        if not of_storage or _get_current_dispatch_mode() is None:
            return build(obj, **options)
        device, copy = options.pop("device", None), options.pop("copy", None)
        gradient = options.pop("requires_grad", False)
        untyped = obj if isinstance(obj, torch.UntypedStorage) else obj.untyped()
        if untyped.device.type == "cpu":
            with _disable_current_modes():
                made = build(obj, **options)
            made = recorder.fake(made)
        else:
            own = torch.uint8 if untyped is obj else obj.dtype
            live = untyped._cdata in recorder.live
            made = torch.empty(0, dtype=own, device="cuda" if live else "cpu").set_(untyped)
            made = build(made, **options)
        made = made if device is None else made.to(device)
        return (made.clone() if copy else made).requires_grad_(gradient)

    with patch.object(torch, "asarray", asarray):
        yield
