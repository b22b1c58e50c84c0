"""Losses: what the kernels hold for each element before they sum it up.

From PyTorch's ATen/native/Loss.cpp (mse_loss_out, smooth_l1_loss_out, huber_loss,
binary_cross_entropy_with_logits, soft_margin_loss) and ATen/native/cuda/Loss.cu
(binary_cross_entropy_out_cuda).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bfc.libraries import torch
from bfc_tools.predicting.rules.interface import Call, Release, Workspace, on_cuda
from bfc_tools.predicting.rules.operators import answer, before, file, kernel, mark, rule
from bfc_tools.predicting.rules.reductions import kernel_of, reduce
from bfc_tools.predicting.rules.tensors import Made, argument, broadcast, nbytes

LOSS_HUBER_LOSS = file("ATen/native/Loss.cpp", "huber_loss", read="2.6.0")
LOSS_BINARY_CROSS_ENTROPY_OUT_CUDA = file(
    "ATen/native/cuda/Loss.cu", "binary_cross_entropy_out_cuda", read="2.6.0"
)
MULTI_MARGIN_LOSS = file("ATen/native/cuda/MultiMarginLoss.cu", read="2.6.0")

#: The number of `reduction="none"`.
NONE, MEAN = 0, 1

mark(
    "composed",
    "aten::binary_cross_entropy_with_logits",
    "aten::soft_margin_loss",
    "aten::soft_margin_loss_backward",
    source=file("ATen/native/Loss.cpp", read="2.6.0"),
)


def _is_reduced(call: Call) -> bool:
    return int(argument(call, "reduction", MEAN)) != NONE


def _sum(call: Call, loss: Any) -> Iterator[Workspace | Release]:
    """The partial results of the mean or sum of all elements."""
    kernel = kernel_of("mean", loss, False)
    yield from reduce(call, loss, range(len(loss.shape)), kernel, int(loss.element_size()))


@kernel(
    "aten::mse_loss",
    "aten::smooth_l1_loss",
    source=file("ATen/native/Loss.cpp", "mse_loss", "smooth_l1_loss", read="2.6.0"),
)
def mean_of_differences(call: Call) -> Any:
    """Of a mean or sum, too, memory for all elements is allocated first, and kept: the result is
    only made smaller then (maybe_get_output in ATen/native/Loss.cpp)."""
    given, target = call.args[:2]
    if not on_cuda(given) or not _is_reduced(call):
        return call.func(*call.args, **call.kwargs)
    shape = broadcast([given.shape, target.shape])
    return given.new_empty(shape, dtype=torch.result_type(given, target)).as_strided((), ())


@rule(
    "aten::mse_loss",
    "aten::smooth_l1_loss",
    source=file("ATen/native/Loss.cpp", "mse_loss_out", "smooth_l1_loss_out", read="2.6.0"),
)
def differences(call: Call) -> Iterator[Workspace | Release]:
    """The loss of each element, once more."""
    if _is_reduced(call):
        loss = Made(call.result, broadcast([call.args[0].shape, call.args[1].shape]))
        yield Workspace(nbytes(loss), what="loss of each element")
        yield from _sum(call, loss)


@before("aten::huber_loss", source=LOSS_HUBER_LOSS)
def huber(call: Call) -> Iterator[Workspace | Release]:
    """The loss of each element, before it."""
    if _is_reduced(call):
        yield Workspace(nbytes(call.args[0]), what="loss of each element")


@rule("aten::huber_loss", source=LOSS_HUBER_LOSS)
def huber_mean(call: Call) -> Iterator[Workspace | Release]:
    """What its mean takes."""
    if _is_reduced(call):
        yield from _sum(call, Made(call.args[0], tuple(call.args[0].shape)))


@kernel("aten::binary_cross_entropy", source=LOSS_BINARY_CROSS_ENTROPY_OUT_CUDA)
def binary_cross_entropy(call: Call) -> Any:
    """The mean is written into the memory of the losses of all elements, and keeps all of it."""
    given = call.args[0]
    if not on_cuda(given) or not _is_reduced(call):
        return call.func(*call.args, **call.kwargs)
    return given.new_empty(given.shape).as_strided((), ())


@rule("aten::binary_cross_entropy", source=LOSS_BINARY_CROSS_ENTROPY_OUT_CUDA)
def binary_cross_entropy_mean(call: Call) -> Iterator[Workspace | Release]:
    """The mean itself, before it is written there."""
    if _is_reduced(call):
        loss = Made(call.args[0], tuple(call.args[0].shape))
        yield Workspace(int(loss.element_size()), what="mean")
        yield from _sum(call, loss)


@rule("aten::multi_margin_loss", source=MULTI_MARGIN_LOSS)
def multi_margin(call: Call) -> Iterator[Workspace | Release]:
    """The loss of each row, before they are summed up (cuda/MultiMarginLoss.cu)."""
    given = call.args[0]
    if _is_reduced(call) and len(given.shape) == 2:
        rows = Made(given, (int(given.shape[0]),))
        yield Workspace(nbytes(rows), what="loss of each row")
        yield from _sum(call, rows)


@answer(
    *("aten::multi_margin_loss_backward", "aten::multilabel_margin_loss_backward"),
    "aten::fractional_max_pool3d_backward",
    source=(
        MULTI_MARGIN_LOSS,
        file("ATen/native/cuda/MultiLabelMarginCriterion.cu", read="2.6.0"),
        file("ATen/native/cuda/FractionalMaxPool3d.cu", read="2.6.0"),
    ),
)
def margin_backward(call: Call, run: Callable[[], Any]) -> Any:
    """A gradient of the size of the input, which PyTorch says of no fake tensor."""
    return call.args[1].new_empty(call.args[1].shape)
