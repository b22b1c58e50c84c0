"""Whether vLLM or SGLang serves a model on a GPU, by their own arithmetic.

What follows from the configuration is exact: the bytes of a token, and the blocks that some memory
makes. What a profile run on the GPU would find is a range, with its reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bfc.units import format_bytes
from bfc_tools.models.caches import layers_of
from bfc_tools.models.engines import BLOCK, Paged, Pool, left_by_sglang, left_by_vllm
from bfc_tools.models.names import text_part
from bfc_tools.models.options import load_in_words

GIB = 1 << 30
#: What others than PyTorch take: public logs have 0.2 GiB to 1.8 GiB on one GPU, and 3.6 GiB where
#: two speak by NCCL.
OUTSIDE, OUTSIDE_OF_SEVERAL = (GIB // 10, 18 * GIB // 10), (GIB // 10, 36 * GIB // 10)
#: CUDA graphs, which vLLM takes from the same budget since 0.21.
GRAPHS = (GIB // 10, 3 * GIB // 2)
#: The estimate of activations is taken for right within these factors.
ROUGHLY = (0.5, 2.0)


@dataclass(frozen=True)
class Taken:
    """Memory that is not the cache's: a range, and why."""

    what: str
    low: int
    high: int
    why: str

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.what}: {format_bytes(self.low)}, {self.why}"
        return f"{self.what}: {format_bytes(self.low)} to {format_bytes(self.high)}, {self.why}"


class Server:
    """A server of a model on a GPU. `total` is the GPU's memory, and `weights` what the model takes
    there, in bytes.

    Raises ValueError if the configuration lacks what is needed.
    """

    def __init__(
        self, config: Mapping[str, Any], asked: argparse.Namespace, total: int, weights: int
    ) -> None:
        self.asked, self.total = asked, total
        tp = asked.tensor_parallel_size
        layers = tuple(layers_of(config, tp, asked.kv_cache_dtype))
        self.paged = Paged(layers, asked.block_size or BLOCK)
        self.pool = Pool(layers, asked.block_size or 1)
        self.is_vllm = asked.engine == "vllm"
        quantized = any("quantization_config" in one for one in (config, text_part(config)))
        share = "of the weights as they are quantized" if quantized else "of the weights in 16 bits"
        share = share if asked.weights is None else "as you say"
        self.taken = [Taken("weights", weights, weights, share)]
        outside = OUTSIDE if tp == 1 else OUTSIDE_OF_SEVERAL
        self.taken.append(Taken("outside PyTorch", *outside, "as public logs of others had it"))
        if self.is_vllm:
            self.taken += [_activations(config, asked), _graphs()]

    @property
    def available(self) -> tuple[int, int]:
        """The least and the most bytes that the cache gets."""
        low = sum(one.high for one in self.taken)
        high = sum(one.low for one in self.taken)
        if self.is_vllm:
            part = self.asked.gpu_memory_utilization
            return left_by_vllm(self.total, part, [low]), left_by_vllm(self.total, part, [high])
        part = self.asked.mem_fraction_static
        least, most = self.total - low, self.total - high
        return left_by_sglang(least, self.total, part), left_by_sglang(most, self.total, part)

    @property
    def tokens(self) -> tuple[int, int]:
        """The least and the most tokens in the cache."""
        low, high = self.available
        count = self.paged.tokens if self.is_vllm else self.pool.tokens
        return count(low), count(high)

    @property
    def concurrency(self) -> tuple[float, float]:
        """The least and the most requests of the context that is asked, at a time."""
        low, high = self.available
        context, batched = self.asked.context, self.asked.max_num_batched_tokens
        if self.is_vllm:
            return (
                self.paged.concurrency(max(0, low), context, batched),
                self.paged.concurrency(max(0, high), context, batched),
            )
        return self.tokens[0] / context, self.tokens[1] / context

    @property
    def fits(self) -> bool | None:
        """Whether it serves what is asked; None if that is not known."""
        low, high = self.concurrency
        if low >= self.asked.concurrency:
            return True
        return False if high < self.asked.concurrency else None

    @property
    def answer(self) -> str:
        """The first line."""
        asked = self.asked
        name = "vLLM" if self.is_vllm else "SGLang"
        what = load_in_words(asked.concurrency, asked.context)
        words = {True: "serves", False: "does not serve", None: "may serve"}[self.fits]
        low, high = self.concurrency
        return f"{name} {words} {what} at a time: it has room for {low:.2f} to {high:.2f}."

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON: sizes are in bytes."""
        return {
            "fits": self.fits,
            "answer": self.answer,
            "engine": self.asked.engine,
            "token_bytes": self.paged.token_bytes,
            "taken": [vars(one) for one in self.taken],
            "available": list(self.available),
            "tokens": list(self.tokens),
            "concurrency": list(self.concurrency),
        }

    def __str__(self) -> str:
        low, high = (max(0, one) for one in self.available)
        least, most = self.tokens
        each = f"{self.paged.token_bytes:,} bytes a token"
        if self.is_vllm:
            part = self.asked.gpu_memory_utilization
            budget = f"--gpu-memory-utilization {part:g} of {format_bytes(self.total)}"
            each += f", {self.paged.block_bytes:,} a block of {self.paged.block}"
        else:
            part = self.asked.mem_fraction_static
            budget = f"--mem-fraction-static {part:g} of {format_bytes(self.total)}"
        lines = [
            self.answer,
            f"the budget   {format_bytes(int(self.total * part))}: {budget}",
            f"KV cache     {format_bytes(low)} to {format_bytes(high)}",
            f"             {each}",
            f"             {least:,} to {most:,} tokens",
            "",
            "not for the cache:",
            *(f"  {one}" for one in self.taken),
        ]
        return "\n".join(lines)


def _graphs() -> Taken:
    return Taken("CUDA graphs", *GRAPHS, "which vLLM takes from the budget since 0.21")


def _activations(config: Mapping[str, Any], asked: argparse.Namespace) -> Taken:
    """What a profile run takes: of each token of a batch the residuals, what goes into the widest
    layer, and what comes out, in 16 bits; and for each sequence the logits, in 16 and 32 bits."""
    config, tp = text_part(config), asked.tensor_parallel_size
    hidden = config.get("hidden_size") or config.get("n_embd") or config.get("d_model") or 0
    wide = config.get("intermediate_size") or config.get("n_inner") or 4 * hidden
    routed = config.get("num_experts_per_tok") or 0
    if routed and config.get("moe_intermediate_size"):
        wide = max(wide, routed * config["moe_intermediate_size"])
    tokens, sequences = asked.max_num_batched_tokens, asked.max_num_seqs
    found = 2 * tokens * (4 * hidden + 3 * wide // tp)
    found += sequences * config.get("vocab_size", 0) * (2 + 4 + 4) // tp
    low, high = (int(found * factor) for factor in ROUGHLY)
    return Taken(
        "activations",
        low,
        high,
        f"estimated for a profile run of {tokens} tokens and {sequences} sequences",
    )
