"""Tensors of compressed rows or columns: `torch.sparse_csr`, `sparse_csc`, and those of blocks,
`sparse_bsr` and `sparse_bsc`. One is the ends of its rows, the places in them, and values.

From PyTorch's ATen/native/TensorConversions.cpp (dense_to_sparse_compressed,
sparse_compressed_to_flipped, coo_to_sparse_csr, sparse_compressed_to_sparse),
ATen/native/sparse/SparseCsrTensorMath.cpp (sparse_mask_sparse_compressed) and
sparse/cuda/SparseBlasImpl.cpp (addmm_out_sparse_csr). What cuSPARSE works in is not counted.

PyTorch asks a real device for its context where one is made of shapes. So the tensor itself is made
without a device, of shapes too, and has its three parts as an attribute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bfc.libraries import torch
from bfc_tools.predicting.rules.interface import Call
from bfc_tools.predicting.rules.operators import answer, compressed, file, sparse
from bfc_tools.predicting.rules.tensors import argument, operator

SPARSE_CSR_TENSOR = file("ATen/native/sparse/SparseCsrTensor.cpp", read="2.6.0")
TENSOR_CONVERSIONS = file("ATen/native/TensorConversions.cpp", read="2.6.0")
SPARSE_BLAS_IMPL_ADDMM_OUT_SPARSE_CSR = file(
    "ATen/native/sparse/cuda/SparseBlasImpl.cpp", "addmm_out_sparse_csr", read="2.6.0"
)

#: The other way round: rows for columns.
FLIPPED = {"csr": "csc", "csc": "csr", "bsr": "bsc", "bsc": "bsr"}
REFUSED = (
    "bfc does not know what {} takes for this tensor: of compressed rows or columns it knows "
    "matrices of two dimensions. Give the program dense ones for the prediction, or to_sparse()"
)


def kind_of(tensor: Any) -> str:
    """Which of the four it is, or "" for any other tensor."""
    kind = str(tensor.layout).removeprefix("torch.sparse_")
    return kind if kind in FLIPPED else ""


def made(kind: str, ends: Any, places: Any, values: Any, shape: Any) -> Any:
    """The tensor of a kind that has these parts."""
    from torch._subclasses.fake_tensor import FakeTensor

    layout, parts = getattr(torch, f"sparse_{kind}"), (ends, places, values)
    with torch._C._DisableTorchDispatch():
        shapes = (torch.empty(it.shape, dtype=it.dtype, device="meta") for it in parts)
        inner = torch.ops.aten._sparse_compressed_tensor_unsafe(
            *(*shapes, list(shape)), dtype=values.dtype, layout=layout, device="meta"
        )
    found = FakeTensor(values.fake_mode, inner, values.fake_device)
    found.bfc_parts = parts
    return found


def parts_of(call: Call, tensor: Any) -> tuple[Any, Any, Any]:
    """The ends, places and values of a tensor that was made here."""
    parts: tuple[Any, Any, Any] | None = getattr(tensor, "bfc_parts", None)
    if parts is None or tensor.dim() != 2:
        raise _refused(call)
    return parts


def _refused(call: Call) -> NotImplementedError:
    return NotImplementedError(REFUSED.format(call.func._schema.name))


def _like(tensor: Any, parts: Any, kind: str = "") -> Any:
    ends, places, values = parts
    return made(kind or kind_of(tensor), ends, places, values, tensor.shape)


def _asked(call: Call) -> str:
    """The kind that a conversion makes: by its name, or by its argument."""
    layout = argument(call, "layout")
    return operator(call)[-3:] if layout is None else str(layout).removeprefix("torch.sparse_")


@answer(
    *(f"aten::{name}" for name in ("sparse_compressed_tensor", "_sparse_compressed_tensor_unsafe")),
    source=SPARSE_CSR_TENSOR,
)
def of_parts(call: Call, run: Callable[[], Any]) -> Any:
    """Made of what is given: nothing is copied."""
    ends, places, values = call.args[:3]
    shape = argument(call, "size")
    if shape is None or values.dim() not in (1, 3) or len(shape) != 2:
        raise _refused(call)  # without a size the numbers decide
    with call.recording:  # where another device, or another type, is asked for
        device = argument(call, "device") or values.device
        values = values.to(device, argument(call, "dtype") or values.dtype)
        parts = ends.to(device), places.to(device), values
    return made(_asked(call), *parts, shape)


@answer(
    *(f"aten::_to_sparse_{kind}" for kind in FLIPPED),
    source=file("ATen/native/TensorConversions.cpp", "dense_to_sparse_compressed", read="2.6.0"),
)
def from_dense(call: Call, run: Callable[[], Any]) -> Any:
    """What is not zero: places by two masked selections, and values by their numbers."""
    tensor = call.args[0]
    if tensor.dim() != 2 or argument(call, "dense_dim"):
        raise _refused(call)
    with call.recording:
        return _selected(tensor, tensor != 0, _asked(call), argument(call, "blocksize"))


def _selected(tensor: Any, mask: Any, kind: str, blocks: Any) -> Any:
    values = tensor
    if blocks is not None:
        values, mask = _tiles(tensor, blocks), _tiles(mask, blocks)
        mask = mask.sum((2, 3)) != 0
    if kind.endswith("c"):
        values, mask = values.transpose(0, 1), mask.transpose(0, 1)
    count, across = mask.shape
    device = tensor.device
    places = torch.arange(across, device=device).view(1, -1).expand_as(mask).masked_select(mask)
    rows = torch.arange(count, device=device).view(-1, 1).expand_as(mask).masked_select(mask)
    ends = torch.ops.aten._convert_indices_from_coo_to_csr(rows, count)
    flat = mask.flatten()
    numbers = torch.arange(flat.numel(), device=device).masked_select(flat)[: places.numel()]
    del flat
    values = values.flatten(0, 1).index_select(0, numbers)
    return made(kind, ends, places, values, tensor.shape)


def _tiles(tensor: Any, blocks: Any) -> Any:
    """The blocks of a matrix, one after the other."""
    high, wide = blocks
    shape = tensor.shape[0] // high, high, tensor.shape[1] // wide, wide
    return tensor.reshape(shape).transpose(1, 2).contiguous()


@sparse(
    "aten::_to_sparse",
    *(f"aten::_to_sparse_{kind}" for kind in FLIPPED),
    source=file("ATen/native/TensorConversions.cpp", "coo_to_sparse_csr", read="2.6.0"),
)
def from_places(call: Call) -> Any:
    """Of a tensor of indices: in order, and the rows become their ends."""
    kind = _asked(call)
    if kind not in FLIPPED:
        return call.args[0]
    return _of_indices(call, call.args[0], kind, argument(call, "blocksize"))


def _of_indices(call: Call, tensor: Any, kind: str, blocks: Any) -> Any:
    if tensor.sparse_dim() != 2 or tensor.dim() != 2:
        raise _refused(call)
    if kind.startswith("b"):
        rows = _converted(call, _of_indices(call, tensor, "csr", None), "bsr", blocks)
        return _converted(call, rows, kind, blocks)  # PyTorch makes those of rows first
    ordered = (tensor.t() if kind == "csc" else tensor).coalesce()
    rows, places = ordered._indices()
    ends = torch.ops.aten._convert_indices_from_coo_to_csr(rows, ordered.shape[0])
    return made(kind, ends, places, ordered._values(), tensor.shape)


@compressed(
    *(f"aten::_to_sparse_{kind}" for kind in FLIPPED),
    source=file("ATen/native/TensorConversions.cpp", "sparse_compressed_to_flipped", read="2.6.0"),
)
def between_kinds(call: Call) -> Any:
    """The parts as they are, rows for columns, or rows in blocks."""
    return _converted(call, call.args[0], _asked(call), argument(call, "blocksize"))


@compressed(
    "aten::_to_sparse",
    source=file("ATen/native/TensorConversions.cpp", "sparse_compressed_to_sparse", read="2.6.0"),
)
def to_other(call: Call) -> Any:
    """To indices, if no kind is asked for."""
    kind = _asked(call) if argument(call, "layout") is not None else ""
    if kind in FLIPPED:
        return _converted(call, call.args[0], kind, argument(call, "blocksize"))
    return _to_indices(call, call.args[0])


def _converted(call: Call, tensor: Any, kind: str, blocks: Any) -> Any:
    parts, now = parts_of(call, tensor), kind_of(tensor)
    if kind == now:
        return _like(tensor, parts)
    if kind == FLIPPED[now]:
        return _flipped(tensor, parts)
    if kind.startswith("b") and now.startswith("c"):
        if kind[-1] != now[-1]:
            tensor = _flipped(tensor, parts)
        return _in_blocks(call, tensor, tensor.bfc_parts, kind, blocks)
    raise _refused(call)  # PyTorch has no such conversion either


def _in_blocks(call: Call, tensor: Any, parts: Any, kind: str, blocks: Any) -> Any:
    """Computed by the processor, and copied back: as many blocks as there are numbers at most."""
    ends, places, values = parts
    high, wide = blocks
    rows, columns = tensor.shape[0] // high, tensor.shape[1] // wide
    count = min(places.shape[0], rows * columns)
    call.assume("a sparse tensor: blocks that are not zero", count)
    in_blocks = values.new_empty((count, high, wide))
    ends = ends.new_empty(1 + (rows if kind == "bsr" else columns))
    return _like(tensor, (ends, places.new_empty(count), in_blocks), kind)


def _flipped(tensor: Any, parts: Any) -> Any:
    """By way of indices, which are sorted as one number each (sparse_compressed_to_flipped)."""
    ends, places, values = parts
    lengths = ends.shape[0] - 1
    turned_dim = int(kind_of(tensor).endswith("r"))  # the one that is not compressed now
    across = tensor.shape[turned_dim]
    if values.dim() == 3:
        across //= values.shape[1 + turned_dim]
    first = ends[:-1].add(0).reshape(-1)
    whole = ends.new_empty(lengths + 1)
    found = torch.ops.aten._convert_indices_from_csr_to_coo(whole, places, transpose=True)
    batch = found[1].div(lengths, rounding_mode="trunc")
    del batch
    numbers = torch.empty_like(places)
    order = numbers.sort()[1]
    ordered = found.index_select(1, order)
    new_values = values.index_select(0, order)
    new_ends = torch.ops.aten._convert_indices_from_coo_to_csr(ordered[0], across)
    new_ends = torch.zeros_like(new_ends)
    del first, numbers
    kind = FLIPPED[kind_of(tensor)]
    return made(kind, new_ends, ordered[1], new_values, tensor.shape)


def _to_indices(call: Call, tensor: Any) -> Any:
    ends, places, values = parts_of(call, tensor)
    kind = kind_of(tensor)
    indices = torch.ops.aten._convert_indices_from_csr_to_coo(
        ends, places, transpose=kind.endswith("c")
    )
    if kind.startswith("b"):
        inside = torch.empty((2, 1, values[0].numel()), dtype=indices.dtype, device=indices.device)
        indices = indices.mul(1).unsqueeze(-1).add(inside).flatten(-2, -1)
        values = values.flatten()
    return torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        *(2, 0, list(tensor.shape), indices, values),
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=kind == "csr",
    )


@compressed("aten::_to_dense", source=TENSOR_CONVERSIONS)
def to_dense(call: Call) -> Any:
    """Added to zeros, at places that are one number each."""
    tensor = call.args[0]
    ends, places, values = parts_of(call, tensor)
    result = values.new_zeros(tuple(tensor.shape))
    found = torch.ops.aten._convert_indices_from_csr_to_coo(ends, places)
    numbers = found[0].mul(1).add(found[1])
    del numbers, found
    return result


@compressed(
    "aten::sparse_mask",
    source=file(
        "ATen/native/sparse/SparseCsrTensorMath.cpp", "sparse_mask_sparse_compressed", read="2.6.0"
    ),
)
def sparse_mask(call: Call) -> Any:
    """The values of a dense tensor where another has some: through a dense mask."""
    tensor, other = call.args[:2]
    if kind_of(tensor):
        return tensor if kind_of(tensor) == kind_of(other) else NotImplemented
    values = parts_of(call, other)[2]
    mask = torch.empty(tensor.shape, dtype=torch.bool, device=tensor.device)
    blocks = values.shape[1:] if values.dim() == 3 else None
    found = _selected(tensor, mask, kind_of(other), blocks)
    return _like(other, tuple(map(_cut, found.bfc_parts, parts_of(call, other))))


def _cut(part: Any, other: Any) -> Any:
    return part if part.shape == other.shape else part.new_empty(other.shape)


@compressed("aten::crow_indices", "aten::ccol_indices", source=SPARSE_CSR_TENSOR)
def ends_of(call: Call) -> Any:
    """The first part."""
    return torch.ops.aten.alias(parts_of(call, call.args[0])[0])


@compressed("aten::col_indices", "aten::row_indices", source=SPARSE_CSR_TENSOR)
def places_of(call: Call) -> Any:
    """The second part."""
    return torch.ops.aten.alias(parts_of(call, call.args[0])[1])


@compressed("aten::values", source=SPARSE_CSR_TENSOR)
def values_of(call: Call) -> Any:
    """The last part."""
    return torch.ops.aten.alias(parts_of(call, call.args[0])[2])


@compressed("aten::_nnz", source=SPARSE_CSR_TENSOR)
def count_of(call: Call) -> int:
    """How many values, or blocks."""
    return int(parts_of(call, call.args[0])[1].shape[-1])


@compressed("aten::sparse_dim", "aten::dense_dim", source=SPARSE_CSR_TENSOR)
def dims_of(call: Call) -> int:
    """Two are sparse."""
    return 2 * (operator(call) == "sparse_dim")


@compressed("aten::detach", "aten::alias", source=SPARSE_CSR_TENSOR)
def detach(call: Call) -> Any:
    """The same parts."""
    return _like(call.args[0], parts_of(call, call.args[0]))


@compressed("aten::clone", source=SPARSE_CSR_TENSOR)
def clone(call: Call) -> Any:
    """A copy of each part."""
    return _like(call.args[0], [part.clone() for part in parts_of(call, call.args[0])])


@compressed("aten::_to_copy", source=TENSOR_CONVERSIONS)
def to_copy(call: Call) -> Any:
    """On another device, or in another type."""
    tensor = call.args[0]
    ends, places, values = parts_of(call, tensor)
    device = argument(call, "device") or values.device
    copy = torch.ops.aten._to_copy
    values = copy(values, device=device, dtype=argument(call, "dtype") or values.dtype)
    return _like(tensor, (copy(ends, device=device), copy(places, device=device), values))


@compressed("aten::t", "aten::transpose", source=file("ATen/native/TensorShape.cpp", read="2.6.0"))
def turned(call: Call) -> Any:
    """The same parts, rows for columns; blocks are turned in a view."""
    tensor = call.args[0]
    ends, places, values = parts_of(call, tensor)
    kind, shape = FLIPPED[kind_of(tensor)], (tensor.shape[1], tensor.shape[0])
    return made(
        kind, ends, places, values.transpose(-2, -1) if values.dim() == 3 else values, shape
    )


@compressed("aten::mm", source=SPARSE_BLAS_IMPL_ADDMM_OUT_SPARSE_CSR)
def product(call: Call) -> Any:
    """Of a matrix and a dense one, either way round, with zeros to add to."""
    first, second = call.args
    dense = second if kind_of(first) else first
    return _product(call, first, second, dense.new_zeros((first.shape[0], second.shape[1])))


@compressed("aten::addmm", "aten::_sparse_addmm", source=SPARSE_BLAS_IMPL_ADDMM_OUT_SPARSE_CSR)
def sum_and_product(call: Call) -> Any:
    """The same, added to a dense matrix."""
    added, first, second = call.args[:3]
    return _product(call, first, second, added)


def _product(call: Call, first: Any, second: Any, added: Any) -> Any:
    matrix, dense = (first, second) if kind_of(first) else (second, first)
    parts = parts_of(call, matrix)
    if any(map(kind_of, (dense, added))) or dense.layout is not torch.strided:
        return NotImplemented
    if kind_of(matrix).startswith("b"):
        return NotImplemented  # a kernel of Triton or of cuSPARSE, by version and type
    result = dense.new_empty((first.shape[0], second.shape[1]))
    if kind_of(matrix) == ("csc" if matrix is first else "csr"):  # cuSPARSE gets rows
        turned_round = _flipped(matrix, parts)
        del turned_round
    return result


@compressed("aten::mv", source=SPARSE_BLAS_IMPL_ADDMM_OUT_SPARSE_CSR)
def product_with_vector(call: Call) -> Any:
    """Of a matrix and a dense vector."""
    matrix, vector = call.args
    parts, kind = parts_of(call, matrix), kind_of(matrix)
    if kind.startswith("b"):
        return NotImplemented
    result = vector.new_empty(matrix.shape[0])
    if kind == "csc":
        turned_round = _flipped(matrix, parts)
        del turned_round
    return result
