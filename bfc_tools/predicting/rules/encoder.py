"""The layers of `nn.TransformerEncoder` and `nn.MultiheadAttention` in inference, each of which is
one operator, as its kernel for CUDA computes it.

From PyTorch's ATen/native/transformers/transformer.cpp (transformer_encoder_layer_forward),
ATen/native/transformers/cuda/attention.cu (native_multi_head_attention_cuda), and, where padding is
taken out of a batch, ATen/native/nested/NestedTensorMath.cpp (NestedTensor_nested_tensor_from_mask)
and ATen/native/nested/cuda/NestedTensorTransformerFunctions.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bfc.libraries import torch
from bfc_tools.predicting.rules.interface import Call
from bfc_tools.predicting.rules.operators import answer, around, composition, file
from bfc_tools.predicting.rules.tensors import argument


class _Nested:
    """How many sequences there are in the batch whose padding was taken out; 0 if there is none.
    Its rows lie one after the other, in one sequence: nested tensors cannot be fake."""

    sequences = 0


@around(seen="two predictions in a process, in the tests")
@contextmanager
def no_batch_of_another(recorder: Any) -> Iterator[None]:
    """A prediction that failed inside an encoder leaves nothing to the next one."""
    _Nested.sequences = 0
    yield


@answer(
    "aten::_nested_tensor_from_mask_left_aligned",
    source=file("ATen/native/nested/NestedTensorMath.cpp", read="2.6.0"),
)
def left_aligned(call: Call, run: Callable[..., Any]) -> bool:
    """Padding is at the end of each sequence, as it is nearly always."""
    call.assume("padding: at the end of each sequence", True)
    with call.recording:
        ordered, pad, ends = _lengths(call.args[1])
        alike = torch.ops.aten.equal(ordered.select(1, -1), ends)
        del ends, pad, ordered
    return bool(alike)


def _lengths(mask: Any) -> tuple[Any, Any, Any]:
    """How many elements of each row are true up to each place, and where the first is false."""
    pad = mask.new_zeros((mask.shape[0], 1))
    longer = torch.cat([mask, pad], 1)
    numbers = longer.to(torch.int32)
    ends = numbers.argmin(1)
    del numbers, longer
    return mask.cumsum(1), pad, ends


@answer(
    "aten::_nested_tensor_from_mask",
    source=file(
        "ATen/native/nested/NestedTensorMath.cpp",
        "NestedTensor_nested_tensor_from_mask",
        read="2.6.0",
    ),
)
def without_padding(call: Call, run: Callable[..., Any]) -> Any:
    """The rows that a mask keeps: all of them, if it is not known how many."""
    tensor, mask = call.args[:2]
    count, size = int(mask.numel()), int(tensor.shape[-1])
    rows = (call.choices.places(mask) if call.choices else None) or call.most_of(mask)
    call.assume("rows that are no padding", rows)
    _Nested.sequences = sequences = int(mask.shape[0])
    with call.recording:
        ordered, pad, ends = _lengths(mask)
        if argument(call, "mask_check"):
            torch.ops.aten.equal(ordered.select(1, -1), ends)
        sizes = ordered.select(1, -1).reshape(-1, 1)
        width = torch.full_like(sizes, size)
        sizes = torch.cat([sizes, width], 1)
        del sizes, ordered
        made = tensor.new_empty((1, rows if rows <= count else count, size))
        offsets = torch.empty(3 * sequences + 4, dtype=torch.int32, device=tensor.device)
        numbers = torch.empty_like(offsets, dtype=torch.int64)  # as the host sends them
        del numbers, offsets, width, ends, pad
    return made


@answer(
    "aten::to_padded_tensor",
    source=file("ATen/native/nested/cuda/NestedTensorTransformerFunctions.cpp", read="2.6.0"),
)
def padded(call: Call, run: Callable[..., Any]) -> Any:
    """A batch of sequences of the same length again."""
    tensor, size = call.args[0], argument(call, "output_size")
    sequences, _Nested.sequences = _Nested.sequences, 0
    with call.recording:
        made = tensor.new_empty(list(size or tensor.shape))
        offsets = torch.empty(3 * sequences + 1, dtype=torch.int32, device=tensor.device)
        del offsets
    return made


@composition(
    "aten::_transformer_encoder_layer_fwd",
    source=file(
        "ATen/native/transformers/transformer.cpp",
        "transformer_encoder_layer_forward",
        read="2.6.0",
    ),
)
def encoder_layer(
    src: Any,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Any,
    norm_bias_1: Any,
    norm_weight_2: Any,
    norm_bias_2: Any,
    ffn_weight_1: Any,
    ffn_bias_1: Any,
    ffn_weight_2: Any,
    ffn_bias_2: Any,
    mask: Any = None,
    mask_type: int | None = None,
) -> Any:
    """Attention and two linear layers, each with a norm and a sum."""
    from torch.nn.functional import layer_norm

    def norm(x: Any, weight: Any, bias: Any) -> Any:
        return layer_norm(x, (embed_dim,), weight, bias, eps)

    x = norm(src, norm_weight_1, norm_bias_1) if norm_first else src
    weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
    x, _ = attention(x, x, x, embed_dim, num_heads, *weights, mask, False, True, mask_type)
    x.add_(src)
    if not norm_first:
        x = norm(x, norm_weight_1, norm_bias_1)
    before = x
    if norm_first:
        x = norm(x, norm_weight_2, norm_bias_2)
    rows = x.reshape(-1, embed_dim)
    inner = torch._addmm_activation(ffn_bias_1, rows, ffn_weight_1.t(), use_gelu=use_gelu)
    x = torch.addmm(ffn_bias_2, inner, ffn_weight_2.t()).view(x.shape)
    del inner, rows
    x.add_(before)
    return x if norm_first else norm(x, norm_weight_2, norm_bias_2)


@composition(
    "aten::_native_multi_head_attention",
    source=file(
        "ATen/native/transformers/cuda/attention.cu",
        "native_multi_head_attention_cuda",
        read="2.6.0",
    ),
)
def attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim: int,
    num_head: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    mask: Any = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Any, Any]:
    """By the kernel of `scaled_dot_product_attention`; with a mask or the weights, by hand."""
    from torch.nn.functional import linear, scaled_dot_product_attention

    batch, length = query.shape[:2]
    heads = (num_head, embed_dim // num_head)
    if mask is None and not need_weights and query is key and key is value:
        parts = [
            part.view(batch, -1, *heads).transpose(1, 2)
            for part in linear(query, qkv_weight, qkv_bias).chunk(3, -1)
        ]
        found = (_attend_to_rows if _Nested.sequences else scaled_dot_product_attention)(*parts)
        found = found.transpose(1, 2).reshape(batch, -1, embed_dim)
        result = linear(found, proj_weight, proj_bias)
        del found, parts
        return result, torch.empty(0, device=query.device)
    if query is key and key is value:
        parts = [linear(query, qkv_weight)]
    else:
        parts = [
            linear(one, part)
            for one, part in zip((query, key, value), qkv_weight.chunk(3), strict=True)
        ]
    packed = query.new_empty((3, batch, num_head, max(length, key.shape[1]), heads[1]))
    del parts
    lengths = (length, key.shape[1], key.shape[1])
    q, k, _ = (
        one[:, :, :size].reshape(-1, size, heads[1])
        for one, size in zip(packed, lengths, strict=True)
    )
    weights = torch.bmm(q, k.transpose(1, 2)).view(batch, num_head, length, -1)
    if mask is not None:  # else in place
        spread = torch.empty_like(weights, dtype=torch.bool)
        weights = torch.empty_like(weights)
        del spread
    if not need_weights:  # the product takes the place of the queries
        del weights
    found = packed[0].view(batch, num_head, -1, heads[1])[:, :, :length].transpose(1, 2)
    found = found.reshape(batch, length, -1)
    result = linear(found, proj_weight, proj_bias)
    del found
    if not need_weights:
        return result, torch.empty(0, device=query.device)
    if average_attn_weights:
        weights = weights.sum(1)
        weights /= num_head
    return result, weights


def _attend_to_rows(query: Any, key: Any, value: Any) -> Any:
    """Attention to the rows of the same sequence, which begin where two tensors say; FlashAttention
    returns the sums of its rows, too."""
    begins = [
        torch.empty(_Nested.sequences + 1, dtype=torch.int32, device=query.device) for _ in range(2)
    ]
    batch, heads, rows, size = query.shape
    found = query.new_empty((batch, rows, heads, size)).transpose(1, 2)
    if query.dtype != torch.float32:
        sums = query.new_empty((batch, heads, rows), dtype=torch.float32)
        del sums
    del begins
    return found
