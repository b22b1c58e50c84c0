"""Results as tables of pandas."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

import bfc
from bfc.study import compare

TRACE = bfc.Trace([0, 0, 1], [0, 1, 0], [1000, 300, 0], owner=[1, 0, 0], owners=["", "a"])


@pytest.fixture(scope="module", autouse=True)
def pandas() -> None:
    pytest.importorskip("pandas")  # not while tests are collected: it takes long


def replayed(samples: int | None = None) -> tuple[bfc.Replay, bfc.CachingAllocator]:
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    return TRACE.replay(allocator, samples=samples), allocator


def timeline() -> bfc.Timeline:
    found = replayed(9)[0].timeline
    assert found is not None
    return found


#: What has rows, and what stands in the first column and in another.
TABLES: list[tuple[Callable[[], Any], list[Any], str, list[Any]]] = [
    (timeline, [0, 1, 2], "live", [1000, 1300, 300]),
    (lambda: replayed()[0], [3], "peak_bytes_live", [1300]),
    (lambda: replayed()[1].snapshot(), [1 << 40, (1 << 40) + 1024, (1 << 40) + 1536], "state", []),
    (lambda: replayed()[1].leaks(), [(1 << 40) + 1024], "nbytes", [300]),
    (lambda: compare(TRACE, {"x": bfc.CachingAllocator}, "1 GiB"), [""], "policy", ["x"]),
]


@pytest.mark.parametrize(("make", "first", "name", "column"), TABLES)
def test_rows_are_a_frame(make: Any, first: list[Any], name: str, column: list[Any]) -> None:
    frame = make().to_frame()
    assert frame[frame.columns[0]].tolist() == first
    assert frame[name].tolist() == (column or ["free", "in use", "free"])


def test_a_diff_is_a_frame_of_each_kind_and_no_rows_have_columns_all_the_same() -> None:
    found = bfc.diff(TRACE, bfc.Trace([], [], []))
    assert found.peak.to_frame("owner")["bytes_a"].tolist() == [300, 1000]
    assert list(bfc.Leaks().to_frame().columns) == ["ptr", "nbytes", "stream", "frames", "owner"]


def test_a_timeline_that_stays_numbers_keeps_its_type() -> None:
    assert set(map(str, timeline().to_frame().dtypes)) == {"uint64"}


def test_without_pandas_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for make, *_ in TABLES:
        with pytest.raises(bfc.DeviceUnavailableError, match="try: pip install pandas"):
            make().to_frame()
