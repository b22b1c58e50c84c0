"""Which kernel `scaled_dot_product_attention` takes on a GPU. A build without CUDA takes the one
that holds all scores, whatever the device.

From PyTorch's ATen/native/transformers/cuda/sdp_utils.cpp (the order, and the conditions of each
kernel) and sdp_utils_cpp.h.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from bfc_tools.predicting.devices import GPU
from bfc_tools.predicting.releases import TorchRelease
from bfc_tools.predicting.rules.tensors import type_name

HALVES = ("float16", "bfloat16")
LARGEST_HEAD = 256


class Backend(IntEnum):
    """The numbers of `torch.nn.attention.SDPBackend`."""

    MATH = 0
    FLASH = 1
    EFFICIENT = 2
    CUDNN = 3


@dataclass(frozen=True)
class Attention:
    """A call of `scaled_dot_product_attention`, after autocast."""

    query: Any
    key: Any
    value: Any
    mask: Any  # None without one
    dropout: float  # the probability
    causal: bool  # `is_causal`
    gqa: bool  # `enable_gqa`
    gradient: bool  # whether a gradient will be asked for

    @property
    def head(self) -> int:
        """The size of a head."""
        return int(self.query.shape[-1])

    @property
    def dims(self) -> set[int]:
        """How many dimensions the query, the keys and the values have."""
        return {len(one.shape) for one in (self.query, self.key, self.value)}

    def with_batch(self) -> Attention:
        """The same in a batch of one."""
        mask = self.mask
        while mask is not None and len(mask.shape) < 4:
            mask = mask.unsqueeze(0)
        query, key, value = (one.unsqueeze(0) for one in (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value, mask=mask)

    @property
    def half(self) -> bool:
        """Whether the elements have 16 bits."""
        return type_name(self.query) in HALVES


def order(gpu: GPU, release: TorchRelease) -> list[Backend]:
    """The kernels in the order in which they are asked."""
    plain = [Backend.FLASH, Backend.EFFICIENT, Backend.MATH, Backend.CUDNN]
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") in ("1", "true", "TRUE"):
        return plain
    minors = range(10) if release.prefers_cudnn_on_all else (0, 3)
    preferred = gpu.cc[0] in (9, 10) and gpu.cc[1] in minors
    if preferred and release.cudnn > 91500:
        return [Backend.CUDNN, Backend.FLASH, Backend.EFFICIENT, Backend.MATH]
    return plain


def _dense(call: Attention, release: TorchRelease, *, singleton: bool, groups: bool = True) -> bool:
    """Four dimensions, the same batch and heads, no empty sequence, heads without gaps; where the
    kernel knows groups, several heads may share keys and values."""
    tensors = (call.query, call.key, call.value)
    if any(len(tensor.shape) != 4 for tensor in tensors):
        return False
    if len({tensor.shape[0] for tensor in tensors}) > 1 or not _heads(call, release, groups):
        return False
    if any(0 in tensor.shape for tensor in tensors):
        return False
    if len({tensor.dtype for tensor in tensors}) > 1:
        return False
    mask = [] if call.mask is None else [call.mask]
    return all(
        tensor.stride()[-1] == 1 or (singleton and tensor.shape[-1] == 1)
        for tensor in (*tensors, *mask)
    )


def _heads(call: Attention, release: TorchRelease, groups: bool) -> bool:
    query, key, value = (tensor.shape[1] for tensor in (call.query, call.key, call.value))
    if call.gqa and groups:
        return bool(key == value and query % key == 0)
    alone = release.shares_one_head and key == value == 1
    return bool(alone or query == key == value)


def flash(call: Attention, gpu: GPU, release: TorchRelease) -> bool:
    """FlashAttention: 16 bits, no mask, heads of up to 256, and compute capability 8.0."""
    if call.mask is not None or not call.half or not ((8, 0) <= gpu.cc <= (12, 1)):
        return False
    heads = {int(tensor.shape[-1]) for tensor in (call.query, call.key, call.value)}
    if len(heads) > 1 or call.head > LARGEST_HEAD or not _dense(call, release, singleton=True):
        return False
    if call.causal and call.query.shape[-2] != call.key.shape[-2]:
        return False
    little_memory = (8, 6) <= gpu.cc <= (8, 9) or (12, 0) <= gpu.cc <= (12, 1)
    if call.gradient and little_memory:
        return call.head <= 192 or (call.dropout == 0 and call.head > 224)
    return True


def alignment(gpu: GPU, half: bool) -> int:
    """What the size of a head is a multiple of, for the efficient kernel."""
    if gpu.cc[0] >= 8 or (gpu.cc[0] == 7 and half):
        return 8 if half else 4
    return 1


def efficient(call: Attention, gpu: GPU, release: TorchRelease) -> bool:
    """The memory-efficient kernel: 16 or 32 bits, with a mask or without."""
    names = ("float16", "float32", "bfloat16")[: 3 if gpu.cc[0] >= 8 else 2]
    if type_name(call.query) not in names or not ((5, 0) <= gpu.cc <= (12, 1)):
        return False
    if call.query.shape[-1] != call.key.shape[-1]:
        return False
    step = alignment(gpu, call.half)
    if any(int(tensor.shape[-1]) % step for tensor in (call.query, call.value)):
        return False
    return _dense(call, release, singleton=False, groups=release.shares_heads_efficiently)


def cudnn(call: Attention, gpu: GPU, release: TorchRelease) -> bool:
    """cuDNN's kernel: 16 bits, heads of up to 128, on newer releases 256, and no mask that learns,
    also where no gradient is asked for."""
    version = release.cudnn
    if call.mask is not None and call.mask.requires_grad:
        return False
    if (
        not call.half
        or not ((8, 0) <= gpu.cc <= (12, 1))
        or not _dense(call, release, singleton=True)
    ):
        return False
    if call.dropout and (91100 < version < 91400 or _fine(call, release)):
        return False
    batch, heads, queries, head = call.query.shape
    keys, value_head = call.key.shape[2], call.value.shape[3]
    if max(batch, heads) > 65535 or keys == 1 or (call.dropout and queries == 1):
        return False
    if head % 8 or value_head % 8:
        return False
    if release.gives_cudnn_large_heads and version >= 91000 and gpu.cc == (9, 0):
        return bool(max(head, value_head) <= LARGEST_HEAD)
    return _cudnn_heads(call, (int(head), int(value_head)), gpu, version)


def _fine(call: Attention, release: TorchRelease) -> bool:
    """Whether a probability is finer than the sixteenths that later releases leave to cuDNN
    (check_cudnn_dropout)."""
    return release.keeps_fine_dropout and bool(call.dropout * 16 % 1)


def _cudnn_heads(call: Attention, heads: tuple[int, int], gpu: GPU, version: int) -> bool:
    large = gpu.cc == (9, 0) or gpu.cc[0] == 10
    limit = 128
    if large and version > 92200:
        limit = LARGEST_HEAD
    elif large and heads == (192, 128):
        limit = 192
    if max(heads) > limit:
        return False
    if call.gradient and limit == LARGEST_HEAD:
        return max(heads) <= 128 or heads in ((192, 128), (256, 256))
    return True


CONDITIONS: dict[Backend, Callable[[Attention, GPU, TorchRelease], bool]] = {
    Backend.FLASH: flash,
    Backend.EFFICIENT: efficient,
    Backend.CUDNN: cudnn,
    Backend.MATH: lambda call, gpu, release: True,
}


def as_asked(call: Attention, release: TorchRelease) -> Attention:
    """The call that kernels other than the plain one get: a batch is made where no gradient is
    noted, so that none seems to be asked for."""
    return call.with_batch() if release.attends_without_batch and call.dims == {3} else call


def choose(
    call: Attention,
    gpu: GPU,
    release: TorchRelease,
    enabled: Callable[[Backend], bool] = lambda backend: True,
) -> Backend | None:
    """The kernel that the GPU takes, by its compute capability and the release of PyTorch, with its
    own cuDNN; None if none is left. `enabled` says whether the program allows a kernel, as
    `torch.nn.attention.sdpa_kernel` does."""
    given = as_asked(call, release)
    if given is not call:
        mask = None if given.mask is None else given.mask.detach()
        given = replace(given, gradient=False, mask=mask)
    for backend in order(gpu, release):
        if enabled(backend) and CONDITIONS[backend](given, gpu, release):
            return backend
    return None
