"""Workspaces of cuBLAS and cublasLt.

Sources, of PyTorch 2.13: aten/src/ATen/cuda/CublasHandlePool.cpp (`parseChosenWorkspaceSize`,
`getNewWorkspace`), aten/src/ATen/native/cuda/Blas.cpp (`addmm_out_cuda_impl`),
aten/src/ATen/cuda/CUDABlas.cpp (`gemm_and_bias`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from bfc.predicting.rules.interface import Call, Workspace, rule

#: The capabilities on which the default workspace is 32 MiB.
_LARGE = {9: (2, 0), 10: (2, 8), 12: (2, 8)}


def workspace_bytes(call: Call) -> int:
    """The size of the workspace of one handle and stream."""
    chosen = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    pairs = re.findall(r":(\d+):(\d+)", chosen)
    if pairs:
        return sum(int(size) * 1024 * int(count) for size, count in pairs)
    since = _LARGE.get(call.gpu.cc[0])
    if since is not None and call.torch_version >= since:
        return 4096 * 8 * 1024
    return 4096 * 2 * 1024 + 16 * 8 * 1024


def kept(call: Call) -> Workspace:
    """The workspace of the handle of this thread, on this stream."""
    return Workspace(
        workspace_bytes(call), ("cublas", call.thread, call.stream), "cuBLAS workspace"
    )


@rule("aten::mm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::addmv", "aten::dot")
@rule("aten::addbmm", "aten::vdot", "aten::baddbmm_")
def gemm(call: Call) -> Iterator[Workspace]:
    yield kept(call)


@rule("aten::addmm", "aten::_addmm_activation", "aten::addmm_")
def addmm(call: Call) -> Iterator[Workspace]:
    """A bias of one dimension goes to cublasLt, whose workspace is that of cuBLAS since 2.7."""
    bias, a, b = call.args[:3]
    with_bias = bias.dim() == 1 and bias.is_contiguous() and min(*a.shape, *b.shape) > 1
    if with_bias and call.torch_version < (2, 7):
        yield Workspace(1 << 20, what="cublasLt workspace")
    else:
        yield kept(call)
