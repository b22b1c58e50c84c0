from typing import Any

from bfc.snapshots.columns import HistoryColumns, RegionColumns

class SharedFrames:
    """Makes lists of frames. Equal lists are one object, which keeps a long history small."""

class Columns:
    """The rows of a snapshot, and the entries of its history that the viewer can undo from the final regions on.

    The viewer stops with an error if it undoes an entry and finds no segment, or no block. So an entry about memory
    that was in no segment at that time is left out. (A pool's own snapshot has its segments only, and some kinds of
    entries may not have been recorded.) If an entry contradicts the regions, it and all earlier entries are left out.
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
