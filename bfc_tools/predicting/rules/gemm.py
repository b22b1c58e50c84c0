"""Products of matrices: cuBLAS and cuBLASLt.

From PyTorch's ATen/cuda/CublasHandlePool.cpp (the size, and one workspace for each handle and
stream, kept, or one for each call) and
ATen/cuda/CUDABlas.cpp, ATen/native/cuda/Blas.cpp (when cuBLASLt is called), and
ATen/native/cuda/cuBlasCommonArgs.h (which matrices are copied).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from bfc.libraries import torch
from bfc_tools.predicting.releases import TorchRelease
from bfc_tools.predicting.rules.interface import Call, Release, Workspace
from bfc_tools.predicting.rules.operators import file, kernel, mark, rule
from bfc_tools.predicting.rules.tensors import argument, div_up, is_contiguous, nbytes, operator

BLAS = file("ATen/native/cuda/Blas.cpp", read="2.6.0")
CUDABLAS = file("ATen/cuda/CUDABlas.cpp", read="2.6.0")

#: A product of 8-bit numbers in 32 bits, as torchao calls it, is `_int_mm`.
mark(
    "composed",
    "higher_order::out_dtype",
    source=file("torch/_higher_order_ops/out_dtype.py", read="2.15.0"),
)

KIB = 1 << 10
#: cuBLASLt's own workspace takes so much unless CUBLASLT_WORKSPACE_SIZE says otherwise.
LT_KIB = 1024


def workspace_bytes(
    capability: tuple[int, int], release: TorchRelease, config: str | None = None
) -> int:
    """The workspace of one cuBLAS handle on one stream, in bytes. `config` is the text of
    CUBLAS_WORKSPACE_CONFIG, such as ":4096:8".

    >>> from bfc_tools.predicting.releases import NEWEST
    >>> workspace_bytes((8, 0), NEWEST), workspace_bytes((9, 0), NEWEST, ":16:8")
    (8519680, 131072)
    """
    large = capability[0] in release.large_workspaces
    default = 32768 * KIB if large else (2 * 4096 + 8 * 16) * KIB
    pairs = re.findall(r":([0-9]+):([0-9]+)", config or "")
    return sum(int(size) * int(count) for size, count in pairs) * KIB if pairs else default


def _is_set(variable: str, default: bool) -> bool:
    """What a variable of PyTorch's says, as c10/util/env.h reads it."""
    return {"1": True, "0": False}.get(os.environ.get(variable, ""), default)


def cached(release: TorchRelease) -> bool:
    """Whether workspaces are kept."""
    return _is_set("TORCH_CUBLAS_WORKSPACE_CACHE", False) or release.keeps_workspaces


def unified(release: TorchRelease) -> bool:
    """Whether cuBLASLt uses cuBLAS's workspace."""
    default = release.unifies_workspaces
    return cached(release) and _is_set("TORCH_CUBLASLT_UNIFIED_WORKSPACE", default)


def _workspace(call: Call, size: int, library: str) -> Workspace:
    place = library.lower(), call.thread, call.stream
    key = place if cached(call.release) else None
    return Workspace(size, key, f"{library} workspace")


def cublas(call: Call) -> Workspace:
    """The workspace of the handle of this thread and stream."""
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    return _workspace(call, workspace_bytes(call.gpu.cc, call.release, config), "cuBLAS")


def _lt(call: Call) -> Iterator[Workspace | Release]:
    """The workspace of cuBLASLt, whose handle is one of cuBLAS: with that comes its workspace."""
    if cached(call.release):
        yield cublas(call)
    if not unified(call.release):
        size = int(os.environ.get("CUBLASLT_WORKSPACE_SIZE", LT_KIB)) * KIB
        yield _workspace(call, size, "cuBLASLt")


@rule(
    *("aten::mm", "aten::bmm", "aten::baddbmm", "aten::baddbmm_", "aten::addbmm", "aten::mv"),
    *("aten::addmv", "aten::addmv_", "aten::dot", "aten::vdot", "aten::_grouped_mm"),
    source=(
        file("ATen/cuda/CublasHandlePool.cpp", read="2.6.0"),
        BLAS,
        file("ATen/native/cuda/cuBlasCommonArgs.h", read="2.15.0"),
    ),
    seen="19 recordings of programs",
)
def product(call: Call) -> Iterator[Workspace | Release]:
    """cuBLAS, whose workspace belongs to the handle: one for each thread and stream."""
    yield from _matrices(call)
    yield cublas(call)


@kernel(
    "aten::_grouped_mm",
    source=file("ATen/native/GroupedMMUtils.h", "create_grouped_gemm_output_tensor", read="2.15.0"),
)
def grouped(call: Call) -> Any:
    """A product of each group of rows; the rows of the result are padded to 16 bytes. From
    PyTorch's ATen/native/GroupedMMUtils.h (create_grouped_gemm_output_tensor)."""
    left, right, groups = call.args[0], call.args[1], argument(call, "offs")
    flat = [len(one.shape) == 2 for one in (left, right)]
    size = [left.shape[-2], right.shape[-1]]
    if flat[0] == flat[1]:
        size.insert(0, groups.shape[0] if flat[0] else left.shape[0])
    step = 16 // int(left.element_size())
    padded = div_up(size[-1], step) * step
    strides = [size[-2] * padded, padded, 1][-len(size) :]
    return torch.empty_strided(size, strides, dtype=left.dtype, device=left.device)


#: The arguments that are matrices, or batches of them.
MATRICES = {"mm": (0, 1), "bmm": (0, 1), "baddbmm": (1, 2), "baddbmm_": (1, 2), "addmm": (1, 2)}


@kernel(
    *("aten::addmm.dtype", "aten::baddbmm.dtype", "aten::mm.dtype_out", "aten::bmm.dtype_out"),
    *("aten::addmm.dtype_out", "aten::baddbmm.dtype_out"),
    source=BLAS,
)
def of_another_type(call: Call) -> Any:
    """A product with an `out_dtype`, which PyTorch takes for beta with fake tensors."""
    if "out" in call.kwargs:
        return call.kwargs["out"]
    left, right = (call.args[at] for at in MATRICES[operator(call)])
    return left.new_empty((*left.shape[:-1], right.shape[-1]), dtype=call.named()["out_dtype"])


def _matrices(call: Call) -> Iterator[Workspace | Release]:
    """Copies of matrices of which neither rows nor columns lie without gaps between elements."""
    for index in MATRICES.get(operator(call), ()):
        tensor = call.args[index]
        if not _read_as_it_is(tensor):
            yield Workspace(nbytes(tensor), what="matrix in order")
        elif _is_conjugate(tensor) and int(tensor.stride()[-2]) != 1:
            yield Workspace(nbytes(tensor), what="conjugates")


def _is_conjugate(tensor: Any) -> bool:
    """Whether a view stands for the conjugates of its numbers: cuBLAS takes columns of them as they
    are, and no rows."""
    return bool(getattr(tensor, "is_conj", bool)())


def _read_as_it_is(tensor: Any) -> bool:
    rows, columns = map(int, tensor.shape[-2:])
    down, along = map(int, tensor.stride()[-2:])
    if len(tensor.shape) == 2 and (is_contiguous(tensor) or is_contiguous(_Turned(tensor))):
        return True
    return (down == 1 and along >= max(1, rows)) or (along == 1 and down >= max(1, columns))


class _Turned:
    """A matrix with its rows as columns."""

    def __init__(self, matrix: Any) -> None:
        self.shape, self._strides = matrix.shape[::-1], matrix.stride()[::-1]

    def stride(self) -> tuple[int, ...]:
        """Of the columns, and the rows."""
        return tuple(self._strides)


@rule("aten::_scaled_mm", "aten::_int_mm", "aten::_scaled_grouped_mm", source=CUDABLAS)
def scaled_product(call: Call) -> Iterator[Workspace | Release]:
    """Products of 8-bit numbers, which only cuBLASLt has."""
    yield from _lt(call)


@rule(
    "aten::addmm",
    "aten::addmm_",
    "aten::_addmm_activation",
    source=(CUDABLAS, BLAS),
    seen="an H100 and an H200 with PyTorch 2.11",
)
def addmm(call: Call) -> Iterator[Workspace | Release]:
    """A product with a bias: cuBLASLt adds a row of it to a result that is large enough, and whose
    rows lie without gaps: Inductor may write into one that has them."""
    bias, left, right = call.args[:3]
    row = len(bias.shape) == 1 and bias.shape[0] == right.shape[1] and is_contiguous(bias)
    sizes = right.shape if call.release.adds_bias_to_one_row else (*left.shape, *right.shape)
    large = all(size > 1 for size in sizes)
    yield from _matrices(call)
    plain = argument(call, "beta", 1) == 1 and argument(call, "alpha", 1) == 1
    out = call.kwargs.get("out")
    if row and large and plain and (out is None or is_contiguous(out)):
        yield from _lt(call)
    else:
        yield cublas(call)
