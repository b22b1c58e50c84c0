"""`scaled_dot_product_attention` as the GPU would run it, in place of what the build would take.

From PyTorch's ATen/native/transformers/attention.cpp: heads are padded to a multiple of 8, masks
are converted, and what each kernel is called with. From torch/nn/attention/bias.py: causal biases,
which have no memory, and ask which kernels can be used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from bfc.libraries import torch
from bfc_tools.predicting.rules.interface import on_cuda
from bfc_tools.predicting.rules.operators import around, file
from bfc_tools.predicting.rules.sdpa_choice import Attention, Backend, as_asked, choose
from bfc_tools.predicting.rules.stand_ins import standing_in

#: The efficient kernel reads masks in steps of so many elements.
MASK_STEP = 8
#: The dimensions of masks.
MASKS = (2, 3, 4)


@around(
    source=(
        file("ATen/native/transformers/attention.cpp", read="2.6.0"),
        file("ATen/native/transformers/cuda/sdp_utils.cpp", read="2.6.0"),
        file("ATen/native/transformers/sdp_utils_cpp.h", read="2.15.0"),
    ),
    seen="PyTorch 2.15.0 on an emulated driver: 600 calls on each of six compute capabilities",
)
@contextmanager
def replaced(recorder: Any) -> Iterator[None]:
    """While a prediction runs, the function of `torch.nn.functional` asks for the GPU's choice."""
    import torch.nn.functional as functional
    from torch.nn.attention.bias import CausalBias

    build = functional.scaled_dot_product_attention

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        given = query, key, value, attn_mask, dropout_p, is_causal
        if isinstance(attn_mask, CausalBias):
            return attn_mask._dispatch(*given, scale=scale, enable_gqa=enable_gqa)
        if not on_cuda(query) or query.is_nested:
            return build(*given, scale=scale, enable_gqa=enable_gqa)
        call = Attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, False)
        return _run(_cast(call), scale, recorder)

    places = functional, torch._C._nn
    with standing_in("scaled_dot_product_attention", *places, of=lambda _: attention):
        yield


@around(source=file("torch/nn/attention/bias.py", read="2.15.0"))
@contextmanager
def biases(recorder: Any) -> Iterator[None]:
    """A causal bias is a tensor of its own class, and asks for what the GPU can do."""
    import torch.nn.attention.bias as bias
    from torch.utils._python_dispatch import _disable_current_modes

    def made(cls: Any, *args: Any) -> Any:
        with _disable_current_modes():
            return torch.Tensor.__new__(cls)

    def can_use(backend: Backend) -> Callable[..., bool]:
        def can(params: Any, debug: bool = False) -> bool:
            given = params.query, params.key, params.value, None, params.dropout, params.is_causal
            gradient = torch.is_grad_enabled() and any(one.requires_grad for one in given[:3])
            call = Attention(*given, params.enable_gqa, gradient)
            only = choose(
                call, recorder.gpu, recorder.release, lambda one: one == backend and _enabled(one)
            )
            return only == backend

        return can

    with (
        patch.object(bias.CausalBias, "__new__", made, create=True),
        patch.object(bias, "can_use_flash_attention", can_use(Backend.FLASH)),
        patch.object(bias, "can_use_efficient_attention", can_use(Backend.EFFICIENT)),
    ):
        yield


def _cast(call: Attention) -> Attention:
    """What autocast makes of the arguments, and whether a gradient will be asked for."""
    tensors = [call.query, call.key, call.value, call.mask]
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        tensors = [
            tensor.to(dtype)
            if tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
            else tensor
            for tensor in tensors
        ]
    query, key, value, mask = tensors
    gradient = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
    return replace(call, query=query, key=key, value=value, mask=mask, gradient=gradient)


def _enabled(backend: Backend) -> bool:
    """Whether the program allows a kernel."""
    import torch.backends.cuda as cuda

    asks: dict[Backend, Callable[[], bool]] = {
        Backend.FLASH: cuda.flash_sdp_enabled,
        Backend.EFFICIENT: cuda.mem_efficient_sdp_enabled,
        Backend.MATH: cuda.math_sdp_enabled,
        Backend.CUDNN: cuda.cudnn_sdp_enabled,
    }
    return bool(asks[backend]())


def _run(call: Attention, scale: float | None, recorder: Any) -> Any:
    gpu, release = recorder.gpu, recorder.release
    backend = choose(call, gpu, release, _enabled)
    if backend is None:
        raise RuntimeError("No available kernel. Aborting execution.")
    given = call if backend == Backend.MATH else as_asked(call, release)
    found = _by(backend, given, scale, recorder)
    return found if given is call else found.squeeze(0)


def _by(backend: Backend, call: Attention, scale: float | None, recorder: Any) -> Any:
    aten = torch.ops.aten
    query, key, value, causal = call.query, call.key, call.value, call.causal
    if backend == Backend.FLASH:
        return _flash(call, scale)
    mask = _float_mask(call)
    if backend == Backend.CUDNN:
        return _first(
            aten._scaled_dot_product_cudnn_attention(
                query, key, value, mask, call.gradient, call.dropout, causal, False, scale=scale
            )
        )
    if backend == Backend.EFFICIENT:
        mask = None if mask is None else _aligned(mask, call)
        return _first(
            aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, call.gradient, call.dropout, causal, scale=scale
            )
        )
    before, recorder.adds_in_place = recorder.adds_in_place, MASKS
    try:
        return _first(
            aten._scaled_dot_product_attention_math(
                *(query, key, value, mask, call.dropout, causal, None),
                scale=scale,
                enable_gqa=call.gqa,
            )
        )
    finally:
        recorder.adds_in_place = before


def _first(results: Any) -> Any:
    """The first of several results. The others go in their order, as a tuple of C++ lets them go:
    one of Python's begins with the last."""
    kept = list(results)
    del results
    first = kept.pop(0)
    while kept:
        del kept[0]
    return first


def _flash(call: Attention, scale: float | None) -> Any:
    import torch.nn.functional as functional

    head = call.head
    padded = [
        functional.pad(tensor, (0, -head % 8)) if head % 8 else tensor
        for tensor in (call.query, call.key, call.value)
    ]
    found = _first(
        torch.ops.aten._scaled_dot_product_flash_attention(
            *padded,
            call.dropout,
            call.causal,
            False,
            scale=1 / math.sqrt(head) if scale is None else scale,
        )
    )
    return found[..., :head] if head % 8 else found


def _float_mask(call: Attention) -> Any:
    """A mask of booleans as numbers that are added."""
    mask = call.mask
    if mask is None or mask.dtype != torch.bool:
        return mask
    lowest = torch.scalar_tensor(-math.inf, dtype=call.query.dtype, device=mask.device)
    return torch.where(mask, 0.0, lowest)


def _aligned(mask: Any, call: Attention) -> Any:
    """A mask for each head, in memory that is padded to what the kernel reads at once."""
    import torch.nn.functional as functional

    last = int(mask.shape[-1])
    if mask.stride()[-1] != 1 or any(stride % MASK_STEP for stride in mask.stride()[:-1]):
        mask = functional.pad(mask, (0, MASK_STEP - last % MASK_STEP))[..., :last]
    batch, heads, queries, _ = call.query.shape
    return mask.expand(batch, heads, queries, call.key.shape[2])
