from typing import Any

from bfc.snapshots.columns import HistoryColumns, RegionColumns

class SharedFrames:
    """Makes lists of frames; equal ones are one list, which keeps a long history short."""

class Columns:
    """The rows of a snapshot, and which of the history's the viewer can undo one by one from the final regions.

    It stops with an error where an undone entry finds no segment, or no block. So an entry about memory that is in no
    segment at its time is left out (a pool's own snapshot shows its segments only; kinds of entries may not have been
    recorded), and where the history contradicts the regions, all before that place is.
    """

    def __init__(self, regions: RegionColumns, history: HistoryColumns) -> None: ...
    def segments(self, device: int, shared: SharedFrames) -> list[dict[str, Any]]:
        """The dicts of the segments."""

    def blocks(self, region: int, shared: SharedFrames) -> list[dict[str, Any]]:
        """The dicts of a segment's blocks."""

    def entries(self, shared: SharedFrames) -> list[dict[str, Any]]:
        """The dicts of the entries that are kept, oldest first. Their time never decreases: if the clock was set back,
        it stands still until the clock has caught up.
        """
