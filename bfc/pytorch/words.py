"""PyTorch's names of counters, of the actions in a history, and of the states of a block.

The statistics, the writer of snapshots and their reader share them.
"""

from __future__ import annotations

#: The variable of PyTorch, under whose name a snapshot has the text of the settings.
CONF = "PYTORCH_CUDA_ALLOC_CONF"

#: The actions on a block, and on a segment.
BLOCK_ACTIONS = ALLOC, FREE_REQUESTED, FREE_COMPLETED = (
    "alloc",
    "free_requested",
    "free_completed",
)
SEGMENT_ALLOC, SEGMENT_FREE = "segment_alloc", "segment_free"
SEGMENT_MAP, SEGMENT_UNMAP = "segment_map", "segment_unmap"
SEGMENT_ACTIONS = (SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP)
#: Whether the bytes of such an entry come to the reserved ones, or go.
SEGMENT_CHANGES = {SEGMENT_ALLOC: 1, SEGMENT_MAP: 1, SEGMENT_FREE: -1, SEGMENT_UNMAP: -1}
SNAPSHOT, OOM, ANNOTATE = "snapshot", "oom", "annotate"
#: The actions of bfc's histories, in the order of `native/history.hpp`.
ACTIONS = (
    *BLOCK_ACTIONS,
    *(SEGMENT_ALLOC, SEGMENT_FREE, SNAPSHOT, OOM, SEGMENT_MAP, SEGMENT_UNMAP, ANNOTATE),
)

#: The frames of memory that an allocator of bfc gave back: it was told to empty the cache, or not.
OUR_FILE, OUR_RELEASE, OUR_OWN = "bfc", "empty_cache", "retry or collection"
#: The frame that stands behind OUR_RELEASE where only the pool of a MemPool was emptied.
OUR_POOL = "MemPool"

#: The first number of a pool's id where bfc keeps the memory of a tag apart (`Allocator.tag`).
OUR_TAGS = 1 << 62

#: What the entries of bfc with the action "annotate" say of private pools: a graph is captured, or
#: a scope diverts allocations; nobody holds the pool any more; and a stream with mapped memory
#: belongs to the capture into the pool, or does so no more.
POOL_MARKS = (
    CAPTURE_BEGINS,
    CAPTURE_ENDS,
    SCOPE_BEGINS,
    SCOPE_ENDS,
    LET_GO,
    STREAM_JOINS,
    STREAM_LEAVES,
) = (
    "bfc: a capture into the pool begins",
    "bfc: a capture into the pool ends",
    "bfc: a scope of the pool begins",
    "bfc: a scope of the pool ends",
    "bfc: the pool is let go",
    "bfc: a stream is captured into the pool",
    "bfc: a stream is captured no more",
)
#: What the entries of bfc with the action "annotate" say of a tag, before its name: the entry's
#: bytes went back to the device, or came.
SLEEPS, WAKES = "bfc: falls asleep: ", "bfc: wakes: "
#: What a replay does with a pool beside what the marks say: it holds the pool from now on.
HOLD = len(POOL_MARKS)


def is_mark(text: object) -> bool:
    """Whether what an annotation says was written by bfc itself."""
    return text in POOL_MARKS or (isinstance(text, str) and text.startswith((SLEEPS, WAKES)))


ALLOCATED, PENDING, INACTIVE = "active_allocated", "active_pending_free", "inactive"
#: The states of a block, by what `ChunkInfo.state` calls them.
STATES = {"in use": ALLOCATED, "waiting": PENDING, "free": INACTIVE, "leaving": INACTIVE}

#: What `memory_stats()` counts, in the order of `native/usage.hpp`: in each pool, and in each of
#: these fields.
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
FIELDS = ("current", "peak", "allocated", "freed")

#: What `host_memory_stats()` counts in the same fields, and what it times in other fields.
HOST_GROUPS = ("allocations", "allocated_bytes", "active_requests", "active_bytes")
HOST_TIMES = ("host_alloc_time", "host_free_time")
TIME_FIELDS = ("total", "max", "min", "count", "avg")
