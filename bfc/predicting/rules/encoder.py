"""The layers of `nn.TransformerEncoder` and `nn.MultiheadAttention` in inference, each of which is
one operator, as its kernel for CUDA computes it.

From PyTorch's ATen/native/transformers/transformer.cpp (transformer_encoder_layer_forward) and
ATen/native/transformers/cuda/attention.cu (native_multi_head_attention_cuda).
"""

from __future__ import annotations

from typing import Any

from bfc.libraries import torch
from bfc.predicting.rules.interface import composition


@composition("aten::_transformer_encoder_layer_fwd")
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


@composition("aten::_native_multi_head_attention")
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
        found = scaled_dot_product_attention(*parts)
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
