"""How kernels of cuDNN for Hopper share sums among multiprocessors, and what they keep them in.

These kernels compute a convolution as a product of matrices, in tiles of sums, each along steps of
32 or 64 numbers. So many tiles as blocks can run at once make a wave. Where the last wave is not
full, each of its tiles is split along its steps: every part keeps a tile of 32 bits, and the parts
are added in a tree, whose nodes count those that are done. Groups of few channels lie side by side
in a tile, each padded to a power of two. Blocks come in clusters, which run where
a group of multiprocessors has room for one. Of a GPU that is only described cuDNN knows one group
of 18 multiprocessors, so the plan's workspace is that of another GPU. `on_all_sms` replaces the one
by the other, by what the plan says of the kernel (CUDNN_KNOB_TYPE_TILE_SIZE and others of
cudnn_graph.h).

NVIDIA documents neither the tiles nor when a sum is split, so the rule was fitted to plans of cuDNN
9.19 with given kernels, for 2 to 18 multiprocessors (CUDNN_ATTR_ENGINE_SM_COUNT_TARGET): of 40,198
others 99.9 % are right to the byte, and all of 638 kernels for groups of channels. On an H100 it
was compared with 2,887 plans without groups: all but one are right to the byte. The number of
clusters and MOST_PARTS come from there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from bfc_tools.predicting.cudnn import Kernel, Plan
from bfc_tools.predicting.devices import clusters_at_once
from bfc_tools.predicting.rules.tensors import div_up, type_name

FLOAT = COUNTER = 4
#: Rows and columns of a tile, by cuDNN's number of it.
TILES = {
    0: (128, 128),
    1: (128, 64),
    2: (128, 32),
    3: (256, 128),
    4: (256, 64),
    5: (64, 64),
    6: (128, 256),
    7: (64, 128),
    8: (64, 32),
    9: (64, 256),
    16: (256, 32),
    18: (64, 192),
    19: (128, 192),
    20: (256, 96),
}
#: The multiprocessors of a GPU that is only described.
DESCRIBED = 18
#: Bytes beside the counters, and beside all.
BESIDE_COUNTERS, ALIGNMENT = 32, 127
#: In steps of 32 numbers, what each level of the tree takes: more for small tiles, whose steps are
#: short; and what else a split must save. In bfloat16 a step is thought to be so much shorter.
LEVEL, LEVEL_OF_TILE, MARGIN, BRAIN = 11.3, 3.95 * 16384, 8.2, 8
#: The same for tiles of 128 by 64 with short steps, which are computed faster if none is split.
SLOWER, LEVEL_SLOWER, MARGIN_SLOWER = 1.1, 17.4, 7.6
#: Parts of more numbers than this are made in any case, if there are more than so many; and the
#: most.
LONG, FEW_PARTS, MOST_PARTS = 1024, 8, 128
#: The channels to which a group is padded at least.
LEAST_OF_GROUP = 4


@dataclass(frozen=True)
class Work:
    """What a kernel does."""

    kernel: Kernel
    tiles: int  # in clusters
    steps: int  # of a tile
    numbers: int  # of a step
    brain: bool  # whether they are in bfloat16
    slower: bool  # whether tiles of this kernel are computed slower if some are split

    @property
    def _elements(self) -> int:
        return math.prod(TILES[self.kernel.tile])

    def bytes(self, at_once: int) -> int:
        """The workspace where so many clusters run at once, without copies in another layout."""
        left = self.tiles % at_once
        found = COUNTER if self.tiles > 2 * at_once else 0
        parts = self._parts(at_once) if left and self.kernel.splits else 1
        if parts > 1:
            each = parts * self._elements * FLOAT + _nodes(parts) * COUNTER
            found += left * self.kernel.cluster * each + BESIDE_COUNTERS
        return found + ALIGNMENT if found else 0

    def _parts(self, at_once: int) -> int:
        """The parts of each tile of the last wave, which is not full."""
        waves, left = divmod(self.tiles, at_once)
        most = at_once // left
        found = self._of_one_wave(most) if waves == 0 else self._of_last_wave(waves, most)
        return div_up(self.steps, div_up(self.steps, found))  # none is empty

    def _of_one_wave(self, most: int) -> int:
        many = min(most, self.steps // (LONG // self.numbers + 1), MOST_PARTS)
        if many > FEW_PARTS:
            return many
        whole = self.steps / (SLOWER if self.slower else 1)
        costs = {1: whole} | {
            parts: div_up(self.steps, parts) + self._level * _levels(parts)
            for parts in range(2, most + 1)
        }
        return min(reversed(costs), key=costs.__getitem__)

    def _of_last_wave(self, waves: int, most: int) -> int:
        """One part that takes less time than a whole tile, with the levels of its tree."""
        good = [
            parts
            for parts in range(2, most + 1)
            if self.steps + div_up(self.steps, 1 << _levels(parts) - 1) - div_up(self.steps, parts)
            >= self._level * _levels(parts) + self._margin
        ]
        found = min(good, key=lambda parts: div_up(self.steps, parts), default=1)
        split = waves * self.steps + div_up(self.steps, found)
        return 1 if self.slower and split > (waves + 1) * self.steps / SLOWER else found

    @property
    def _scale(self) -> float:
        return (BRAIN if self.brain else 1) * 32 / self.numbers

    @property
    def _level(self) -> float:
        level = LEVEL_SLOWER if self.slower else LEVEL + LEVEL_OF_TILE / self._elements
        return level * self._scale

    @property
    def _margin(self) -> float:
        return (MARGIN_SLOWER if self.slower else MARGIN) * self._scale


def _levels(parts: int) -> int:
    """Of a tree that adds them in pairs."""
    return (parts - 1).bit_length()


def _nodes(parts: int) -> int:
    found = 0
    while parts > 1:
        parts = div_up(parts, 2)
        found += parts
    return found


def on_all_sms(gradient: str, images: Any, weight: Any, result: Any, plan: Plan, sms: int) -> int:
    """The bytes of a plan for a Hopper of so many multiprocessors, and not of 18."""
    kernel = plan.kernel
    if kernel is None or kernel.tile not in TILES:
        return plan.workspace
    if min(kernel.cluster_rows, kernel.cluster_columns) < 1 or kernel.cluster > DESCRIBED:
        return plan.workspace
    work = _work(gradient, images, weight, result, kernel)
    planned = work.bytes(DESCRIBED // kernel.cluster)
    if planned > plan.workspace:  # it is another kernel
        return plan.workspace
    return plan.workspace - planned + work.bytes(clusters_at_once(sms, kernel.cluster))


def _work(gradient: str, images: Any, weight: Any, result: Any, kernel: Kernel) -> Work:
    """A gradient of images goes over results, one of weights over pixels."""
    name = type_name(images)
    short = name == "float32" or kernel.depth == 0
    numbers = 32 if short else 64
    high, wide = TILES[kernel.tile]
    out, inputs, *sides = (int(size) for size in weight.shape)
    groups = int(images.shape[1]) // inputs
    out //= groups
    window = math.prod(sides)
    pixels = {of: _pixels(tensor) for of, tensor in (("result", result), ("images", images))}
    if gradient == "weight":
        rows, columns = div_up(out, high), window * div_up(inputs, wide)
        steps = div_up(pixels["result"], numbers)
    else:
        columns, along = (out, inputs) if gradient == "result" else (inputs, out)
        rows, columns = div_up(pixels[gradient], high), div_up(columns, wide)
        steps = window * div_up(along, numbers)
    slower = (high, wide) == (128, 64) and short and (gradient, name) != ("images", "float32")
    tiles = div_up(rows, kernel.cluster_rows) * div_up(columns, kernel.cluster_columns)
    if groups > 1:
        padded = max(1 << (max(out, inputs) - 1).bit_length(), LEAST_OF_GROUP)
        tiles *= div_up(groups, max(wide // padded, 1))
    return Work(kernel, tiles, steps, numbers, name == "bfloat16", slower)


def _pixels(tensor: Any) -> int:
    """Of all images."""
    batch, _, *sides = (int(size) for size in tensor.shape)
    return batch * math.prod(sides)
