"""How a fixture ends the allocators that it made for a test."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import bfc


def close_all(allocators: Iterable[bfc.Allocator]) -> None:
    """Checks and closes each allocator. Its source must then have all of its memory back.

    Garbage is collected first: buffers in cycles count as live until then.
    """
    gc.collect()
    for allocator in allocators:
        allocator.check()
        allocator.close()
        assert allocator.sub_allocator.live_bytes == 0, "regions were leaked"
