"""What the colours of a map tell apart: owners, lines of the program, or what memory is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bfc.libraries import NDArray, np
from bfc.trace import Occupancy, Trace
from bfc_tools.browser.encoding import packed
from bfc_tools.browser.kinds import KINDS, kinds_of, named_owners
from bfc_tools.browser.lifetimes import Lives
from bfc_tools.study.source_lines import Lines

if TYPE_CHECKING:
    Steps = tuple[NDArray[np.int64], NDArray[np.float64]]

#: How many groups have a colour of their own, and the number of those that have none.
MOST_COLOURS = 8
REST = MOST_COLOURS
#: How many allocations are painted at once.
AT_ONCE = 100_000


@dataclass(frozen=True, eq=False)
class Groups:
    """What each allocation of a trace belongs to."""

    #: The line of the program that it counts for, as a number of the trace's frames; -1: none.
    line: NDArray[np.int64]
    kind: NDArray[np.uint8]  # what it is for (`bfc_tools.browser.kinds`)
    said: NDArray[np.bool_]  # whether its owner says what it is for
    #: By "owner", "line" and "kind", where there are such: the groups with a colour, the first with
    #: the first one.
    painted: dict[str, list[int]]
    #: By what the page is coloured at first: "owner", "line" or "lane", for streams and pools.
    opens: str

    def shades(self, lives: Lives) -> dict[str, NDArray[np.int64]]:
        """The colour of each allocation, by what is told apart; `REST` for all without one."""
        columns: dict[str, NDArray[Any]] = {
            "owner": lives.owner,
            "line": self.line,
            "kind": self.kind,
        }
        return {name: _places(columns[name], groups) for name, groups in self.painted.items()}


def groups_of(trace: Trace, lives: Lives, peak: int) -> Groups:
    """What each allocation of a trace belongs to. Those groups have a colour that have most bytes
    after the event `peak`, and then those that have most at any time."""
    line = Lines(trace).of(lives.stack)
    kind, said = kinds_of(trace, lives)
    there, named = lives.live_after(peak), named_owners(trace)
    painted: dict[str, list[int]] = {}
    if any(trace.owners):
        nobody = [at for at, name in enumerate(trace.owners) if not name]
        painted["owner"] = _largest(lives.owner, lives, there, nobody)
    if (line >= 0).any():
        painted["line"] = _largest(line, lives, there, [])
    if (kind < len(KINDS) - 1).any():
        painted["kind"] = list(range(len(KINDS) - 1))
    by_name = bool(np.isin(lives.owner, list(named)).any())
    opens = "owner" if by_name else "line" if "line" in painted else "lane"
    return Groups(line, kind, said, painted, opens)


def _largest(
    key: NDArray[np.int64], lives: Lives, there: NDArray[np.int64], without: list[int]
) -> list[int]:
    size = lives.size.astype(np.float64)
    ever = np.bincount(key + 1, size)
    most = np.bincount(key[there] + 1, size[there], len(ever))
    order = np.lexsort((-ever, -most)) - 1
    return [at for at in order.tolist() if at >= 0 and at not in without and ever[at + 1]][
        :MOST_COLOURS
    ]


def _places(key: NDArray[Any], groups: list[int]) -> NDArray[np.int64]:
    """The place of each key among the groups; `REST` for one that is not there."""
    # The last is for the key -1.
    table: NDArray[np.int64] = np.full(int(key.max(initial=0)) + 2, REST, np.int64)
    for place, group in enumerate(groups[:MOST_COLOURS]):
        if group < len(table) - 1:
            table[group] = place
    return np.take(table, key)


def paint(
    found: Occupancy,
    shades: dict[str, NDArray[np.int64]],
    lives: Lives,
    addresses: NDArray[np.uint64],
) -> dict[str, Any]:
    """The colour of each cell of a map: that of which it holds most, over its rows and events.

    `shades` are the colours of the allocations (`Groups.shades`), and `addresses` where they were
    placed: 0 for those that were refused. Returns, by the same names, packed u8 in rows of columns:
    a colour plus one, or 0 for a free cell.

    Cost: sixteen sums over the allocations and a few passes over the cells for each colour.
    """
    columns, rows = found.cells.shape
    chosen, across, along = _corners(found, lives, addresses)
    answer = {}
    for name, shade in shades.items():
        best, which = np.zeros((rows, columns)), np.zeros((rows, columns), np.uint8)
        mine = shade[chosen]
        for colour in range(REST + 1):
            of_it = np.flatnonzero(mine == colour)
            if not len(of_it):
                continue
            sums = np.zeros((rows + 2) * (columns + 2))
            for start in range(0, len(of_it), AT_ONCE):
                part = of_it[start : start + AT_ONCE]
                row, height = across[0][:, None, part], across[1][:, None, part]
                column, width = along[0][None, :, part], along[1][None, :, part]
                corners, areas = row * (columns + 2) + column, height * width
                sums += np.bincount(corners.ravel(), areas.ravel(), len(sums))
            area = sums.reshape(rows + 2, columns + 2).cumsum(0).cumsum(1)[:rows, :columns]
            more = area > best + 1e-6
            best[more], which[more] = area[more], colour + 1
        answer[name] = packed(which)
    return answer


def _corners(
    found: Occupancy, lives: Lives, addresses: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], Steps, Steps]:
    """Which allocations lie on the map, and the steps of their rectangles in rows and columns."""
    columns, rows = found.cells.shape
    starts = np.array([start for start, _ in found.ranges], np.uint64)
    sizes = np.array([size for _, size in found.ranges], np.uint64)
    laid = np.cumsum(sizes) - sizes
    chosen = np.flatnonzero((addresses > 0) & (lives.size > 0))
    range_ = np.searchsorted(starts, addresses[chosen], side="right") - 1
    low = (laid[range_] + (addresses[chosen] - starts[range_])).astype(np.float64)
    high = low + lives.size[chosen]
    across = _steps(low / found.cell_bytes, high / found.cell_bytes, rows)
    edges = np.concatenate([[0], found.ends.astype(np.float64)])
    died = np.where(lives.died[chosen] < 0, edges[-1], lives.died[chosen])
    places = np.arange(columns + 1, dtype=np.float64)
    born = np.interp(lives.born[chosen].astype(np.float64), edges, places)
    return chosen, across, _steps(born, np.interp(died, edges, places), columns)


def _steps(low: NDArray[np.float64], high: NDArray[np.float64], count: int) -> Steps:
    """Where the share of a cell that lies between two places changes, and by how much: four steps
    for each pair of places."""
    first = np.minimum(low.astype(np.int64), count - 1)
    last = np.minimum(high.astype(np.int64), count)
    begins, ends = first + 1 - low, last + 1 - high
    return (
        np.array([first, first + 1, last, last + 1]),
        np.array([begins, 1 - begins, -ends, ends - 1]),
    )
