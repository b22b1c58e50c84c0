"""The ranges that a program named while it was recorded: `record_function`, steps of the profiler.

PyTorch writes one entry where a range begins, and one where it ends, each with a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bfc.libraries import NDArray, np

#: The most entries that are read, and the longest name: names are those of lines in a program.
MOST_RANGES, LONGEST_NAME = 1 << 16, 200

#: A name, and the times at which its range begins and ends, in microseconds.
Range = tuple[str, int, int]


def ranges_of(content: Any, device: int) -> list[Range]:
    """Those of a device, in the order in which they end. What is not such an entry is left out."""
    entries = content.get("external_annotations") if isinstance(content, dict) else None
    found: list[Range] = []
    open_: dict[str, list[int]] = {}
    for entry in entries[:MOST_RANGES] if isinstance(entries, list | tuple) else ():
        if not isinstance(entry, dict) or entry.get("device", device) != device:
            continue
        name, stage, time_us = (entry.get(key) for key in ("name", "stage", "time_us"))
        if type(name) is not str or type(time_us) is not int or not 0 <= time_us < 1 << 63:
            continue
        begun = open_.setdefault(name[:LONGEST_NAME], [])
        if stage == "START":
            begun.append(time_us)
        elif stage == "END" and begun:
            found.append((name[:LONGEST_NAME], begun.pop(), time_us))
    return found


def in_events(ranges: Sequence[Range], time_us: NDArray[np.uint64]) -> list[list[Any]]:
    """The same with the numbers of events in place of times, as a trace's `meta` has them."""
    times = np.maximum.accumulate(time_us.astype(np.int64))
    begins, ends = (np.searchsorted(times, [one[at] for one in ranges]).tolist() for at in (1, 2))
    return [
        [name, begin, end]
        for (name, *_), begin, end in zip(ranges, begins, ends, strict=True)
        if begin < end
    ]
