"""The report of a refused request: what is in the memory."""

from __future__ import annotations

import gc
import itertools
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from memory_hooks import call_without_memory

import bfc
from bfc.snapshots import refusal

KIB, MIB = 1 << 10, 1 << 20

KINDS: dict[str, Callable[[], Any]] = {
    "bfc": lambda: bfc.BFCAllocator(bfc.SimulatedSubAllocator("64 MiB"), allow_growth=True),
    "pages": lambda: bfc.BFCAllocator(bfc.SimulatedSubAllocator("64 MiB"), virtual_memory=True),
    "caching": lambda: bfc.CachingAllocator(bfc.SimulatedSubAllocator("64 MiB")),
    "expandable": lambda: bfc.CachingAllocator(
        bfc.SimulatedSubAllocator("64 MiB"), settings="expandable_segments:True"
    ),
    "stitch": lambda: bfc.CachingAllocator(bfc.SimulatedSubAllocator("64 MiB"), stitch=True),
    "pinned": lambda: bfc.PinnedAllocator(bfc.HostSubAllocator("64 MiB")),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Reports are full, and files go to a folder of the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(refusal, "_file_numbers", itertools.count(1))
    monkeypatch.delenv("BFC_OOM_REPORT", raising=False)
    bfc.set_oom_report("full")
    yield tmp_path
    bfc.set_oom_report(None)


def refused(allocator: Any, nbytes: int = 1 << 40) -> bfc.OutOfMemoryError:
    with pytest.raises(bfc.OutOfMemoryError) as raised:
        allocator.allocate(nbytes)
    return raised.value


def table(text: str, heading: str) -> list[str]:
    """The rows of a table of a report."""
    _, _, below = f"\n{text}".partition(f"\n{heading}\n")
    return list(itertools.takewhile(lambda line: line.startswith("  "), below.splitlines()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_report_adds_up(kind: str) -> None:
    allocator = KINDS[kind]()
    kept = [allocator.allocate(3 * MIB) for _ in range(5)] + [allocator.allocate(700 * KIB)]
    del kept[1]
    gc.collect()
    error = refused(allocator)  # which gives back what pinned memory caches
    shown = allocator._look()
    chunks = list(shown.chunks())
    assert len(table(error.report, "chunks")) == len(chunks)
    rows = [row.split() for row in table(error.report, "in use by size")]
    live = [chunk.size for chunk in chunks if chunk.in_use]
    assert sum(int(row[0]) for row in rows) == len(live) == 5
    for count, times, *sizes in rows:
        size, total = (" ".join(sizes)).split(" = ")
        assert times == "x"
        assert bfc.units.parse_bytes(size) * int(count) == pytest.approx(
            bfc.units.parse_bytes(total), rel=0.01
        )
    bins = [row.split() for row in table(error.report, error.report.splitlines()[0])[1:]]
    assert sum(int(row[3]) for row in bins) == len(live)
    assert sum(int(row[8]) for row in bins) == len(chunks) - len(live)
    assert shown.occupancy() in error.report
    assert str(error).endswith(error.report)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.report, again.report_file) == (str(error), error.report, None)


def test_the_short_text_is_the_full_one_without_the_report() -> None:
    allocator = KINDS["bfc"]()
    kept = allocator.allocate(MIB)
    full = refused(allocator)
    assert bfc.set_oom_report("short") == "full"
    short = refused(allocator)
    assert str(full) == f"{short}\n\n{full.report}"
    assert (short.report, short.report_file) == ("", None)
    kept.free()


def test_owners_and_lines_are_shown_where_they_are_known() -> None:
    allocator = KINDS["bfc"]()
    allocator.record_history()
    with bfc.owner("kv\n\x1b[31m cache"):
        first = [allocator.allocate(MIB) for _ in range(3)]
    rest = allocator.allocate(KIB)
    error = refused(allocator)
    owners, lines = table(error.report, "in use by owner"), table(error.report, "in use by line")
    assert owners == [
        "    3.00 MiB in      3  kv \x1b[31m cache",
        "     1.0 KiB in      1  (no owner)",
    ]
    assert len(lines) == 2
    assert "test_oom_report.py:" in lines[0]
    assert [entry.action for entry in allocator.history()][-1] == "oom", "no snapshot was noted"
    del first, rest


def test_the_environment_asks_for_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = KINDS["bfc"]()
    bfc.set_oom_report(None)
    assert refused(allocator).report == ""
    monkeypatch.setenv("BFC_OOM_REPORT", "full")
    assert "bins by the size" in refused(allocator).report
    assert bfc.set_oom_report("short") == "full"
    assert refused(allocator).report == "", "the program decides"
    assert bfc.set_oom_report(None) == "short"
    monkeypatch.setenv("BFC_OOM_REPORT", "ful")
    assert "BFC_OOM_REPORT is 'short' or 'full', not 'ful'" in str(refused(allocator))
    with pytest.raises(ValueError, match="'short' or 'full', not 'long'"):
        bfc.set_oom_report("long")


def test_many_chunks_go_to_a_file(folder: Path) -> None:
    allocator = KINDS["caching"]()
    kept = [allocator.allocate(size * KIB) for size in range(1, 61)]
    error = refused(allocator)
    assert error.report_file is not None
    path = Path(error.report_file)
    assert (path.parent, path.stat().st_mode & 0o077) == (folder, 0)
    assert error.report_file in str(error)
    assert len(str(error).splitlines()) < 60
    text = path.read_text("utf-8")
    chunks = list(allocator.snapshot().chunks())
    assert len(table(text, "chunks")) == len(chunks)
    assert len(table(text, "in use by size")) == 60
    assert len(table(error.report, "in use by size")) == 11
    assert "left out here" in error.report
    assert "left out here" not in text
    del kept


def test_a_file_that_cannot_be_written_is_no_second_error(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = KINDS["bfc"]()
    kept = [allocator.allocate(KIB) for _ in range(30)]
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere at all")
    error = refused(allocator)
    assert "report        no file: " in str(error)
    assert error.report.startswith("bins by the size")
    del kept


def test_a_program_that_is_refused_without_end_fills_no_disk(folder: Path) -> None:
    allocator = KINDS["bfc"]()
    kept = [allocator.allocate(KIB) for _ in range(30)]
    errors = [refused(allocator) for _ in range(refusal.MOST_FILES + 2)]
    assert len(list(folder.iterdir())) == refusal.MOST_FILES
    assert "no file: this process has written 10 of them" in str(errors[-1])
    assert errors[-1].report
    del kept


# CPython 3.14 makes the argument of its callbacks where there are none, too.
@pytest.mark.filterwarnings("ignore:Exception ignored on invoking gc callbacks")
def test_without_host_memory_the_text_is_short_or_the_host_is_named(quiet_collector: None) -> None:
    """Whatever fails, the error is one of memory, and the allocator goes on."""
    allocator = KINDS["bfc"]()
    kept = [allocator.allocate(KIB) for _ in range(30)]
    gc.collect()  # a refusal collects garbage, which has allocators of other tests
    seen = set()
    for n in [*range(0, 600, 7), 1000, 3000, 10_000, 1 << 20]:
        done, answer = call_without_memory(n, _text_of_refusal, allocator)
        if done:
            seen.add(bool(answer.report))
    assert seen == {False, True}
    allocator.check()
    del kept


def _text_of_refusal(allocator: Any) -> bfc.OutOfMemoryError:
    try:
        allocator.allocate(1 << 40)
    except bfc.OutOfMemoryError as error:
        return error
    raise AssertionError("there is no such memory")


def test_an_error_while_the_memory_is_shown_is_only_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: Any, **_options: Any) -> str:
        raise LookupError("odd")

    monkeypatch.setattr(refusal, "report", broken)
    error = refused(KINDS["bfc"]())
    assert str(error).endswith("\n\nthe memory cannot be shown: LookupError: odd")


def test_only_the_last_attempt_of_a_retry_makes_a_report(folder: Path) -> None:
    allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"), retry_seconds=5)
    kept = [allocator.allocate(KIB) for _ in range(1024)]
    for small in kept[:-1:2]:
        small.free()
    waiter = threading.Thread(target=lambda: found.append(allocator.allocate(512 * KIB)))
    found: list[bfc.Buffer] = []
    waiter.start()
    for small in kept[1::2]:
        small.free()
    waiter.join()
    assert found[0].nbytes == 512 * KIB
    assert list(folder.iterdir()) == []


def test_what_sleeps_is_left_out_and_wake_shows_the_memory() -> None:
    device = bfc.SimulatedSubAllocator("8 MiB")
    allocator = bfc.BFCAllocator(device, virtual_memory=True)
    with allocator.tag("weights"):
        weights = allocator.allocate(6 * MIB)
    allocator.sleep(drop=["weights"])
    rest = allocator.allocate(4 * MIB)
    with pytest.raises(bfc.OutOfMemoryError) as raised:
        allocator.wake("weights")
    assert len(table(raised.value.report, "in use by size")) == 1
    rest.free()
    allocator.wake("weights")
    weights.free()


def test_the_first_lines_fit_where_pytorch_cuts_a_text_off() -> None:
    """The C table has room for some hundred characters: the file is named before the tables."""
    allocator = KINDS["bfc"]()
    kept = [allocator.allocate(KIB) for _ in range(30)]
    text = str(refused(allocator))
    assert text.index("chunks in ") < text.index("bins by the size")
    del kept
