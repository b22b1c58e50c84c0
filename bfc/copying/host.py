"""Copies between arrays of the host, by NumPy, with conjugation and negation."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.exceptions import ComplexWarning

Array = np.ndarray[Any, Any]

#: Kinds of destinations in which a complex source loses its imaginary part. (A bool is not one of
#: them: it is True if either part is not 0.)
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


def warn_of_imaginary() -> None:
    """The one warning of a copy from complex to real, before anything is written."""
    text = "the imaginary part is dropped: the destination is real"
    warnings.warn(text, ComplexWarning, stacklevel=4)  # of the call of bfc.copy


def _is_number(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biufc" or dtype.isbuiltin == 2  # 2: of another package, like bfloat16


def copy(to: Array, source: Array, conj: bool = False, neg: bool = False) -> None:
    """Copies between views that were checked. If they overlap, the result is as if they did not."""
    complex_source = source.dtype.kind == "c"
    if complex_source and to.dtype.kind in REAL:
        source, complex_source = source.real, False
    conj = conj and complex_source
    if not (conj or neg):
        if to.dtype != source.dtype and not (_is_number(to.dtype) and _is_number(source.dtype)):
            # A string that is not a number raises an error when it is reached. Nothing may be
            # written before that.
            source = source.astype(to.dtype)
        elif to.ndim == 1 and np.may_share_memory(to, source):
            # NumPy does not notice an overlap of views with different steps.
            source = source.copy()
        np.copyto(to, source, casting="unsafe")
        return
    # NumPy 2.4 negates wrongly from items 64 bytes apart into others that are not next to each
    # other (on processors with AVX-512), so only arrays without gaps are written in place.
    in_place = to.dtype == source.dtype and to.shape == source.shape
    in_place = in_place and to.flags.c_contiguous and source.flags.c_contiguous
    changed = to if in_place else np.empty(source.shape, source.dtype)
    if conj:
        np.conjugate(source, out=changed)
        source = changed
    if neg:
        np.negative(source, out=changed)
    if not in_place:
        np.copyto(to, changed, casting="unsafe")
