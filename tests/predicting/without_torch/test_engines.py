"""The arithmetic of vLLM and SGLang, held to what both printed in public.

`served_in_public.json` has the figures, and the threads that they are from. What was printed is
rounded: of memory that is known to two digits, the tokens must be among those that it may be.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bfc_tools.models.caches import layers_of
from bfc_tools.models.engines import Paged, Pool, left_by_sglang, left_by_vllm
from bfc_tools.models.serving import Server

GIB = 1 << 30
HALF = 0.005  # of the last digit that is printed
PUBLIC = json.loads(Path(__file__).with_name("served_in_public.json").read_text())
FIGURES = PUBLIC["figures"]


def agrees_with_vllm(row: dict[str, Any]) -> bool:
    config = PUBLIC["models"][row["model"]]
    cache = Paged(tuple(layers_of(config, row.get("tp", 1), row.get("cache", "auto"))))
    told = []
    if "available" in row:
        least, most = (int((row["available"] + sign * HALF) * GIB) for sign in (-1, 1))
        for name, count in {
            "blocks": cache.blocks,
            "tokens": cache.tokens,
            "longest": cache.longest,
        }.items():
            if name in row:
                told.append(count(least) <= row[name] <= count(most))
                told.append(name == "blocks" or row[name] % cache.block == 0)
    if "concurrency" in row:
        context, printed = row["concurrency"]
        available = row.get("blocks", row.get("tokens", 0) // cache.block) * cache.block_bytes
        tokens = cache.blocks(available) * cache.block
        told.append(f"{tokens / context:.2f}" == printed)
    if "needed" in row:
        context, printed = row["needed"]
        told.append(f"{cache.needed(context) / GIB:.2f}" == printed)
    assert told
    return all(told)


def agrees_with_sglang(row: dict[str, Any]) -> bool:
    config = PUBLIC["models"][row["model"]]
    layers = layers_of(config, row.get("tp", 1), row.get("cache", "auto"))
    pool = Pool(tuple(layers), row.get("page", 1))
    sizes = [f"{nbytes / GIB:.2f}" for nbytes in pool.allocated(row["tokens"]) if nbytes]
    return sizes == row["sizes"] and row["tokens"] % pool.page == 0


def agrees(row: dict[str, Any]) -> bool:
    if row["kind"] == "budget":
        taken = [int(one * GIB) for one in row["taken"]]
        left = left_by_vllm(int(row["total"] * GIB), row["utilization"], taken)
        return abs(left / GIB - row["left"]) <= HALF * (len(taken) + 2)
    return {"vllm": agrees_with_vllm, "sglang": agrees_with_sglang}[row["engine"]](row)


@pytest.mark.parametrize("row", FIGURES, ids=lambda row: f"{row['at'].split('.com/')[1]}")
def test_a_figure_that_was_printed_in_public(row) -> None:
    assert agrees(row) == row.get("agrees", True), row.get("why")
    assert row.get("agrees", True) or row["why"]


def test_how_many_agree_is_as_the_page_says() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "serves.md").read_text()
    kinds = Counter(row["kind"] for row in FIGURES)
    right = Counter(row["kind"] for row in FIGURES if row.get("agrees", True))
    for kind, number in kinds.items():
        assert f"| {kind} | {right[kind]} of {number} |" in page
    assert f"{sum(right.values())} of {len(FIGURES)}" in page


@pytest.mark.parametrize("row", PUBLIC["estimates"], ids=lambda row: row["at"].split(".com/")[1])
def test_what_is_estimated_is_a_range_that_holds_what_was_printed(row) -> None:
    """The activations of a profile run, what others take, and with both what is left."""
    asked = argparse.Namespace(
        engine="vllm",
        tensor_parallel_size=row.get("tp", 1),
        kv_cache_dtype="auto",
        block_size=None,
        gpu_memory_utilization=row["utilization"],
        max_num_batched_tokens=row["batched"],
        max_num_seqs=256,
        weights=None,
        context=4096,
        concurrency=1,
    )
    config = PUBLIC["models"][row["model"]]
    server = Server(config, asked, int(row["total"] * GIB), int(row["weights"] * GIB))
    by_name = {one.what: one for one in server.taken}
    for name in ("activations", "outside PyTorch"):
        assert by_name[name].low <= row[name] * GIB <= by_name[name].high, name
    low, high = server.available
    if "available" in row:
        assert low <= row["available"] * GIB <= high


def test_groups_of_layers_share_the_blocks() -> None:
    """18 layers that look at all, and 18 that look at 128 tokens: two groups."""
    layers = layers_of(PUBLIC["models"]["gpt-oss-120b"])
    cache = Paged(tuple(layers))
    assert (len(cache.groups), cache.block_bytes) == (2, 18 * 16 * 2048)
    assert cache.blocks_for(131072, 8192) == 131072 // 16 + (127 + 8192 + 15) // 16 + 1
    for available in (0, 5 * GIB, 5 * GIB + 1):
        longest = cache.longest(available, 2048)
        assert cache.needed(longest, 2048) <= available or longest == 0
        assert cache.blocks_for(longest + 16, 2048) > cache.blocks(available)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "no num_hidden_layers"),
        ({"num_hidden_layers": 2}, "no num_attention_heads"),
        ({"num_hidden_layers": 2, "num_attention_heads": 4}, "no hidden_size"),
        ({"num_hidden_layers": 2, "kv_lora_rank": 512}, "no qk_rope_head_dim"),
        ({"num_hidden_layers": 2, "model_type": "mamba2"}, "a state that is not of tokens"),
        (
            {
                "num_hidden_layers": 2,
                "model_type": "qwen3_next",
                "layer_types": ["linear_attention", "full_attention"],
            },
            "a qwen3_next has layers of linear_attention",
        ),
        (
            {
                "num_hidden_layers": 2,
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
                "hidden_size": 96,
            },
            "3 heads of keys and values cannot be divided among 2 GPUs",
        ),
    ],
)
def test_what_a_configuration_lacks_is_said(config, said) -> None:
    with pytest.raises(ValueError, match=said):
        layers_of(config, tp=2)


def test_a_type_that_is_not_known_is_said() -> None:
    with pytest.raises(ValueError, match="a cache of int3 is not known"):
        layers_of({}, cache="int3")


HEADS = {"num_hidden_layers": 6, "num_attention_heads": 8, "hidden_size": 512}


def test_kinds_of_attention() -> None:
    """Many heads, few, one; windows by a list, by a pattern, for all layers, and switched off."""

    def bytes_of(**more: Any) -> int:
        return sum(layer.nbytes for layer in layers_of(HEADS | more))

    many = bytes_of()
    assert many == 6 * 2 * 8 * 64 * 2
    assert bytes_of(num_key_value_heads=2) == many // 4
    assert bytes_of(multi_query=True) == many // 8
    assert sum(layer.nbytes for layer in layers_of(HEADS, cache="fp8")) == many // 2
    assert sum(layer.nbytes for layer in layers_of({"text_config": HEADS}, tp=4)) == many // 4
    assert sum(layer.nbytes for layer in layers_of(HEADS, tp=16)) == many // 8

    def kinds(**more: Any) -> str:
        return "".join(layer.kind[0] for layer in layers_of(HEADS | {"sliding_window": 64} | more))

    assert kinds() == "ssssss"
    assert kinds(sliding_window_pattern=3) == "ssfssf"
    assert kinds(use_sliding_window=False) == "ffffff"
    assert kinds(sliding_window=None) == "ffffff"
    assert kinds(layer_types=["full_attention", "sliding_attention"] * 3) == "fsfsfs"


def test_layers_that_differ_are_not_known_to_vllm_here() -> None:
    layers = [*layers_of(HEADS), *layers_of(HEADS | {"head_dim": 128})]
    with pytest.raises(ValueError, match="blocks of different lengths"):
        _ = Paged(tuple(layers)).block_bytes
    assert Pool(tuple(layers)).tokens(GIB) == GIB // Pool(tuple(layers)).token_bytes


def test_what_is_left_for_a_pool() -> None:
    assert left_by_sglang(60 * GIB, 80 * GIB, 0.75) == 40 * GIB
    assert left_by_vllm(80 * GIB, 0.5, [10 * GIB, GIB]) == 29 * GIB
    assert Pool(tuple(layers_of(HEADS)), page=64).tokens(10_000_000) % 64 == 0
    assert Paged(tuple(layers_of(HEADS))).tokens(-GIB) == 0
