"""The steps of a copy, in the order of PyTorch's `copy_`: early exits, the path between two kinds
of memory, and when temporaries are needed.

The paths are the same for every kind of device. Copies are queued on a `CopyStream`, of CUDA or of
OpenCL. `named` is the stream that the user passed, or None.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from bfc.copying import cuda_stream, kernels
from bfc.copying import host as _host
from bfc.copying.copy_stream import CopyStream
from bfc.copying.cuda_stream import CUDACopyStream
from bfc.copying.launch import borrowed
from bfc.copying.layout import (
    is_aligned,
    is_one_run,
    rows_of,
    stands_still,
    walk,
)
from bfc.copying.readers import view_of
from bfc.copying.view import CUDA, View, of_array
from bfc.drivers.opencl import platform as _opencl
from bfc.streams import is_queue

#: Rows of at least this many bytes are copied between host and device without a temporary.
WIDE_ROW = 256


def run(dst: Any, src: Any, non_blocking: bool, named: Any, conj: bool, neg: bool) -> None:
    """`bfc.copy`, without its fast path in `_fast.pyx`."""
    handle = _told(named)
    to = view_of(dst, writes=True, stream=handle)
    source = to
    try:
        source = view_of(src, stream=handle)
        _check_and_copy(to, source, non_blocking, named, conj, neg)
    finally:
        to.held.clear()
        source.held.clear()


def _check_and_copy(
    to: View, source: View, non_blocking: bool, named: Any, conj: bool, neg: bool
) -> None:
    _host.refuse_objects(to.dtype, source.dtype)
    conj, neg = bool(conj) and source.dtype.kind == "c", bool(neg)
    if neg and source.dtype.kind not in "iufc":
        raise TypeError(f"cannot negate {source.dtype}: neg=True is for numbers")
    if not conj and not neg and to.is_same(source):
        return
    if to.readonly:
        raise ValueError("the destination is read-only")
    source = source.expanded(to.shape)
    if to.items == 0:
        return
    if stands_still(to.shape, to.strides):
        _host.refuse_shared_places()
    if source.dtype.kind == "c" and to.dtype.kind in _host.REAL:
        _host.warn_of_imaginary()
        conj = False
    change = kernels.CONJUGATE * conj | kernels.NEGATE * neg
    _route(to, source, change, non_blocking, named)


def _told(named: Any) -> int:
    """The CUDA stream to pass to a DLPack producer."""
    return 1 if is_queue(named) else cuda_stream.chosen_stream(named) or 1


def _route(to: View, source: View, change: int, non_blocking: bool, named: Any) -> None:
    if not (to.kind in CUDA or source.kind in CUDA):
        cuda_stream.wait_on_host(to)
        cuda_stream.wait_on_host(source)
    if to.on_host and source.on_host:
        assert to.array is not None
        assert source.array is not None
        _host.copy(to.array, source.array, *_flags(change))
    elif "opencl" not in (to.kind, source.kind):
        _cuda_way(to, source, change, non_blocking, named)
    elif to.kind in CUDA or source.kind in CUDA:
        _through_host(to, source, change, named)
    else:
        _opencl_way(to, source, change, non_blocking, named)


def _flags(change: int) -> tuple[bool, bool]:
    return bool(change & kernels.CONJUGATE), bool(change & kernels.NEGATE)


# -- the paths -------------------------------------------------------------------------------------


def _cuda_way(to: View, source: View, change: int, non_blocking: bool, named: Any) -> None:
    if to.on_host or source.on_host:
        device, host = (source, to) if to.on_host else (to, source)
        with cuda_stream.stream_for(device, named) as stream:
            stream.refuse_capture_of(host.address, non_blocking)
            stream.wait_for_users(device)
            if non_blocking:
                stream.wait_for_users_of_pinned(host)
            else:
                stream.wait_for_named(host)
            try:
                _across(stream, to, source, change, non_blocking)
            except BaseException:
                if not non_blocking:
                    with suppress(Exception):  # what is queued may use memory that goes now
                        stream.synchronize()
                raise
            finally:
                if non_blocking:
                    stream.note_use_of_pinned(
                        host
                    )  # after an error too: the transfer may be queued
    elif to.ordinal == source.ordinal:
        with cuda_stream.stream_for(source, named) as stream:
            stream.wait_for_users(to, source)
            _within(stream, to, source, change)
    else:
        first, second = cuda_stream.streams_between(source, to, named)
        with second, first:
            first.wait_for_users(source)
            second.wait_for_users(to)
            _between(
                first, second, to, source, change, cuda_stream.reaches(source, to), non_blocking
            )


def _opencl_way(to: View, source: View, change: int, non_blocking: bool, named: Any) -> None:
    from bfc.copying import opencl_stream

    sides = [view for view in (source, to) if not view.on_host]
    known = [view for view in sides if view.context is not None]
    if len(known) == 2 and to.context != source.context:
        _through_host(to, source, change, named)
        return
    device = (known or sides)[0]
    with _opencl.in_words():
        stream = opencl_stream.stream_for(device, named)
        stream.wait_for_users(*sides)
        try:
            if to.on_host or source.on_host:
                _across(stream, to, source, change, non_blocking and not stream.is_private)
            else:
                _within(stream, to, source, change)
            stream.note_uses(to, source)
        except BaseException:
            with suppress(Exception):  # what is queued may use memory that goes now
                stream.synchronize()
            raise


def _through_host(to: View, source: View, change: int, named: Any) -> None:
    """Copies between devices of different kinds, through the host. Complete on return."""
    between = of_array(np.empty(source.shape, source.dtype))
    first, second = (None, named) if _is_of_second(named, to, source) else (named, None)
    _route(between, source, 0, False, first)
    _route(to, between, change, False, second)


def _is_of_second(named: Any, to: View, source: View) -> bool:
    """Whether the named stream belongs to the destination's device; between two OpenCL devices,
    whether it belongs to the destination's context."""
    if to.kind == source.kind:
        return bool(getattr(named, "context", None) == to.context)
    return is_queue(named) == (to.kind == "opencl")


def _as_bytes(to: View, source: View) -> tuple[View, View] | None:
    """Both sides as views that start at their first byte, if plain bytes can be copied: if they
    have the same dtype, and each is one contiguous run of items."""
    if to.dtype != source.dtype:
        return None
    if to.strides == source.strides and to.is_packed:
        return to, source
    way = walk(to.shape, to.strides, source.strides)
    if not is_one_run(way, to.dtype.itemsize):
        return None
    return _from_below(to, way.to), _from_below(source, way.source)


def _within(stream: CopyStream, to: View, source: View, change: int) -> None:
    """A copy on one device, or to memory that its kernels can reach."""
    if to.dtype == source.dtype and not change:
        ends = _as_bytes(to, source)
        if ends is not None:
            if to.address != source.address or to.place != source.place:
                stream.move(*ends)
            return
        way = walk(to.shape, to.strides, source.strides)
        rows = rows_of(way, to.dtype.itemsize)
        if rows is not None and stream.move_rows(
            _from_below(to, way.to), _from_below(source, way.source), rows
        ):
            return
        stream.launch(to, source, 0)
    elif stream.prepare(to.dtype, source.dtype):
        stream.launch(to, source, change)
    else:
        _cast_on_host(stream, stream, to, source, change)


def _from_below(view: View, offset: int) -> View:
    """The same memory as a view that starts at its first byte."""
    return view if offset == 0 else replace(view, address=view.address + offset)


def _cast_on_host(
    first: CopyStream, second: CopyStream, to: View, source: View, change: int
) -> None:
    """Casts on the host, between dtypes for which there is no kernel. Complete on return."""
    first.refuse_capture()
    second.refuse_capture()
    between = of_array(np.empty(source.shape, source.dtype))
    _from_device(first, between, source, 0, False)
    _to_device(second, to, between, change, False)


def _across(stream: CopyStream, to: View, source: View, change: int, non_blocking: bool) -> None:
    """Copies between the host and a device. A blocking copy waits for the stream exactly once."""
    if to.on_host:
        _from_device(stream, to, source, change, non_blocking)
    else:
        _to_device(stream, to, source, change, non_blocking)


def _rows_across(stream: CopyStream, to: View, source: View, change: int) -> bool:
    """Queues a copy of rows that are long enough to need no temporary. Returns whether it did."""
    if change or to.dtype != source.dtype:
        return False
    way = walk(to.shape, to.strides, source.strides)
    rows = rows_of(way, to.dtype.itemsize)
    if rows is None or rows.width < WIDE_ROW:
        return False
    return stream.move_rows(_from_below(to, way.to), _from_below(source, way.source), rows)


def _to_device(stream: CopyStream, to: View, source: View, change: int, non_blocking: bool) -> None:
    """Queues the copy, and keeps the host's memory while the device may read it."""
    ends = _as_bytes(to, source)
    if ends is not None and (not change or _changes_in_place(stream, to)):
        stream.move(*ends)
        if change:
            stream.launch(to, to, change)
        _wait_or_keep(stream, source, non_blocking)
        return
    if _rows_across(stream, to, source, change):
        _wait_or_keep(stream, source, non_blocking)
        return
    on_device = non_blocking and (to.dtype != source.dtype or bool(change))
    on_device = on_device and stream.prepare(to.dtype, source.dtype)
    ready = _packed(source) if on_device else _changed(source, to.dtype, change)
    if ready is not source:
        stream.refuse_capture()
    if to.is_packed and not on_device:
        stream.move(to, ready)
    else:
        temporary = stream.temporary(ready.dtype, to.shape)
        try:
            stream.move(temporary, ready)
            _within(stream, to, temporary, change if on_device else 0)
        finally:
            stream.release(temporary)
    _wait_or_keep(stream, ready, non_blocking)


def _changes_in_place(stream: CopyStream, to: View) -> bool:
    """Whether values that have arrived can be changed without a temporary, for which there may be
    no room."""
    if not stream.prepare(to.dtype, to.dtype):
        return False
    size = kernels.component_size(str(kernels.code_of(to.dtype)))
    way = walk(to.shape, to.strides, to.strides)
    return is_aligned(way, to.address, size, to.address, size)


def _from_device(
    stream: CopyStream, to: View, source: View, change: int, non_blocking: bool
) -> None:
    """Queues the copy. Waits for it if the host has to do something afterwards, or if asked to."""
    assert to.array is not None
    ends = _as_bytes(to, source)
    if ends is not None and not (change and non_blocking):
        stream.move(*ends)
        _wait_or_keep(stream, to, non_blocking)
        if change:
            # A copy of one run of items needs no temporary, for which there may be no room.
            memory: Any = (ctypes.c_char * to.nbytes).from_address(ends[0].address)
            run = np.frombuffer(memory, to.dtype)
            _host.copy(run, run, *_flags(change))
        return
    if _rows_across(stream, to, source, change):
        _wait_or_keep(stream, to, non_blocking)
        return
    on_device = non_blocking and (to.dtype != source.dtype or bool(change))
    on_device = on_device and stream.prepare(to.dtype, source.dtype)
    leaves = to.dtype if on_device else source.dtype
    arrives = to
    if not to.is_packed or to.dtype != leaves or (change and not on_device):
        stream.refuse_capture()
        arrives = of_array(np.empty(to.shape, leaves))
    packed, temporary = source, None
    if on_device or not source.is_packed:
        packed = temporary = stream.temporary(leaves, source.shape)
    try:
        if temporary is not None:
            _within(stream, temporary, source, change if on_device else 0)
        stream.move(arrives, packed)
    finally:
        if temporary is not None:
            stream.release(temporary)
    if arrives is to:
        _wait_or_keep(stream, to, non_blocking)
        return
    stream.synchronize()  # the host will read what arrives
    assert arrives.array is not None
    _host.copy(to.array, arrives.array, *_flags(0 if on_device else change))


def _wait_or_keep(stream: CopyStream, host: View, non_blocking: bool) -> None:
    if non_blocking:
        stream.keep(host)
    else:
        stream.synchronize()


def _packed(source: View) -> View:
    """Host memory without gaps: the view itself, or a copy."""
    if source.is_packed:
        return source
    assert source.array is not None
    return of_array(np.ascontiguousarray(source.array).reshape(source.shape))


def _changed(source: View, dtype: np.dtype[Any], change: int) -> View:
    """Host memory without gaps, cast and changed."""
    if source.dtype == dtype and not change:
        return _packed(source)
    assert source.array is not None
    array = np.empty(source.shape, dtype)
    _host.copy(array, source.array, *_flags(change))
    return of_array(array)


def _between(
    first: CUDACopyStream,
    second: CUDACopyStream,
    to: View,
    source: View,
    change: int,
    peers: bool,
    non_blocking: bool,
) -> None:
    """Copies between CUDA devices, on the source's stream. The copy runs after all work queued on
    the destination's stream now, and before all work queued there later."""
    ends = None if change else _as_bytes(to, source)
    if peers or ends is not None:  # else, as in PyTorch, through packed memory of one dtype
        casts = bool(change) or to.dtype != source.dtype
        if casts and not first.prepare(to.dtype, source.dtype):
            return _cast_on_host(first, second, to, source, change)
        first.wait_for(second)
        if ends is not None:
            first.move_between(*ends, peers, second)
        else:
            _within(first, to, source, change)
        second.wait_for(first)
        return None
    return _by_temporaries(first, second, to, source, change, non_blocking)


def _by_temporaries(
    first: CUDACopyStream,
    second: CUDACopyStream,
    to: View,
    source: View,
    change: int,
    non_blocking: bool,
) -> None:
    """Packs the items on the source's device, moves them, and spreads them on the destination's. A
    non-blocking copy casts on the source's device, a blocking one on the destination's."""
    casts = bool(change) or to.dtype != source.dtype
    caster = first if non_blocking else second
    if casts and not caster.prepare(to.dtype, source.dtype):
        return _cast_on_host(first, second, to, source, change)
    at_source = casts and non_blocking
    leaves, arrives = source, to
    with ExitStack() as temporaries:
        if at_source or not source.is_packed:
            dtype = to.dtype if at_source else source.dtype
            leaves = temporaries.enter_context(borrowed(first, dtype, source.shape))
        if (casts and not at_source) or not to.is_packed:
            arrives = temporaries.enter_context(borrowed(second, leaves.dtype, to.shape))
        if leaves is not source:
            _within(first, leaves, source, change if at_source else 0)
        first.wait_for(second)
        first.move_between(arrives, leaves, False, second)
        second.wait_for(first)
        if arrives is not to:
            _within(second, to, arrives, 0 if at_source else change)
    return None
