"""A snapshot as TensorFlow's memory dump: the fields of `bfc_memory_map.proto`, as JSON.

Protobuf's JSON has names in camelCase, numbers of 64 bits as text, and NaN as "NaN".
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

from bfc.pytorch.words import ALLOC, FREE_COMPLETED

if TYPE_CHECKING:
    from bfc.snapshots.snapshot import ChunkInfo, Snapshot

#: As many sizes as TensorFlow keeps.
MOST_SIZES = 4096


def as_tensorflow(snapshot: Snapshot) -> dict[str, Any]:
    """What `Snapshot.to_tensorflow` returns."""
    actions, sizes = _actions(snapshot)
    stats = snapshot.stats
    fragmentation = stats.fragmentation
    return {
        "allocatorName": snapshot.device,
        "binSummary": [
            {
                "bin": it.bin,
                "totalBytesInUse": str(it.total_bytes_in_use),
                "totalBytesInBin": str(it.total_bytes_in_bin),
                "totalChunksInUse": str(it.total_chunks_in_use),
                "totalChunksInBin": str(it.total_chunks_in_bin),
            }
            for it in snapshot.bins
        ],
        "chunk": [_chunk(it, actions.get(it.ptr, 0)) for it in snapshot.chunks()],
        "snapShot": [
            {"actionCount": str(count), "size": str(size)} for count, size in sizes[-MOST_SIZES:]
        ],
        "stats": {
            "numAllocs": str(stats.num_allocs),
            "bytesInUse": str(stats.bytes_in_use),
            "peakBytesInUse": str(stats.peak_bytes_in_use),
            "largestAllocSize": str(stats.largest_alloc_size),
            "fragmentationMetric": "NaN" if fragmentation != fragmentation else fragmentation,
        },
    }


def _chunk(chunk: ChunkInfo, action_count: int) -> dict[str, Any]:
    return {
        "address": str(chunk.ptr),
        "size": str(chunk.size),
        "requestedSize": str(chunk.requested_size),
        "bin": chunk.bin_num,
        "opName": chunk.owner,
        "freedAtCount": str(0 if chunk.in_use else chunk.freed_at_count),
        "actionCount": str(action_count),
        "inUse": chunk.in_use,
        "stepId": str(chunk.step or 0),
    }


def _actions(snapshot: Snapshot) -> tuple[dict[int, int], list[tuple[int, int]]]:
    """By address, the number of the last allocation or free there; and each action's number with
    the bytes asked for in what was live after it. They are numbered from the history's beginning.
    """
    last: dict[int, int] = {}
    changes: list[int] = []
    for entry in snapshot.history:
        if entry.action in (ALLOC, FREE_COMPLETED):
            changes.append(entry.size if entry.action == ALLOC else -entry.size)
            last[entry.addr] = len(changes)
    asked_for = sum(chunk.requested_size for chunk in snapshot.live_chunks())
    before = asked_for - sum(changes)
    return last, list(enumerate(accumulate(changes, initial=before)))[1:]
