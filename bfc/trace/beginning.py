"""What was live when a recording began.

`Trace.from_torch` rebuilds it with events of its own, in front of those that were recorded: in each
segment, every block and every gap between blocks is allocated, and then the gaps are freed. So the
blocks lie where they lay. The gaps were never asked for: no figure counts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bfc.errors import SettingsError
from bfc.libraries import NDArray, np
from bfc.policies._caching import CachingAllocator
from bfc.pytorch.settings import CachingSettings
from bfc.pytorch.words import CONF, SEGMENT_ALLOC

if TYPE_CHECKING:
    from bfc.allocators._allocator import Allocator

ALLOCATE, FREE, RELEASE = 0, 1, 2
#: Where a replay puts what was live when the recording began.
AS_RECORDED, AS_PLACED = "as recorded", "as placed"


@dataclass(frozen=True)
class Beginning:
    """What a recording says of its beginning.

    Attributes
    ----------
    events : int
        How many events rebuild it; 0 where nothing is rebuilt.
    settings : str or None
        The text of PyTorch's settings; None where the recording does not say.
    reserved : int
        The bytes in segments when the recording began.
    """

    events: int = 0
    settings: str | None = None
    reserved: int = 0

    @classmethod
    def of(cls, meta: Any, events: int) -> Beginning:
        """What the `meta` of a trace of so many events says. What is not as `Trace.from_torch`
        writes it says nothing."""
        torch = meta.get("torch") if isinstance(meta, dict) else None
        first = torch.get("first_recorded_event") if isinstance(torch, dict) else None
        if type(first) is not int or not 0 < first <= events:
            return cls()
        assert isinstance(torch, dict)
        named = torch.get("settings")
        text = named.get(CONF) if isinstance(named, dict) else None
        text = text if isinstance(text, str) else None
        return cls(first, text, reserved_at_the_start(torch) or 0)

    def as_meta(self) -> dict[str, Any]:
        """A `meta` that says this and no more."""
        if not self.events:
            return {}
        said: dict[str, Any] = {"first_recorded_event": self.events, "segment_events": []}
        said["segments"] = [[0, 0, self.reserved]]
        said["settings"] = {} if self.settings is None else {CONF: self.settings}
        return {"torch": said}

    def may_lie_as_recorded(self, allocator: Allocator) -> bool:
        """Whether an allocator can have the recorded layout: one of PyTorch's policy with the
        recorded settings, which holds nothing yet and may take as much as the run had."""
        if not self.events or not isinstance(allocator, CachingAllocator) or allocator.stitch:
            return False
        stats = allocator.stats()
        if stats.pool_bytes or stats.bytes_limit < self.reserved:
            return False
        try:
            recorded = CachingSettings().apply(self.settings or "", torch=allocator.torch)
        except SettingsError:
            return False
        now = allocator.snapshot().settings
        return now is not None and _placement(recorded) == _placement(now)


def _placement(settings: CachingSettings) -> tuple[object, ...]:
    """The settings that decide where a block lies."""
    return (
        settings.max_split_size,
        settings.max_non_split_rounding,
        settings.garbage_collection_threshold,
        settings.roundup_power2_divisions,
        settings.large_segment_size,
        settings.expandable_segments,
    )


def reserved_at_the_start(torch: dict[str, Any]) -> int | None:
    """The bytes in segments before the first recorded event: of the segments that are listed, all
    but those that the history takes. None if what is listed is not what `Trace.from_torch` lists.
    """
    try:
        sizes = [int(entry[2]) for entry in torch["segments"]]
        taken = sum(entry[0] == SEGMENT_ALLOC for entry in torch["segment_events"])
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return None
    return sum(sizes[: len(sizes) - taken]) if taken <= len(sizes) else None


def frees_of(op: NDArray[np.uint8], numbers: NDArray[np.uint32]) -> NDArray[np.int64]:
    """The event that frees what an event allocates; -1 where nothing does, and for other events.
    `op` is what each event does, and `numbers` the number of the allocation that it makes or frees.
    Cost: a sort of the numbers."""
    named = np.flatnonzero(op != RELEASE)
    # In a stable sort by number each free stands right behind its allocation.
    order = named[np.argsort(numbers[named], kind="stable")]
    frees = np.flatnonzero(op[order] == FREE)
    freed_at = np.full(len(op), -1, np.int64)
    freed_at[order[frees - 1]] = order[frees]
    return freed_at


def gaps_in(freed_at: NDArray[np.int64], first: int) -> NDArray[np.bool_]:
    """Which of the first events allocate and free gaps: what they allocate and free themselves."""
    found = np.zeros(len(freed_at), bool)
    made = np.flatnonzero((freed_at[:first] >= 0) & (freed_at[:first] < first))
    found[made] = found[freed_at[made]] = True
    return found
