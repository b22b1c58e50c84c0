"""The arithmetic of memory of vLLM and SGLang: from the bytes that they have for their caches to
the tokens that they print, and what they have for them.

The sources are vLLM's v1/core/kv_cache_planning.py, v1/core/kv_cache_utils.py and
v1/worker/gpu_worker.py (read at 0.33.0), and what both print in public threads, which the tests
hold this to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bfc_tools.models.caches import SLIDING, Layer

#: Tokens in a block of vLLM, unless something else is asked.
BLOCK = 16
#: If the kind with most layers has not so many times those of the rarest, that is a group.
NEARLY = 1.25


@dataclass(frozen=True)
class Paged:
    """A cache of vLLM's: blocks of tokens, from one pool, for groups of as many layers each."""

    layers: tuple[Layer, ...]
    block: int = BLOCK

    @property
    def groups(self) -> list[Layer]:
        """A layer of each group."""
        kinds = Counter(self.layers)
        return [layer for layer, n in kinds.items() for _ in range(-(-n // self._size))]

    @property
    def _size(self) -> int:
        """The layers of a group."""
        counts = Counter(self.layers).values()
        return max(counts) if max(counts) < NEARLY * min(counts) else min(counts)

    @property
    def block_bytes(self) -> int:
        """The bytes that a block takes, in all layers of its group.

        Raises ValueError if layers differ in more than their kind.
        """
        sizes = {layer.nbytes for layer in self.layers}
        if len(sizes) > 1:
            raise ValueError(
                "the layers of this model keep different numbers of bytes, for which vLLM makes "
                "blocks of different lengths: that is not known here"
            )
        return self._size * self.block * sizes.pop()

    @property
    def token_bytes(self) -> int:
        """The bytes of a token in all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def blocks(self, available: int) -> int:
        """How many blocks so many bytes make."""
        return max(0, available) // self.block_bytes

    def tokens(self, available: int) -> int:
        """The tokens that vLLM printed until 0.19: those of blocks that are dealt to the groups in
        equal parts."""
        return self.blocks(available) // len(self.groups) * self.block

    def blocks_for(self, context: int, batched: int | None = None) -> int:
        """The blocks of a request of so many tokens: of layers with a window, what that and a batch
        of `batched` tokens cover."""
        blocks = 0
        for layer in self.groups:
            if layer.kind == SLIDING and layer.window and batched is not None:
                held = min(layer.window - 1 + batched, context)
                blocks += -(-held // self.block) + 1
            else:
                blocks += -(-context // self.block)
        return blocks

    def concurrency(self, available: int, context: int, batched: int | None = None) -> float:
        """How many such requests at a time, as vLLM prints it."""
        return self.blocks(available) / self.blocks_for(context, batched)

    def longest(self, available: int, batched: int | None = None) -> int:
        """The longest request, in tokens, in whole blocks."""
        low, high = 0, self.blocks(available) + 1
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.blocks_for(middle * self.block, batched) <= self.blocks(available)
            low, high = (middle, high) if fits else (low, middle)
        return low * self.block

    def needed(self, context: int, batched: int | None = None) -> int:
        """The bytes of a request of so many tokens."""
        return self.blocks_for(context, batched) * self.block_bytes


@dataclass(frozen=True)
class Pool:
    """A pool of SGLang's: places for tokens, in pages of as many each."""

    layers: tuple[Layer, ...]
    page: int = 1

    @property
    def token_bytes(self) -> int:
        """The bytes of a token in all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def tokens(self, available: int) -> int:
        """`max_total_num_tokens`: how many so many bytes hold, in whole pages."""
        return max(0, available) // self.token_bytes // self.page * self.page

    def allocated(self, tokens: int) -> tuple[int, int]:
        """The bytes of keys and of values that it allocates for so many tokens: a page more, which
        nobody gets. Latent keys and values are all in the first."""
        places = tokens + self.page
        keys = sum(layer.keys for layer in self.layers)
        return places * keys, places * (self.token_bytes - keys)


def left_by_vllm(total: int, utilization: float, taken: Sequence[int]) -> int:
    """The bytes that vLLM has for its cache: a part of the GPU's, without what the weights, the
    activations of its profile run and others take."""
    return int(total * utilization) - sum(taken)


def left_by_sglang(free: int, total: int, fraction: float) -> int:
    """The bytes that SGLang has for its pool: what is free once the weights are loaded, without the
    part of the GPU that is left to activations and graphs."""
    return free - int(total * (1 - fraction))
