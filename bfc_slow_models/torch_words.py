"""PyTorch's words: what its caching allocator counts and says, and what it is told.

They are written out here, as are the sizes in `torch_model.py`: a model that took them from the
allocator would not notice if one were wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

OUT_OF_MEMORY = 2

#: One entry of a device's log: what was called, and two figures of it.
Call = tuple[str, int, int | None]
#: An operation's name and arguments, as in the method of that name.
Operation = tuple[Any, ...]

GROUPS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
POOLS = ("all", "small_pool", "large_pool")
FIELDS = ("current", "peak", "allocated", "freed")
COUNTERS = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "max_split_size",
)
#: The keys of `TorchPeer.stats`, those of `torch.cuda.memory_stats`. 2.15 has `REJECTIONS`, too,
#: and the keys of `pool_stats` for each private pool.
STATS = (
    *(f"{group}.{pool}.{field}" for group in GROUPS for pool in POOLS for field in FIELDS),
    *(f"oversize_{what}.{field}" for what in ("allocations", "segments") for field in FIELDS),
    *COUNTERS,
)
REJECTIONS = "num_oom_rejections"
ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
    "oom",
)

Pool = tuple[int, int]

DEFAULT_POOL: Pool = (0, 0)


def pool_stats(pool: Pool) -> list[str]:
    """The keys of a private pool's reserved bytes."""
    name = f"reserved_bytes_by_private_pools.{pool[0]}_{pool[1]}"
    return [f"{name}.{kind}.{field}" for kind in POOLS for field in FIELDS]


@dataclass(frozen=True)
class Failure:
    """What upstream threw. `kind`: "oom", "value" (ValueError in Python), "driver" (the device
    answered with an error), "internal" (any other of its own classes: RuntimeError in Python), or
    "other" (a class of C++'s library)."""

    kind: str
    text: str


class Block(TypedDict):
    """One block of a segment. The requested size of an inactive one is stale."""

    address: int
    size: int
    requested_size: int
    state: str


class Segment(TypedDict):
    """One segment of `TorchPeer.snapshot`, in the words of `torch.cuda.memory_snapshot`."""

    address: int
    total_size: int
    requested_size: int
    allocated_size: int
    active_size: int
    stream: int
    segment_type: str
    is_expandable: bool
    segment_pool_id: Pool
    blocks: list[Block]


class TraceEntry(TypedDict):
    """One entry of `TorchPeer.trace`. For "oom", `addr` is what the device has free."""

    action: str
    addr: int
    size: int
    stream: int
    pool_id: Pool
