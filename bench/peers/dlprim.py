"""A model of the cache in dlprim's back end for PyTorch on OpenCL: every size becomes a power of
two, a freed buffer serves requests of that power alone, and nothing is split or given back."""

from __future__ import annotations

from collections import Counter

import bfc


class PowersOfTwo:
    """The cache, in bytes. It has no addresses: no request ever depends on one."""

    def __init__(self) -> None:
        self.reserved = self.peak_live = self.live = 0
        self._free: Counter[int] = Counter()

    def allocate(self, nbytes: int) -> int:
        """Takes a buffer. Returns its size, by which it is freed."""
        size = 1 << max(0, nbytes - 1).bit_length()
        if self._free[size]:
            self._free[size] -= 1
        else:
            self.reserved += size
        self.live += nbytes
        self.peak_live = max(self.peak_live, self.live)
        return size

    def free(self, size: int, nbytes: int) -> None:
        self._free[size] += 1
        self.live -= nbytes


def replay(trace: bfc.Trace) -> PowersOfTwo:
    """The cache after a trace. What the trace gives back to the driver stays: it has no call for it
    but one that drops all."""
    cache = PowersOfTwo()
    live: dict[int, tuple[int, int]] = {}
    events = zip(trace.op.tolist(), trace.id.tolist(), trace.size.tolist(), strict=True)
    for op, number, nbytes in events:
        if op == 0 and nbytes:
            live[number] = cache.allocate(nbytes), nbytes
        elif op == 1 and number in live:
            cache.free(*live.pop(number))
    return cache
