"""What operators return of which PyTorch says nothing for fake tensors, or of which the size of a
result depends on values: at most all.

From PyTorch's ATen/native/cuda/LossCTC.cu (ctc_loss_gpu_template and its gradient),
ATen/native/SpectralOps.cpp (istft), and
ATen/native/quantized/FakeQuantPerTensorAffine.cpp and FakeQuantPerChannelAffine.cpp, and
ATen/native/cuda/Distributions.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bfc.libraries import torch
from bfc_tools.predicting.rules.interface import Call, Release, Workspace, on_cuda
from bfc_tools.predicting.rules.operators import around, composition, file, kernel, rule
from bfc_tools.predicting.rules.stand_ins import standing_in
from bfc_tools.predicting.rules.tensors import argument, nbytes

DISTRIBUTIONS = file("ATen/native/cuda/Distributions.cpp", read="2.6.0")

#: The number of `reduction="mean"`.
MEAN = 1


@kernel(
    "aten::_unsafe_view", source=file("ATen/native/TensorShape.cpp", "_unsafe_view", read="2.6.0")
)
def unsafe_view(call: Call) -> Any:
    """As `view` (ATen/native/TensorShape.cpp, _unsafe_view), which PyTorch's fake tensors know
    without asking for the shape again."""
    return torch.ops.aten.view.default(*call.args)


@kernel(
    "aten::_ctc_loss",
    source=file("ATen/native/cuda/LossCTC.cu", "ctc_loss_gpu_template", read="2.6.0"),
)
def ctc_loss(call: Call) -> Any:
    """The losses, and the probabilities of all prefixes of the longest target. Lengths, and where
    targets begin, are copied to the device first."""
    scores, targets = call.args[0], call.args[1]
    steps, batch, _ = scores.shape
    longest = targets.shape[1] if len(targets.shape) == 2 else -(-targets.shape[0] // batch)
    call.assume("the lengths of targets: all as long as the longest", int(longest))
    with call.recording:
        held = _lengths(scores)
        prefixes = scores.new_empty((batch, steps, 2 * longest + 1))
        losses = scores.new_empty(batch)
        del held
    return losses, prefixes


def _lengths(scores: Any) -> list[Any]:
    return [scores.new_empty(scores.shape[1], dtype=torch.int64) for _ in range(3)]


@kernel(
    "aten::_ctc_loss_backward",
    source=file("ATen/native/cuda/LossCTC.cu", "ctc_loss_backward_gpu_template", read="2.6.0"),
)
def ctc_loss_gradient(call: Call) -> Any:
    """The gradient of the scores, and the probabilities of all suffixes. In large problems those of
    the blanks, which are each second place, are summed up first."""
    scores, prefixes = call.args[1], argument(call, "log_alpha")
    steps, batch, classes = scores.shape
    with call.recording:
        held = [*_lengths(scores), torch.empty_like(prefixes)]
        gradient = torch.empty_like(scores)
        if 2 * steps + 24 * batch // 10 + 2 * classes // 10 > 450:
            both = prefixes[..., ::2] + held[-1][..., ::2]
            blanks = torch.logsumexp(both, 2, True)
            del blanks, both
        del held
    return gradient


@kernel(
    *("aten::_sample_dirichlet", "aten::_dirichlet_grad", "aten::binomial"),
    *("aten::_standard_gamma", "aten::_standard_gamma_grad"),
    source=DISTRIBUTIONS,
)
def drawn(call: Call) -> Any:
    """A number for each parameter (ATen/native/cuda/Distributions.cpp)."""
    return torch.empty(call.args[0].shape, dtype=call.args[0].dtype, device=call.args[0].device)


@rule("aten::_sample_dirichlet", source=DISTRIBUTIONS)
def gammas(call: Call) -> Iterator[Workspace | Release]:
    """Drawn first, and then divided by their sum."""
    yield Workspace(nbytes(call.result), what="numbers of a gamma distribution")


#: Boxes that torchvision compares at once, and the bytes of the bits of as many.
BOXES = 64


@composition(
    "torchvision::nms",
    source=file("pytorch/vision: torchvision/csrc/ops/cuda/nms_kernel.cu", read="0.21.0"),
)
def boxes(boxes: Any, scores: Any, threshold: float) -> Any:
    """Boxes that do not overlap: at most all. Each is compared with each, and the answers are bits
    (torchvision's ops/cuda/nms_kernel.cu)."""
    order = scores.sort(stable=True, dim=0, descending=True)[1]
    in_order = boxes.index_select(0, order)
    count = int(boxes.shape[0])
    bits = torch.empty(count * -(-count // BOXES), dtype=torch.int64, device=boxes.device)
    keep = torch.zeros(count, dtype=torch.bool, device=boxes.device)
    found = order.masked_select(keep)
    del in_order, bits
    return found


#: From so many labels of one target on cuDNN is not asked.
LONGEST = 256
#: The number of `reduction="sum"`.
SUM = 2


@around(source=file("ATen/native/LossCTC.cpp", read="2.6.0"))
@contextmanager
def losses_of_sequences(recorder: Any) -> Iterator[None]:
    """`torch.ctc_loss`, which for subclasses of tensors keeps the lengths on the device
    (ATen/native/LossCTC.cpp)."""
    from torch._subclasses.fake_tensor import FakeTensor

    build = torch.ctc_loss

    def loss(
        log_probs: Any,  # as PyTorch calls it
        targets: Any,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: int = 1,
        zero_infinity: bool = False,
    ) -> Any:
        lengths = input_lengths, target_lengths
        if not isinstance(log_probs, FakeTensor):
            return build(log_probs, targets, *lengths, blank, reduction, zero_infinity)
        if blank == 0 and _are_for_cudnn(log_probs, targets, *lengths):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                "cuda:0 and cpu! (cuDNN takes targets on the host if lengths are lists, else on "
                "the device)"
            )
        lengths = tuple(map(torch.as_tensor, lengths))
        batched = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
        moved = targets.to(log_probs.device, torch.int64)
        losses = torch.ops.aten._ctc_loss.Tensor(batched, moved, *lengths, blank, zero_infinity)[0]
        if zero_infinity:
            losses = torch.where(losses == math.inf, losses.new_zeros(()), losses)
        if reduction == MEAN:
            counts = torch.empty_like(losses).clamp_min(1)
            return (losses / counts).mean()
        if reduction == SUM:
            return losses.sum()
        return losses if log_probs.dim() == 3 else losses.squeeze(0)

    with standing_in("ctc_loss", torch, of=lambda _: loss):
        yield


def _are_for_cudnn(scores: Any, targets: Any, *lengths: Any) -> bool:
    """Whether cuDNN would be asked, with targets on the host and lengths in tensors."""
    tensors = (targets, *lengths)
    if not all(isinstance(one, torch.Tensor) and one.dtype == torch.int32 for one in tensors):
        return False
    longest = -(-targets.numel() // max(lengths[1].numel(), 1))
    alike = scores.dtype == torch.float32 and scores.dim() == 3 and targets.dim() == 1
    return alike and longest < LONGEST and on_cuda(scores) and not on_cuda(targets)


@kernel(
    "aten::fake_quantize_per_tensor_affine_cachemask",
    "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "aten::fake_quantize_per_channel_affine_cachemask",
    source=(
        file("ATen/native/quantized/FakeQuantPerTensorAffine.cpp", read="2.6.0"),
        file("ATen/native/quantized/FakeQuantPerChannelAffine.cpp", read="2.6.0"),
    ),
)
def fake_quantized(call: Call) -> Any:
    """The rounded numbers, and a mask of those that were in range."""
    tensor = call.args[0]
    return torch.empty_like(tensor), torch.empty_like(tensor, dtype=torch.bool)


@around(source=file("ATen/native/SpectralOps.cpp", "istft", read="2.6.0"))
@contextmanager
def waves(recorder: Any) -> Iterator[None]:
    """`torch.istft`, which reads in C++ whether its windows leave gaps."""
    build = torch.istft

    def istft(
        input: Any,  # as PyTorch calls it
        n_fft: int,
        hop_length: int | None = None,
        win_length: int | None = None,
        window: Any = None,
        center: bool = True,
        normalized: bool = False,
        onesided: bool | None = None,
        length: int | None = None,
        return_complex: bool = False,
    ) -> Any:
        if not on_cuda(input):
            return build(
                *(input, n_fft, hop_length, win_length, window, center, normalized),
                *(onesided, length, return_complex),
            )
        hop = n_fft // 4 if hop_length is None else hop_length
        if window is None:
            window = torch.ones(win_length or n_fft, device=input.device)
        back = torch.fft.ifft if return_complex else torch.fft.irfft
        return _overlapped(input, n_fft, hop, window, center, length, back)

    with standing_in("istft", torch, of=lambda _: istft):  # which the method calls, too
        yield


def _overlapped(
    spectrum: Any, size: int, hop: int, window: Any, center: bool, length: int | None, back: Any
) -> Any:
    """The frames back in time, added up where they overlap, and divided by their windows."""
    batched = spectrum.unsqueeze(0) if spectrum.dim() == 2 else spectrum
    window = torch.nn.functional.pad(window, (0, size - window.shape[0]))
    frames = back(batched.transpose(1, 2), n=size, dim=2) * window
    count, total = frames.shape[1], size + hop * (frames.shape[1] - 1)
    squares = window.pow(2).expand(1, count, size)
    wave, envelope = (
        torch.ops.aten.unfold_backward(one, (one.shape[0], total), 1, size, hop)
        for one in (frames, squares)
    )
    begin = size // 2 if center else 0
    end = total - begin if length is None else min(begin + length, total)
    wave, envelope = wave[:, begin:end], envelope[:, begin:end]
    envelope.abs().min()
    wave = wave / envelope
    if length is not None and length > wave.shape[1]:
        wave = torch.nn.functional.pad(wave, (0, length - wave.shape[1]))
    return wave.squeeze(0) if spectrum.dim() == 2 else wave
