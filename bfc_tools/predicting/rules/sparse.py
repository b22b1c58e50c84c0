"""Sparse gradients: tensors of indices and values (`torch.sparse_coo`), whose memory is theirs.

From PyTorch's torch/csrc/autograd/functions/accumulate_grad.h (a sparse gradient is taken as it
is), ATen/native/sparse/SparseTensor.cpp (clone, sparse_mask), cuda/SparseCUDATensor.cu
(_coalesce_sparse_cuda) and SparseTensorMath.cpp (_sparse_mm). What cuSPARSE works in, a few bytes
to a few KiB, is not counted. An operator that is not here is refused: PyTorch's fake tensors take
its result for empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from bfc.libraries import torch
from bfc_tools.predicting.rules import compressed, cub
from bfc_tools.predicting.rules.interface import Call
from bfc_tools.predicting.rules.operators import answer, file, mark, sparse
from bfc_tools.predicting.rules.tensors import argument, operator

SPARSE_TENSOR = file("ATen/native/sparse/SparseTensor.cpp", read="2.6.0")
TENSOR_CONVERSIONS = file("ATen/native/TensorConversions.cpp", read="2.6.0")

INDEX, COUNT = 8, 4
mark(
    "passes_sparse",
    *("aten::_indices", "aten::indices", "aten::_values", "aten::values", "aten::_nnz"),
    *("aten::sparse_dim", "aten::dense_dim", "aten::detach", "aten::is_coalesced"),
    *("aten::_coalesced_", "aten::coalesce", "aten::_sparse_coo_tensor_with_dims_and_tensors"),
    *("aten::alias", "aten::_dimI", "aten::_dimV", "aten::_has_compatible_shallow_copy_type"),
    source=file("ATen/native/sparse/SparseTensor.cpp", read="2.6.0"),
)


@answer(
    "aten::_to_sparse",
    source=file("ATen/native/TensorConversions.cpp", "dense_to_sparse", read="2.6.0"),
)
def from_dense(call: Call, run: Callable[[], Any]) -> Any:
    """The places of what is not zero, as `nonzero` finds them, and what is there
    (ATen/native/TensorConversions.cpp, dense_to_sparse)."""
    tensor = call.args[0]
    if argument(call, "layout") not in (None, torch.sparse_coo):
        return compressed.from_dense(call, run)
    dims = argument(call, "sparse_dim")
    if dims is None:
        dims = tensor.dim() - (argument(call, "dense_dim") or 0)
    with call.recording:
        found = torch.nonzero(tensor).t()
        if dims == tensor.dim():
            indices = found.clone()
        else:
            most = math.prod(tensor.shape[:dims])
            indices = torch.unique(found[:dims], dim=1)[:, :most].contiguous()
        if tensor.dim():
            values = tensor[tuple(indices.unbind())].clone()
        else:
            values = tensor.unsqueeze(0).clone()
        del found
    return torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        *(dims, tensor.dim() - dims, list(tensor.shape), indices, values),
        dtype=tensor.dtype,
        layout=torch.sparse_coo,
        device=tensor.device,
        is_coalesced=True,
    )


def _parts(tensor: Any) -> tuple[Any, Any]:
    return tensor._indices(), tensor._values()


def _is_sparse(tensor: Any) -> bool:
    return str(tensor.layout) == "torch.sparse_coo"


def _like(tensor: Any, indices: Any, values: Any, coalesced: bool, shape: Any = None) -> Any:
    """A sparse tensor of these, as large as another."""
    dims = tensor.sparse_dim(), tensor.dense_dim()
    return torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        *dims,
        list(tensor.shape if shape is None else shape),
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=coalesced,
    )


@sparse(
    "aten::clone",
    source=(SPARSE_TENSOR, file("torch/csrc/autograd/functions/accumulate_grad.h", read="2.15.0")),
)
def clone(call: Call) -> Any:
    """Copies of both; a gradient in order is kept, where autograd copies that of a subclass."""
    tensor = call.args[0]
    node, parts = torch._C._current_autograd_node(), _parts(tensor)
    kept = node is not None and node.name().endswith("AccumulateGrad")
    kept = kept and all(one.is_contiguous() for one in parts)
    indices, values = (one if kept else one.clone() for one in parts)
    return _like(tensor, indices, values, tensor.is_coalesced())


@sparse("aten::_to_copy", source=TENSOR_CONVERSIONS)
def to_copy(call: Call) -> Any:
    """On another device, or in another type."""
    tensor = call.args[0]
    indices, values = _parts(tensor)
    device = argument(call, "device", None) or tensor.device
    dtype = argument(call, "dtype", None) or values.dtype
    indices = torch.ops.aten._to_copy(indices, device=device)
    values = torch.ops.aten._to_copy(values, device=device, dtype=dtype)
    return _like(tensor, indices, values, tensor.is_coalesced())


@sparse(
    "aten::add",
    "aten::add_",
    source=file(
        "ATen/native/sparse/cuda/SparseCUDATensorMath.cu",
        "add_out_dense_sparse_cuda",
        "add_out_sparse_cuda",
        read="2.6.0",
    ),
)
def added(call: Call) -> Any:
    """To a dense tensor, in its place or on the host; of two sparse ones the one behind the other
    (cuda/SparseCUDATensorMath.cu, add_out_dense_sparse_cuda and add_out_sparse_cuda)."""
    into, other = call.args[:2]
    in_place = operator(call) == "add_"
    if not (_is_sparse(into) and _is_sparse(other)):
        if _is_sparse(into):
            return NotImplemented  # so does PyTorch
        if not in_place and into.device.type == "cpu":
            return torch.empty_like(into, dtype=torch.promote_types(into.dtype, other.dtype))
        return into if in_place and other.sparse_dim() == 1 else NotImplemented
    parts = zip(_parts(into), _parts(other), (1, 0), strict=True)
    indices, values = (torch.cat([first, second], dim) for first, second, dim in parts)
    made = _like(into, indices, values, False)
    if not in_place:
        return made
    torch.Tensor.data.__set__(into, made)
    return into


@sparse(
    "aten::_coalesce",
    source=file(
        "ATen/native/sparse/cuda/SparseCUDATensor.cu", "_coalesce_sparse_cuda", read="2.6.0"
    ),
)
def coalesced(call: Call) -> Any:
    """The indices are sorted, and the values of equal ones summed up: at most all stay, or as many
    as differ if they were drawn evenly. The memory of all indices is kept."""
    tensor = call.args[0]
    indices, values = _parts(tensor)
    count = int(values.shape[0])
    dims = tensor.sparse_dim()
    left = call.choices.different(indices) if call.choices and dims == 1 else count
    call.assume("a sparse tensor: indices that differ", left)
    sorted_ones = torch.empty(count, dtype=indices.dtype, device=indices.device)  # as one number
    held = [torch.empty_like(sorted_ones) for _ in range(2)]
    capability, cccl = call.gpu.cc, call.release.cccl
    for size in (  # Thrust's sort by a comparison, and the first of each run
        cub.merge_sort(count, INDEX, INDEX),
        cub.aliased(cub.unique_by_key(count, INDEX, cccl, capability, COUNT), INDEX),
    ):
        storage = torch.empty(size, dtype=torch.uint8, device=indices.device)
        del storage
    summed = torch.empty((left, *values.shape[1:]), dtype=values.dtype, device=values.device)
    if dims == 1:
        kept = sorted_ones[:left].view(1, -1)
    else:
        kept = torch.empty((dims, left), dtype=indices.dtype, device=indices.device)
    del held, sorted_ones
    return _like(tensor, kept, summed, True)


@sparse(
    "aten::_sparse_addmm",
    source=file(
        "ATen/native/sparse/cuda/SparseCUDATensorMath.cu",
        "s_addmm_out_sparse_dense_cuda",
        read="2.6.0",
    ),
)
def sum_and_product(call: Call) -> Any:
    """Of a sparse matrix and a dense one (cuda/SparseCUDATensorMath.cu,
    s_addmm_out_sparse_dense_cuda): in order, with the ends of rows in 32 bits, and turned round."""
    return _product(*call.args[1:3])


@sparse(
    "aten::mm", source=file("ATen/native/sparse/SparseTensorMath.cpp", "_sparse_mm", read="2.6.0")
)
def product(call: Call) -> Any:
    """The same, with zeros to add to (SparseTensorMath.cpp, _sparse_mm)."""
    matrix, dense = call.args
    if not _is_sparse(matrix) or _is_sparse(dense):
        return NotImplemented
    return _product(matrix, dense, dense.new_zeros((matrix.shape[0], dense.shape[1])))


def _product(matrix: Any, dense: Any, zeros: Any = None) -> Any:
    if not _is_sparse(matrix) or _is_sparse(dense):
        return NotImplemented
    result = dense.new_empty((matrix.shape[0], dense.shape[1]))
    ordered = matrix.coalesce()
    count = int(ordered._values().shape[0])
    ends = dense.new_empty(matrix.shape[0] + 1, dtype=torch.int32)
    rows = dense.new_empty(count, dtype=torch.int32)
    del rows
    columns = dense.new_empty(count, dtype=torch.int32)
    turned = torch.empty_like(result)
    del turned, columns, ends, ordered
    return result


@sparse("aten::t", source=file("ATen/native/TensorShape.cpp", "transpose", read="2.6.0"))
def turned(call: Call) -> Any:
    """A copy whose rows of indices change places (ATen/native/TensorShape.cpp, transpose)."""
    tensor = call.args[0]
    if tensor.sparse_dim() != 2:
        return NotImplemented
    indices, values = _parts(tensor)
    values, indices = values.clone(), indices.clone()
    row = indices[0].clone()
    del row
    shape = [tensor.shape[1], tensor.shape[0], *tensor.shape[2:]]
    return _like(tensor, indices, values, False, shape)


@sparse("aten::_to_dense", source=(TENSOR_CONVERSIONS, SPARSE_TENSOR))
def to_dense(call: Call) -> Any:
    """Added to zeros, at indices that are one number each."""
    tensor = call.args[0]
    result = tensor._values().new_zeros(tuple(tensor.shape))
    if not tensor.is_coalesced():
        places = tensor._indices().new_empty(tensor._nnz())
        del places
    return result


@sparse(
    "aten::sparse_mask",
    source=(
        file("ATen/native/sparse/SparseTensor.cpp", "sparse_mask", read="2.6.0"),
        file("ATen/native/sparse/cuda/SparseCUDATensorMath.cu", read="2.6.0"),
    ),
)
def sparse_mask(call: Call) -> Any:
    """The rows of a dense tensor that another has, at the same places, times one
    (SparseTensor.cpp, sparse_mask, and cuda/SparseCUDATensorMath.cu, mul)."""
    tensor, mask = call.args[:2]
    dims = mask.sparse_dim()
    if dims == 0 or _is_sparse(tensor):
        return NotImplemented
    indices = mask._indices()
    one = torch.ones(1, dtype=tensor.dtype, device=tensor.device)
    numbers = indices[0] if dims == 1 else indices.new_empty(indices.shape[1])
    rows = tensor.flatten(0, dims - 1).index_select(0, numbers)
    places, product = indices.clone(), torch.empty_like(rows)
    del rows, one, numbers
    return _like(mask, places, product, mask.is_coalesced())


@sparse(
    "aten::_sparse_mask_projection",
    source=file("ATen/native/sparse/SparseBinaryOpIntersectionCommon.h", read="2.6.0"),
)
def sparse_mask_projection(call: Call) -> Any:
    """The gradient of that: of the one, what is where the other is. Indices of the other are one
    number each, and where each is found is counted (SparseBinaryOpIntersectionCommon.h)."""
    tensor, mask = call.args[:2]
    if not (_is_sparse(tensor) and _is_sparse(mask)):
        return NotImplemented
    indices, values = _parts(tensor)
    count, other = int(values.shape[0]), int(mask._values().shape[0])
    numbers = [indices.new_empty(size) for size in (other, max(count, other), count, count)]
    found = _like(tensor, indices.clone(), torch.empty_like(values), tensor.is_coalesced())
    del numbers
    return found
