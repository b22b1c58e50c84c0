"""Allocators to try, as texts that can be sent to other processes, and one replay under one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bfc.allocators._allocator import Allocator
from bfc.errors import SettingsError
from bfc.policies._bfc import BFCAllocator
from bfc.policies._caching import CachingAllocator
from bfc.pytorch.rules import NEWEST
from bfc.pytorch.settings import CachingSettings
from bfc.trace import Trace
from bfc_tools.study.counting import (
    Counted,
    CountedPages,
    NoAddressesError,
    TooManyPagesError,
    device_for,
)

#: PyTorch's policy, and the policies that no PyTorch has.
CACHING, STITCHED, BFC, PAGES = "caching", "caching+stitch", "bfc", "bfc+virtual_memory"
#: The first of them with a plan of the run.
PLANNED = "caching+plan"

#: The values of PyTorch's settings that are tried, by key.
VALUES: dict[str, tuple[str, ...]] = {
    "max_split_size_mb": ("21", "32", "48", "64", "96", "128", "192", "256", "512", "1024"),
    "roundup_power2_divisions": ("2", "4", "8", "16", "32"),
    "large_segment_size_mb": ("12", "32", "64", "128", "256"),
    "garbage_collection_threshold": ("0.6", "0.8", "0.95"),
    "max_non_split_rounding_mb": ("64", "128", "512"),
    "expandable_segments": ("True",),
}
#: Those of the full grid. A value of None leaves the key out.
GRID: dict[str, tuple[str | None, ...]] = {
    "max_split_size_mb": (None, "21", "32", "64", "128", "256", "512", "1024"),
    "roundup_power2_divisions": (None, "2", "4", "8", "16", "32"),
    "large_segment_size_mb": (None, "12", "32", "64", "256"),
    "garbage_collection_threshold": (None, "0.8"),
    "max_non_split_rounding_mb": (None, "128"),
    "expandable_segments": (None, "True"),
}
#: The most pages that a replay of a search maps at a time: 512 GiB of the smallest. Each costs some
#: microseconds, and so a replay takes time by its events, not by the bytes of its blocks.
MOST_PAGES = 1 << 18
#: What has no effect without another key.
NEEDS = {"max_non_split_rounding_mb": "max_split_size_mb"}
#: PyTorch collects nothing if there is no limit, and a fraction of 1 sets none.
COLLECTS = "garbage_collection_threshold"
WITH_A_LIMIT = "per_process_memory_fraction:0.99"


#: What PyTorch's own error text advises.
EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True, order=True)
class Point:
    """A policy with its settings, as text."""

    policy: str  # "caching", "caching+stitch", "bfc" or "bfc+virtual_memory"
    #: For the first two what PYTORCH_CUDA_ALLOC_CONF takes; for the others arguments of
    #: `BFCAllocator`, such as "page_size=2MiB".
    settings: str

    @property
    def is_pytorch(self) -> bool:
        """Whether a user of PyTorch can have it without bfc."""
        return self.policy == CACHING

    @property
    def name(self) -> str:
        """What a row of a table is called."""
        if self.is_pytorch:
            return self.settings or "(the defaults)"
        return f"{self.policy} {self.settings}".strip()

    def allocator(self, source: Counted, torch: str = NEWEST) -> Allocator:
        """A new allocator over `source`. Rows of PyTorch's policy refuse what that version of
        PyTorch refuses."""
        if self.policy == CACHING:
            return CachingAllocator(source, settings=self.settings, strict=True, torch=torch)
        if self.policy == STITCHED:
            options: dict[str, Any] = {"settings": self.settings, "stitch": True, "torch": torch}
            return CachingAllocator(source, **options)
        name, _, value = self.settings.partition("=")
        if self.policy == BFC:
            return BFCAllocator(source, allow_growth=name == "allow_growth", strict=True)
        return BFCAllocator(source, virtual_memory=True, page_size=value or None)


@dataclass(frozen=True)
class Outcome:
    """What one replay on a device came to. Sizes are in bytes."""

    refused: int  # the allocations that were refused
    peak_reserved: int  # the most that was taken from the device
    #: The calls that took memory or gave it back, refused ones included, without those of closing
    #: the allocator.
    driver_calls: int
    peak_live: int  # the most that was asked for and not freed
    #: Where the replay put what was live when the recording began, as `Replay.beginning` says it.
    beginning: str = ""
    #: Whether it was given up, as it would have mapped too many pages: nothing else is known.
    given_up: bool = False

    @property
    def completes(self) -> bool:
        """Whether nothing was refused."""
        return not self.refused and not self.given_up


def replay(
    trace: Trace, point: Point, capacity: int, most_pages: int | None = MOST_PAGES
) -> Outcome:
    """One replay on a simulated device of so many bytes, under the rules of the version of PyTorch
    that the trace has (`Trace.torch`), or of the newest. It is given up where it maps more than
    `most_pages` at a time."""
    if point.policy in (PAGES, STITCHED) and capacity < CountedPages.mapping_granularity:
        return _nothing_served(trace)  # there is not one page
    source = device_for(trace, lambda: CountedPages(capacity, most_pages=most_pages))()
    try:
        with point.allocator(source, trace.torch or NEWEST) as allocator:
            result = trace.replay(allocator)
            calls = source.driver_calls
    except TooManyPagesError:
        return Outcome(0, 0, 0, 0, given_up=True)
    except NoAddressesError:
        return _nothing_served(trace)
    peaks = result.peak_bytes_reserved, calls, result.peak_bytes_live
    return Outcome(result.failed, *peaks, result.beginning)


def _nothing_served(trace: Trace) -> Outcome:
    return Outcome(int((trace.size[trace.op == 0] > 0).sum()), 0, 0, 0)


# Which points there are ----------------------------------------------------------------------


def caching(values: Mapping[str, str | None]) -> Point | None:
    """A point of PyTorch's policy; None if PyTorch refuses the settings, or a key has no effect."""
    given = {key: value for key, value in values.items() if value is not None}
    if any(key in given and needed not in given for key, needed in NEEDS.items()):
        return None
    text = ",".join(f"{key}:{given[key]}" for key in VALUES if key in given)
    if COLLECTS in given:
        text += "," + WITH_A_LIMIT
    try:
        CachingSettings().apply(text)
    except SettingsError:
        return None
    return Point(CACHING, text)


def values_of(point: Point) -> dict[str, str | None]:
    """The keys and values of a point that `caching` made; for another point, whatever looks like
    them."""
    pairs = (item.split(":", 1) for item in point.settings.split(",") if ":" in item)
    return {key: value for key, value in pairs if key in VALUES}


def one_key_at_a_time() -> dict[str, list[dict[str, str]]]:
    """By key, the settings that PyTorch takes with this key alone."""
    return {
        key: [{key: value} for value in values if caching({key: value}) is not None]
        for key, values in VALUES.items()
    }


def grid() -> Iterator[Point]:
    """Every combination of the values in GRID that PyTorch takes."""
    for values in itertools.product(*GRID.values()):
        point = caching(dict(zip(GRID, values, strict=True)))
        if point is not None:
            yield point


def ours() -> list[Point]:
    """The policies that PyTorch does not have."""
    return [
        Point(STITCHED, ""),
        Point(PAGES, ""),
        Point(PAGES, "page_size=2MiB"),
        Point(BFC, ""),
        Point(BFC, "allow_growth=True"),
    ]
