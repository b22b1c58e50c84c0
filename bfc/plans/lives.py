"""When blocks live."""

from __future__ import annotations

from dataclasses import dataclass

from bfc.libraries import NDArray, np
from bfc.plans._planning import find_overlap


@dataclass(frozen=True)
class Lives:
    """The pieces of time in which blocks live. A piece ends before the moment of its death, so that
    a block that dies when another is born does not meet it. A block has at least one piece, and
    its pieces do not overlap."""

    block: NDArray[np.int64]  # whose piece it is, in rising order
    birth: NDArray[np.int64]
    death: NDArray[np.int64]

    def changes(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The births and deaths in the order of time, deaths first where both come at once: the
        piece that each belongs to, and whether it is a birth."""
        pieces = len(self.block)
        moments = np.concatenate([self.death, self.birth])
        # Stable: the deaths stand in front.
        order = np.argsort(moments, kind="stable")
        return order % max(pieces, 1), order >= pieces

    def most(self, size: NDArray[np.int64]) -> int:
        """The most that lives at once: no layout needs less."""
        piece, is_birth = self.changes()
        change = size[self.block[piece]]
        return int(np.cumsum(np.where(is_birth, change, -change)).max(initial=0))

    def sections(self) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
        """Each piece as sections of time, and how many sections there are. All births between two
        deaths are in one section: what lies between them does not change which blocks meet."""
        piece, is_birth = self.changes()
        opens = is_birth.copy()
        opens[1:] &= ~is_birth[:-1]
        section = np.cumsum(opens) - 1
        begin = np.empty(len(self.block), np.int32)
        end = np.empty(len(self.block), np.int32)
        begin[piece[is_birth]] = section[is_birth]
        end[piece[~is_birth]] = section[~is_birth] + 1
        return begin, end, int(section[-1]) + 1 if len(section) else 0

    def overlap(
        self, offset: NDArray[np.uint64], size: NDArray[np.uint64]
    ) -> tuple[int, int] | None:
        """Two blocks that have an address in common while both live, or None. It does not use what
        finds places. Cost: O(n log n)."""
        piece, is_birth = self.changes()
        blocks = self.block[piece].astype(np.uint32)
        found: tuple[int, int] | None = find_overlap(
            blocks, is_birth.astype(np.uint8), offset, size
        )
        return found
