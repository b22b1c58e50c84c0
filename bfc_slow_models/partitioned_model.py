"""The slow twin of a `bfc.BFCAllocator` with `enable_spatial_partitioning`: requests from two ends.

Each chunk has a tag, in use or free: "lower", "upper" or "central_gap" (TensorFlow's behaviour,
2.17).
"""

from __future__ import annotations

from typing import Any

import bfc
from bfc_slow_models.tensorflow_model import GRANULE, Chunk, Model, Region, span

LOWER, UPPER, GAP = "lower", "upper", "central_gap"


class PartitionedModel(Model):
    """XLA's rules for two ends. Where XLA would have two gaps and end, they join."""

    def __init__(
        self,
        device: bfc.SubAllocator,
        *,
        lower_end_policy: bfc.EndPolicy | None = None,
        upper_end_policy: bfc.EndPolicy | None = None,
        initial_region_bytes: int = 0,
        allow_growth: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(device, allow_growth=allow_growth, **options)
        self.grows = allow_growth
        self.policies = {
            LOWER: lower_end_policy or bfc.EndPolicy(),
            UPPER: upper_end_policy or bfc.EndPolicy(),
        }
        self.initial = initial_region_bytes
        self.two_gaps = False  # whether XLA would have ended the process
        self.end = LOWER  # of the request that is being served
        self.wanted = 0  # by what it lacks for the upper end
        self.shared = (0, 0)  # where the region of both ends began and ended, as it came

    def allocate(
        self, nbytes: int, freed_before: int = 0, alignment: int = 1, end: str = LOWER
    ) -> int | None:
        self.end = end
        self.wanted = 0
        return super().allocate(nbytes, freed_before, alignment)

    # -- placement --------------------------------------------------------------------------------

    def best_fit(self, rounded: int, freed_before: int) -> Chunk | None:
        free = [
            chunk
            for chunk in self.chunks()
            if not chunk.in_use
            and self.fits(chunk, rounded)
            and not 0 < freed_before < chunk.freed_at
        ]
        down = -1 if self.policies[self.end].hole_order == "descending" else 1
        holes = [chunk for chunk in free if chunk.tag == self.end]
        gaps = [chunk for chunk in free if chunk.tag == GAP]
        return min(holes or gaps, key=lambda chunk: (chunk.size, down * chunk.ptr), default=None)

    def fits(self, chunk: Chunk, rounded: int) -> bool:
        stop = chunk.ptr + chunk.size
        if self.end == LOWER:
            stop = min(stop, self.shared[1])
        return chunk.ptr + self.padding(chunk) + rounded <= stop

    def keeps(self, size: int, rounded: int, tag: str) -> bool:
        """Whether a request is given all of so many bytes."""
        policy = self.policies[self.end]
        split = policy.gap_split_policy if tag == GAP else policy.hole_split_policy
        left = size - rounded
        return split == "retain_padding" and left < rounded and left < self.slack_cap

    def hand_out(self, chunk: Chunk, rounded: int, nbytes: int) -> int:
        source, padding = chunk.tag, self.padding(chunk)
        if self.end == LOWER:
            if padding:
                rest = self.cut(chunk, padding)
                chunk.tag = LOWER
                chunk = rest
        else:
            start = chunk.ptr + padding
            if not self.keeps(chunk.size - padding, rounded, source):
                start = (chunk.ptr + chunk.size - rounded) // self.alignment * self.alignment
            if start > chunk.ptr:
                chunk = self.cut(chunk, start - chunk.ptr)
            chunk.tag = UPPER
        size = chunk.size
        if self.end == LOWER:
            size = min(size, self.shared[1] - chunk.ptr)
        size = size if self.keeps(size, rounded, source) else rounded
        if chunk.size > size:
            self.cut(chunk, size)
        chunk.tag = self.end
        return self.mark_in_use(chunk, nbytes)

    def return_to_gap(self, chunk: Chunk) -> None:
        """Nothing of its end lies between it and the gap any more."""
        region = self.region_of(chunk.ptr)
        at = region.index(chunk) + (1 if chunk.tag == LOWER else -1)
        is_last = not 0 <= at < len(region) or region[at].tag != chunk.tag
        if chunk.tag != GAP and is_last and region[0].ptr == self.shared[0]:
            chunk.tag = GAP

    def coalesce_freed(self, chunk: Chunk, ignore_timestamps: bool = False) -> Chunk:
        if chunk.freed_at == 0 or ignore_timestamps:
            self.return_to_gap(chunk)
        return self.coalesce(chunk, ignore_timestamps)

    def swallow(self, region: Region, at: int) -> None:
        if region[at].tag != region[at + 1].tag:
            region[at].tag = GAP
        super().swallow(region, at)

    def is_in_no_bin(self, chunk: Chunk) -> bool:
        return chunk.tag == GAP

    def must_join(self, one: Chunk, other: Chunk) -> bool:
        self.two_gaps = self.two_gaps or one.tag == other.tag == GAP
        return one.tag == other.tag == GAP

    # -- regions ----------------------------------------------------------------------------------

    def extend(self, rounded: int) -> bool:
        """First the region of both ends; then what the upper end lacks."""
        came = False
        if self.shared == (0, 0):
            if not self.grows:
                return super().extend(rounded)
            came = self.ask(min(self.initial, self.available), GRANULE)
            if not came or self.best_fit(rounded, 0):
                return came
        if not self.grows or self.end == LOWER:
            return came
        self.wanted = rounded
        joins = self.regions if self.device.supports_coalescing else []
        least = min((self.lacking(region, rounded) for region in joins), default=rounded)
        return self.extend_by(rounded, least) or came

    def lacking(self, region: Region, rounded: int) -> int:
        """The bytes that a request needs behind a region, if that grows."""
        tail = region[-1]
        end = tail.ptr + tail.size
        start = end if tail.in_use or tail.freed_at else tail.ptr
        return start + -start % self.alignment + rounded - end

    def add_just(self, rounded: int) -> bool:
        has_lost = self.shared != (0, 0) and (not self.grows or self.end == LOWER)
        return not has_lost and super().add_just(rounded)

    def take_in(self, ptr: int, size: int) -> bool:
        if self.wanted and size < self.needed_at(ptr):
            self.device.free(ptr, size)  # it does not lie where it would have sufficed
            return False
        return super().take_in(ptr, size)

    def add_region(self, ptr: int, size: int, tag: str = "") -> None:
        tag = UPPER if self.shared != (0, 0) else GAP
        if tag == GAP:
            self.shared = (ptr, ptr + size)
        super().add_region(ptr, size, tag)

    def needed_at(self, ptr: int) -> int:
        """How large a region must be that comes at an address, to serve the request."""
        if self.device.supports_coalescing:
            for region in self.regions:
                if sum(span(region)) == ptr:
                    return self.lacking(region, self.wanted)
        return self.wanted

    def give_back(self, regions: list[Region]) -> int:
        if any(region[0].ptr == self.shared[0] for region in regions):
            self.shared = (0, 0)
        return super().give_back(regions)
