"""What keeps each segment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bfc.libraries import NDArray, np
from bfc_tools.study.segments import Segments

#: The most blocks that are named for each segment.
NAMED_BLOCKS = 3


def _by_pool(
    segments: Segments, size: NDArray[np.uint64], live: NDArray[np.int64], blocks: NDArray[np.intp]
) -> list[list[Any]]:
    """[pool, segments, bytes, bytes live, blocks] of each pool, the largest first; empty where all
    is in the default pool."""
    sums: dict[str, list[Any]] = {}
    for row in zip(segments.pool, size.tolist(), live.tolist(), blocks.tolist(), strict=True):
        found = sums.setdefault(row[0], [row[0], 0, 0, 0, 0])
        for at, number in enumerate((1, *row[1:]), 1):
            found[at] += number
    return sorted(sums.values(), key=lambda row: -row[2]) if set(sums) - {""} else []


def with_blocks(
    segments: Segments,
    address: NDArray[np.uint64],
    size: NDArray[np.uint64],
    owner: Iterable[int],
    most: int,
) -> dict[str, Any]:
    """The segments of a run (`bfc_tools.browser.data`), the `most` largest of them, with the live
    blocks in them. An address of 0 is that of a block that has no memory."""
    starts = np.array(segments.address, np.uint64)
    ends = starts + np.array(segments.size, np.uint64)
    # By segment, and in each the largest first.
    at = np.searchsorted(starts, address, side="right") - 1
    inside = (at >= 0) & (address > 0) & (size > 0)
    inside[inside] = address[inside] < ends[at[inside]]
    chosen = np.flatnonzero(inside)
    order = chosen[np.lexsort((-size[chosen].astype(np.int64), at[chosen]))]
    counts = np.bincount(at[order], minlength=len(starts))
    live = np.zeros(len(starts), np.int64)
    np.add.at(live, at[order], size[order].astype(np.int64))
    first = np.cumsum(counts) - counts
    numbers = np.fromiter(owner, np.int64, len(size))
    kept = np.sort(np.argsort(-(ends - starts).astype(np.int64), kind="stable")[:most])
    largest = [order[first[i] : first[i] + min(counts[i], NAMED_BLOCKS)] for i in kept]
    return {
        "address": starts[kept].tolist(),
        "size": (ends - starts)[kept].tolist(),
        "stream": [segments.stream[i] for i in kept],
        "kind": [segments.kind[i] for i in kept],
        "pool": [segments.pool[i] for i in kept],
        "live": live[kept].tolist(),
        "blocks": counts[kept].tolist(),
        "largest": [
            np.stack([address[of], size[of], numbers[of].astype(np.uint64)], 1)
            .view(np.int64)
            .tolist()
            for of in largest
        ],
        "by_pool": _by_pool(segments, ends - starts, live, counts),
        "left_out": len(starts) - len(kept),
        "left_out_bytes": int((ends - starts).sum() - (ends - starts)[kept].sum()),
    }
