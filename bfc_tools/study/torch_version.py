"""The version of PyTorch whose rules a recorded run is replayed under.

The recording may say it. If not, replays may decide: a block of one version lies elsewhere under
the rules of another, if the driver had handed freed addresses out again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

from bfc.errors import SettingsError, SubAllocatorError
from bfc.libraries import NDArray, np
from bfc.policies._caching import CachingAllocator
from bfc.pytorch.rules import NEWEST, VERSIONS, rules_of
from bfc.pytorch.settings import CachingSettings
from bfc.pytorch.words import CONF, SEGMENT_MAP
from bfc.suballocators import SimulatedSubAllocator
from bfc.trace import Trace

#: Below these there is nothing that a device hands out of itself.
BEYOND = 1 << 62
CAPACITY = 1 << 50
UNTOLD = "the newest: the run does not say which version it had"


def decided(trace: Trace, torch: str | None = None) -> Trace:
    """The trace with the version that it is replayed under as `torch`, and how that was found as
    `meta["torch_version_sign"]`. It is the version that was asked for, or the recorded one, or that
    under whose rules each block lies where it was recorded, or the newest. Raises ValueError if bfc
    does not have the rules of the version `torch`.

    Cost: a replay for each version if the recording does not say and has addresses; else nothing.

    >>> import bfc
    >>> run = decided(bfc.Trace([0], [0], [512]))
    >>> run.torch, run.meta["torch_version_sign"]
    ('2.15', 'the newest: the run does not say which version it had')
    >>> decided(run, "2.11").torch
    '2.11'
    """
    if torch is not None:
        return _with(trace, rules_of(torch).version, "as asked for")
    if trace.torch is not None:
        return trace
    return _with(trace, *_by_replay(trace))


def line_of(trace: Trace) -> str:
    """What the commands print of the version of a trace that `decided` returned."""
    return f"PyTorch {trace.torch}, {trace.meta['torch_version_sign']}"


def _with(trace: Trace, version: str, sign: str) -> Trace:
    meta = trace.meta if isinstance(trace.meta, dict) else {}
    return trace._with_meta({**meta, "torch_version": version, "torch_version_sign": sign})


def _by_replay(trace: Trace) -> tuple[str, str]:
    """The version under whose rules the fewest blocks lie elsewhere than recorded."""
    placed = _placed(trace)
    if placed is None:
        return NEWEST, UNTOLD
    addresses, first, segments, text = placed
    elsewhere: dict[str, int] = {}
    for version in VERSIONS:
        found = _elsewhere(trace, version, addresses, first, segments, text)
        if found is not None:
            elsewhere[version] = found
    if not elsewhere:
        return NEWEST, UNTOLD
    least = min(elsewhere.values())
    best = [version for version, count in elsewhere.items() if count == least]
    if len(best) != 1:
        others = " and ".join(version for version in best if version != NEWEST)
        return NEWEST, f"the newest: {others} would place it alike"
    counts = "; ".join(f"{count} under {version}" for version, count in elsewhere.items())
    blocks = int((trace.op[first:] == 0).sum())
    return best[0], f"a replay has the fewest of {blocks} blocks elsewhere than recorded ({counts})"


def _placed(trace: Trace) -> tuple[NDArray[np.uint64], int, list[tuple[int, int]], str] | None:
    """Where the recorded blocks and segments lay: the address of each event, the first event that
    was recorded, (address, bytes) of the segments in their order, and the text of the settings.
    None if that is not known, or if memory was mapped, which replays elsewhere: an expandable
    segment takes more addresses than those of it that were recorded."""
    meta = trace.meta if isinstance(trace.meta, dict) else {}
    said: Any = meta.get("torch", meta.get("placed"))
    try:
        if any(entry[0] == SEGMENT_MAP for entry in said.get("segment_events", ())):
            return None
        settings = said.get("settings", {})
        text = settings.get(CONF, "")
        segments = [(int(address), int(size)) for _, address, size in said["segments"]]
        addresses = np.array(said["addresses"], np.uint64)
        first = int(said.get("first_recorded_event", 0))
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError):
        return None
    is_whole = len(addresses) == len(trace) and segments and isinstance(text, str)
    are_given = all(address > 0 and 0 < size <= BEYOND - address for address, size in segments)
    if not is_whole or not are_given or _expands(text):
        return None
    return addresses, first, segments, text


def _expands(text: str) -> bool:
    try:
        return CachingSettings().apply(text, torch=NEWEST).expandable_segments
    except SettingsError:
        return False


def _elsewhere(
    trace: Trace,
    version: str,
    addresses: NDArray[Any],
    first: int,
    segments: Iterable[tuple[int, int]],
    text: str,
) -> int | None:
    """How many recorded blocks lie elsewhere under a version's rules; None if it does not have the
    settings of the recording, or cannot use its segments."""
    try:
        settings = CachingSettings().apply(text, strict=True, torch=version)
    except SettingsError:
        return None
    source = _Recorded(segments)
    try:
        with CachingAllocator(source, settings=settings, strict=True, torch=version) as allocator:
            found = trace.replay(allocator).addresses
    except SubAllocatorError:  # an address of a segment that no device gives
        return None
    return int(((found != addresses) & (trace.op == 0))[first:].sum())


class _Recorded(SimulatedSubAllocator):
    """A device that hands out recorded segments, those of each size in their order. Where there is
    none left, it hands out addresses that no recording has."""

    def __init__(self, segments: Iterable[tuple[int, int]]) -> None:
        super().__init__(CAPACITY, base=BEYOND)
        self._left: defaultdict[int, deque[int]] = defaultdict(deque)
        for address, size in segments:
            self._left[size].append(address)
        self._own: dict[int, int] = {}  # where this device would have placed a recorded segment

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        own = super().alloc(alignment, nbytes)
        left = self._left[nbytes]
        if own is None or not left:
            return own
        self._own[left[0]] = own[0]
        return left.popleft(), nbytes

    def free(self, address: int, nbytes: int) -> None:
        super().free(self._own.pop(address, address), nbytes)
