"""Copies between tensors of the host and of OpenCL devices: what `_copy_from` does.

All bytes move by `bfc.copy`. It also casts on a device, where that gives the bits that PyTorch's
CPU gives; all other casts are PyTorch's own, on the host.

`copy` treats the bits for conjugation and negation itself, on both sides. So that it sees them,
`_copy_from` and `_copy_from_and_resize` must be registered as fallthrough for the dispatch keys
Conjugate and Negative. Their fallback would give it a copy of the destination otherwise, since the
schemas of these two do not say that they write.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from bfc import copying, pinned
from bfc.copying.layout import stands_still
from bfc.errors import OutOfMemoryError
from bfc_torch_opencl.places import (
    NUMPY,
    Place,
    bytes_of,
    note_refusal,
    numpy_dtype,
    span_of,
    view_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from bfc.copying.view import View

SHARED = (
    "several items of the tensor that is written share one place in memory: copy into a clone() "
    "of it, or into the tensor that was expanded"
)


def copy(
    to: torch.Tensor,
    source: torch.Tensor,
    non_blocking: bool,
    place_of: Callable[[int], Place],
) -> torch.Tensor:
    """Copies `source` into `to`, cast and broadcast, as `Tensor.copy_` does. At least one of the
    two is on an OpenCL device.

    Between the host and a device the copy is complete on return, unless `non_blocking`; and also if
    `to` is pageable memory of the host. A source in pageable memory may be changed at once. Raises
    RuntimeError where the shapes do not broadcast, torch.OutOfMemoryError, and DriverError.
    """
    if source.shape != to.shape:
        source = source.expand(to.shape)
    if to.numel() == 0:
        return to
    if stands_still(to.shape, to.stride()):
        raise RuntimeError(SHARED)
    try:
        if to.device.type == "cpu":
            _to_host(to, source, non_blocking, place_of(source.device.index))
        elif source.device.type == "cpu":
            _to_device(to, source, non_blocking, place_of(to.device.index))
        else:
            places = place_of(to.device.index), place_of(source.device.index)
            _between_devices(to, source, *places)
    except OutOfMemoryError as error:
        raise torch.OutOfMemoryError(str(error)) from error
    return to


# -- the paths -------------------------------------------------------------------------------------


def _to_host(to: torch.Tensor, source: torch.Tensor, non_blocking: bool, place: Place) -> None:
    conj, neg = _change(to, source)
    non_blocking = non_blocking and pinned.find(to.data_ptr()) is not None
    alike = to.dtype == source.dtype and not (conj or neg)
    if alike or (non_blocking and _gives_same_bits(to, source, conj, neg)):
        ends = view_of(to, None), _real_part(view_of(source, place), to, source)
        if _try_copy(*ends, place, non_blocking, conj, neg):
            return
    _copy_on_host(to, _read(source, place))


def _to_device(to: torch.Tensor, source: torch.Tensor, non_blocking: bool, place: Place) -> None:
    is_ready = to.dtype == source.dtype and not any(_change(to, source))
    if is_ready and non_blocking:
        is_ready = pinned.find(source.data_ptr()) is not None
    if not is_ready:
        ready = torch.empty(to.shape, dtype=to.dtype)
        _copy_on_host(_with_bits(ready, to), source)
        source = ready
    _write(to, source, non_blocking, place)


def _between_devices(
    to: torch.Tensor, source: torch.Tensor, place: Place, source_place: Place
) -> None:
    """Copies from device to device, queued on the current stream of the source's device, and
    ordered on both. Complete on return if it goes through the host."""
    conj, neg = _change(to, source)
    if place.source.context == source_place.source.context and _gives_same_bits(
        to, source, conj, neg
    ):
        ends = view_of(to, place), _real_part(view_of(source, source_place), to, source)
        if _try_copy(*ends, source_place, True, conj, neg):
            return
    _to_device(to, _read(source, source_place), False, place)


# -- what a cast does ------------------------------------------------------------------------------


def _change(to: torch.Tensor, source: torch.Tensor) -> tuple[bool, bool]:
    """Whether values are conjugated and negated on their way, from memory to memory."""
    conj = to.is_complex() and to.is_conj() != source.is_conj()
    return conj, to.is_neg() != source.is_neg()


def _gives_same_bits(to: torch.Tensor, source: torch.Tensor, conj: bool, neg: bool) -> bool:
    """Whether `bfc.copy` gives the bits that PyTorch gives on the CPU.

    PyTorch changes values after the cast, and bfc before. PyTorch rounds a double to a half by way
    of a float, and bfc at once."""
    before, after = NUMPY.get(source.dtype), NUMPY.get(to.dtype)
    if to.dtype == source.dtype:
        return not (conj or neg) or (after is not None and after.kind in "iufc")
    if before is None or after is None:
        return False
    if to.dtype == torch.float16 and source.dtype in (torch.float64, torch.complex128):
        return False
    return not (conj or neg) or (before.kind == after.kind and before.kind in "fc")


def _real_part(view: View, to: torch.Tensor, source: torch.Tensor) -> View:
    """The part of a complex source that a real destination gets. (A bool gets both parts.)"""
    if source.is_complex() and not to.is_complex() and to.dtype not in (torch.bool, source.dtype):
        view.dtype = numpy_dtype(source.dtype.to_real())
    return view


def _with_bits(raw: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The same memory, to be read and written through the bits of another tensor."""
    if like.is_conj():
        raw = torch.conj(raw)
    return torch._neg_view(raw) if like.is_neg() else raw


def _copy_on_host(to: torch.Tensor, source: torch.Tensor) -> None:
    # PyTorch 2.13 loses the neg bit on either side between a half and a float
    if {to.dtype, source.dtype} == {torch.float16, torch.float32} and (
        to.is_neg() or source.is_neg()
    ):
        source = source.resolve_neg().to(to.dtype)
    to.copy_(source)


# -- the host's side -------------------------------------------------------------------------------


def _try_copy(
    to: View, source: View, place: Place, non_blocking: bool, conj: bool, neg: bool
) -> bool:
    """Copies, unless that needs a kernel and the device's compiler builds none."""
    from bfc.copying.opencl_stream import CompilerRefusedError

    try:
        copying.copy(
            to, source, non_blocking=non_blocking, stream=place.queue(), conj=conj, neg=neg
        )  # fmt: skip
    except CompilerRefusedError as error:
        note_refusal(error)
        return False
    return True


def _read(source: torch.Tensor, place: Place) -> torch.Tensor:
    """A tensor on the host, with the source's bits. Complete on return."""
    steps = source.stride()
    shape = [count if step else 1 for count, step in zip(source.shape, steps, strict=True)]
    if span_of(source) == math.prod(shape):
        raw = torch.empty_strided(shape, steps, dtype=source.dtype)
    else:
        raw = torch.empty(shape, dtype=source.dtype)
    once = view_of(source, place)
    once.shape = tuple(shape)
    if _try_copy(view_of(raw, None), once, place, False, False, False):
        raw = raw.expand(source.shape)
    else:
        raw = _read_span(source, place)
    return _with_bits(raw, source)


def _write(to: torch.Tensor, raw: torch.Tensor, non_blocking: bool, place: Place) -> None:
    """Copies host memory of the same dtype, regardless of any bits."""
    ends = view_of(to, place), view_of(raw, None)
    if _try_copy(*ends, place, non_blocking, False, False):
        return
    # Without a kernel, what lies in the gaps has to be written, too: as it was.
    whole = _read_span(to, place)
    whole.copy_(raw)
    copying.copy(bytes_of(to, place), bytes_of(whole, None), stream=place.queue())


def _read_span(source: torch.Tensor, place: Place) -> torch.Tensor:
    """A tensor of the same strides on the host, with all that lies between the source's items."""
    flat = torch.empty(span_of(source), dtype=source.dtype)
    whole = flat.as_strided(source.shape, source.stride())
    copying.copy(bytes_of(whole, None), bytes_of(source, place), stream=place.queue())
    return whole
