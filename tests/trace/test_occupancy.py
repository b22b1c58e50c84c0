"""Which addresses were in use when: against a count of each event and each address."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bfc
import bfc.testing
from bfc.errors import TraceError

MIB = 1 << 20


def counted(trace: bfc.Trace, addresses: np.ndarray, shown: bfc.Occupancy) -> np.ndarray:
    """The same map, block by block and cell by cell."""
    columns, rows = shown.cells.shape
    cells = np.zeros((columns, rows))
    starts, places, total = [], [], 0
    for start, size in shown.ranges:
        starts.append(start)
        places.append(total)
        total += size
    live: dict[int, tuple[int, int]] = {}
    event = 0
    edges = np.arange(rows + 1, dtype=np.float64) * shown.cell_bytes
    bytes_of_rows = np.maximum(np.minimum(edges[1:], total) - edges[:-1], 1)
    for column, end in enumerate(shown.ends.tolist()):
        events = end - event
        while event < end:
            op, number = int(trace.op[event]), int(trace.id[event])
            if op == 0:
                at, size = int(addresses[event]), int(trace.size[event])
                if at and size:
                    place = np.searchsorted(starts, at, side="right") - 1
                    first = places[place] + at - starts[place]
                    assert at + size <= starts[place] + shown.ranges[place][1]
                    live[number] = first, first + size
            elif op == 1:
                live.pop(number, None)
            for first, last in live.values():
                covered = np.minimum(edges[1:], last) - np.maximum(edges[:-1], first)
                cells[column] += np.maximum(covered, 0) / bytes_of_rows / events
            event += 1
    return cells


def assert_right(trace: bfc.Trace, addresses: np.ndarray, columns: int, rows: int) -> bfc.Occupancy:
    shown = trace.occupancy(addresses, columns=columns, rows=rows)
    assert shown.cells.shape == (min(columns, len(trace)), rows)
    assert shown.cells.dtype == np.float32
    assert np.allclose(shown.cells, counted(trace, addresses, shown), atol=1e-5)
    ends = [start + size for start, size in shown.ranges]
    assert all(start > end for (start, _), end in zip(shown.ranges[1:], ends[:-1], strict=True))
    assert sum(size for _, size in shown.ranges) <= shown.cell_bytes * rows
    return shown


@given(
    bfc.testing.traces(releases=True),
    st.integers(1, 60),
    st.integers(1, 40),
    st.sampled_from(["", "expandable_segments:True"]),
)
def test_each_cell_is_what_was_in_use_there(trace, columns, rows, options) -> None:
    """Also where some are refused, and where segments come and go."""
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("256 MiB"), settings=options) as allocator:
        addresses = trace.replay(allocator).addresses
    assert_right(trace, addresses, columns, rows)


@given(st.data(), st.integers(1, 30), st.integers(1, 30))
def test_addresses_may_lie_anywhere(data, columns: int, rows: int) -> None:
    """Ranges that are far apart, join later, or lie within one another."""
    count = data.draw(st.integers(1, 20))
    where = st.integers(1, 40).flatmap(lambda n: st.integers(n * MIB, (n + 1) * MIB))
    addresses = [data.draw(where) for _ in range(count)] + [0] * count
    sizes = [data.draw(st.integers(1, 9 * MIB)) for _ in range(count)] + [0] * count
    order = list(range(count))
    trace = bfc.Trace([0] * count + [1] * count, order + order[::-1], sizes)
    assert_right(trace, np.array(addresses, np.uint64), columns, rows)


def test_addresses_that_were_never_used_take_no_row() -> None:
    trace = bfc.Trace([0, 0, 1], [0, 1, 0], [2 * MIB, 2 * MIB, 0])
    shown = assert_right(trace, np.array([4 * MIB, 1 << 44, 0], np.uint64), 3, 2)
    assert shown.ranges == ((4 * MIB, 2 * MIB), (1 << 44, 2 * MIB))
    assert shown.cell_bytes == 2 * MIB
    assert shown.cells.tolist() == [[1, 0], [1, 1], [0, 1]]


def test_a_map_of_nothing_is_empty() -> None:
    assert bfc.Trace([], [], []).occupancy([]).cells.shape == (0, 512)
    refused = bfc.Trace([0, 2], [0, 0], [100, 0]).occupancy([0, 0], columns=9, rows=3)
    assert refused.cells.tolist() == [[0] * 3] * 2
    assert refused.ranges == ()


@pytest.mark.parametrize(("columns", "rows"), [(0, 5), (5, 0), (-1, 5)])
def test_columns_and_rows_are_counts(columns: int, rows: int) -> None:
    with pytest.raises(ValueError, match="counts from 1 on"):
        bfc.Trace([0], [0], [1]).occupancy([256], columns=columns, rows=rows)


@pytest.mark.parametrize("addresses", [[], [1, 2], [-1], ["a"]])
def test_addresses_are_numbers_one_for_each_event(addresses) -> None:
    with pytest.raises(TraceError):
        bfc.Trace([0], [0], [1]).occupancy(addresses)


@pytest.mark.parametrize("rows", [1, 3, 512, 1000, 1500])
def test_the_last_row_is_full_when_all_of_it_is_in_use(rows: int) -> None:
    """It may cover fewer bytes than the others."""
    cells = bfc.Trace([0], [0], [2 << 20]).occupancy([1 << 40], rows=rows).cells[0]
    used = cells[cells > 0]
    assert np.allclose(used, 1.0)
    assert len(used) >= rows * 0.9
