"""Where the tensors of an OpenCL device have their memory, and how the rest of bfc sees them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from bfc.copying.view import View, with_array

if TYPE_CHECKING:
    from typing import Any

    from bfc.allocators._allocator import Allocator
    from bfc.suballocators.opencl import OpenCLSubAllocator

#: The dtypes that NumPy has, too. The others are copied as they are, and cast by PyTorch.
NUMPY = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
}

REFUSED = (
    "{}: what needs a kernel of ours runs on the host instead, through a copy to it and one back"
)

_has_warned = False


class Place(Protocol):
    """A device as copies and kernels see it. Its queues run one command after the other."""

    source: OpenCLSubAllocator
    pool: Allocator

    def queue(self) -> Any:
        """The pyopencl.CommandQueue of this thread's current stream."""


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """NumPy's dtype of a tensor's, or one that holds the same bytes."""
    return NUMPY.get(dtype) or np.dtype(f"u{dtype.itemsize}")


def span_of(tensor: torch.Tensor) -> int:
    """How many items lie between the first and the last one of a tensor, with both."""
    if tensor.numel() == 0:
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return int(1 + sum((count - 1) * step for count, step in pairs))


def view_of(tensor: torch.Tensor, place: Place | None) -> View:
    """The items of a tensor as they lie in memory, without its conj and neg bits. The place is None
    for a tensor on the host."""
    size = tensor.element_size()
    view = View(
        "cpu" if place is None else "opencl",
        0,
        tensor.data_ptr(),
        numpy_dtype(tensor.dtype),
        tuple(tensor.shape),
        tuple([step * size for step in tensor.stride()]),
    )
    return _placed(view, tensor, place)


def bytes_of(tensor: torch.Tensor, place: Place | None) -> View:
    """All memory from the first item of a tensor to its last one, gaps included."""
    size = tensor.element_size()
    kind = "cpu" if place is None else "opencl"
    shape = (span_of(tensor) * size,)
    view = View(kind, 0, tensor.data_ptr(), np.dtype(np.uint8), shape, (1,))
    return _placed(view, tensor, place)


def _placed(view: View, tensor: torch.Tensor, place: Place | None) -> View:
    if place is None:
        view.owner = tensor.untyped_storage()  # which a tensor may leave, as by `set_`
        return with_array(view)
    view.memory, view.address = place.source.locate(view.address)
    view.context = place.source.context
    view.stream = place.queue()
    return view


def note_refusal(error: Exception) -> None:
    """Warns, once in a process, that a compiler of OpenCL builds no kernels."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(REFUSED.format(error), RuntimeWarning, stacklevel=3)
