"""Copies between arrays of the host: NumPy's own, with conjugation and negation."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.exceptions import ComplexWarning

from bfc.copy.layout import stands_still

Array = np.ndarray[Any, Any]

#: Kinds of dtypes whose complex source loses its imaginary part. A bool asks for either part.
REAL = "iuf"


def refuse_objects(to: np.dtype[Any], source: np.dtype[Any]) -> None:
    if to.hasobject or source.hasobject:
        raise TypeError(
            "an array of Python objects is not copied: their references live in one process's "
            "heap; numpy.copyto does it on the host"
        )


def refuse_shared_places() -> None:
    raise ValueError(
        "several items of the destination share one place (a stride of 0): "
        "copy into the array that was broadcast"
    )


def warn_of_imaginary(stacklevel: int) -> None:
    """The one warning of a copy from complex to real, before anything is written."""
    warnings.warn(
        "the imaginary part is dropped: the destination is real", ComplexWarning, stacklevel
    )


def is_same_view(to: Array, source: Array) -> bool:
    """Whether both arrays are the same items. Cheap where neither is a view."""
    if to.base is None and source.base is None:
        return False
    return (
        to.strides == source.strides
        and to.shape == source.shape
        and to.dtype == source.dtype
        and to.__array_interface__["data"] == source.__array_interface__["data"]
    )


def copy_plain(to: Array, source: Array) -> None:
    """Two arrays of NumPy's own, cast where they differ, with every check."""
    kind, given = to.dtype, source.dtype
    if kind is not given:
        if given.kind == "c" and kind.kind in REAL:
            refuse_objects(kind, given)
            np.broadcast_shapes(to.shape, source.shape)
            if to.size and to.flags.writeable:
                warn_of_imaginary(4)
            source = source.real
        elif kind.kind == "O" or given.kind == "O" or kind.kind == "V" or given.kind == "V":
            refuse_objects(kind, given)
    elif kind.hasobject:
        refuse_objects(kind, given)
    if 0 in to.strides and to.size and stands_still(to.shape, to.strides):
        refuse_shared_places()
    np.copyto(to, source, "unsafe")


def copy(to: Array, source: Array, conj: bool = False, neg: bool = False) -> None:
    """The same without checks: for views that were checked. What overlaps is copied as NumPy does,
    as if from a copy."""
    complex_source = source.dtype.kind == "c"
    if complex_source and to.dtype.kind in REAL:
        source, complex_source = source.real, False
    conj = conj and complex_source
    if not (conj or neg):
        np.copyto(to, source, casting="unsafe")
    elif conj and neg:
        # The real part alone changes its sign.
        changed = np.negative(source)
        np.conjugate(changed, out=changed)
        np.copyto(to, changed, casting="unsafe")
    else:
        change = np.conjugate if conj else np.negative
        if to.dtype == source.dtype:
            change(source, out=to)
        else:
            np.copyto(to, change(source), casting="unsafe")
