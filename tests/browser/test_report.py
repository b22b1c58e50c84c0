"""`bfc.report`: the page of a trace, of a file, and of an allocator."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from report_recounts import frames_of, opened, random_trace, recount

import bfc
from bfc.snapshots.snapshot import Snapshot
from bfc_tools.browser.report import shown

MIB = 1 << 20
BLOCK = re.compile(r'<script type="application/json" id="bfc-report">(.*?)</script>', re.DOTALL)


def block_of(path: Path) -> dict[str, Any]:
    """The data of a page; nothing in it can end or begin a tag."""
    (text,) = BLOCK.findall(path.read_text("utf-8"))
    assert "<" not in text
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "report.html"


def pool(size: str = "1 GiB") -> bfc.CachingAllocator:
    return bfc.CachingAllocator(bfc.SimulatedSubAllocator(size))


def test_when_what_slept(page: Path, tmp_path: Path) -> None:
    """Of an allocator, and of its file: on the axis, in the bytes reserved, and in words."""
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), stitch=True)
    allocator.record_history()
    with allocator.tag("weights"):
        weights = allocator.allocate("40 MiB")
    with allocator.tag("kv"):
        cache = allocator.allocate("100 MiB")
    for _ in range(2):
        allocator.sleep(drop=["kv"])
        beside = allocator.allocate("60 MiB")
        beside.free()
        allocator.wake()
    allocator.sleep(drop=["weights"])
    allocator.allocate("1 MiB").free()
    allocator.snapshot().dump(tmp_path / "run.pickle")
    for run in (tmp_path / "run.pickle", allocator):
        bfc.report(run, page)
        (found,) = block_of(page)["runs"]
        kv = [[100 * MIB, "kv"], [-100 * MIB, "kv"]]
        assert [row[1:] for row in found["asleep"]] == [*kv, *kv, [40 * MIB, "weights"]]
        assert (
            found["remarks"][-2:]
            == [
                "tag weights slept once, 40.00 MiB, and 40.00 MiB sleep at the end",
                "tag kv slept 2 times, 100.00 MiB",
            ][::-1]
        )
    assert found["timeline"]["asleep"] == [it * MIB for it in (0, 0, 100, 100, 100, 100, 40, 40)]
    # Of the allocator itself, what was stitched is exact, too: 60 MiB lie beside what is awake.
    assert found["timeline"]["reserved"][:4] == [it * MIB for it in (40, 140, 100, 100)]
    for buffer in (weights, cache):
        buffer.free()


def test_a_trace(page: Path) -> None:
    trace = random_trace(3)
    bfc.report(trace, page)
    found, counted = block_of(page), recount(trace)
    assert found["peak_event"] == counted.peak
    assert found["peak_live"] == max(counted.live)
    assert found["title"] == "trace"
    bfc.report(trace, page, title="</script><script>alert(1)</script>")
    assert block_of(page)["title"] == "</script><script>alert(1)</script>"


def test_a_file(tmp_path: Path, page: Path) -> None:
    trace = random_trace(4)
    trace.save(tmp_path / "run.npz")
    bfc.report(tmp_path / "run.npz", page)
    from_file = block_of(page)
    assert from_file["title"] == from_file["runs"][0]["trace"] == "run"
    bfc.report(str(tmp_path / "run.npz"), str(page))
    bfc.report(trace, page)
    for key in ("events", "peak_event", "live_at_peak", "views", "owners_over_time"):
        assert block_of(page)[key] == from_file[key]


def test_a_log_of_rmm(tmp_path: Path, page: Path) -> None:
    trace = bfc.Trace([0, 0, 1], [0, 1, 0], [3 * MIB, MIB, 0])
    trace.log_csv(tmp_path / "log.csv")
    bfc.report(tmp_path / "log.csv", page)
    assert [row[1] for row in block_of(page)["live_at_peak"]] == [3 * MIB, MIB]


def test_an_allocator_without_a_history_shows_what_it_holds(page: Path) -> None:
    with pool() as allocator:
        first = allocator.allocate(3 * MIB)
        with bfc.owner("kv <b>"):
            second = allocator.allocate(5000, stream=77)
        third = allocator.allocate(MIB)
        third.free()
        bfc.report(allocator, page)
        found, stats = block_of(page), allocator.stats()
        assert (found["kind"], found["events"], found["peak_event"]) == ("state", 0, -1)
        assert found["live_at_peak"] == [
            [first.ptr, 3 * MIB, "", -1],
            [second.ptr, 5000, "kv <b>", -1],
        ]
        assert found["peak_live"] == 3 * MIB + 5000
        assert found["peak_reserved"] == stats.pool_bytes
        (run,) = found["runs"]
        assert (run["origin"], run["timeline"], run["map"]) == ("state", None, None)
        regions = allocator.snapshot().regions
        segments = run["segments"]
        assert segments["address"] == [region.ptr for region in regions]
        assert segments["size"] == [region.size for region in regions]
        lanes = {at: region.stream for at, region in zip(segments["stream"], regions, strict=True)}
        assert sorted(lanes.values()) == [0, 77]
        assert [sum(row) for row in zip(segments["live"], strict=True)] == [
            sum(chunk.requested_size for chunk in region.chunks) for region in regions
        ]


@pytest.mark.parametrize("history", [False, True])
def test_private_pools_are_told_apart(page: Path, history: bool) -> None:
    with pool() as allocator:
        if history:
            allocator.record_history()
        mine = bfc.MemPool(allocator)
        kept = [allocator.allocate(3 * MIB)]
        with bfc.use_mem_pool(mine):
            kept.append(allocator.allocate(3 * MIB))
        bfc.report(allocator, page)
        pools = block_of(page)["runs"][0]["segments"]["pool"]
        assert sorted(pools) == ["", ".".join(map(str, mine.id))]
        del kept


def test_an_allocator_with_a_history_shows_the_run(page: Path) -> None:
    with pool() as allocator:
        allocator.record_history()
        large = allocator.allocate(30 * MIB)
        with bfc.owner("weights"):
            small = allocator.allocate(5000)
        at_peak = sorted([[large.ptr, 30 * MIB], [small.ptr, 5000]])
        large.free()
        bfc.report(allocator, page)
        found = opened(block_of(page))
        assert (found["kind"], found["peak_event"]) == ("trace", 1)
        assert sorted(row[:2] for row in found["live_at_peak"]) == at_peak
        assert found["live_at_peak"][1][2] == "weights"
        innermost = frames_of(found, found["live_at_peak"][0][3])[0]
        assert innermost[0] == __file__
        assert innermost[2] == "test_an_allocator_with_a_history_shows_the_run"
        (run,) = found["runs"]
        assert run["origin"] == "recorded"
        assert found["peak_reserved"] == allocator.stats().peak_pool_bytes
        small.free()


def test_a_snapshot_and_an_empty_allocator(page: Path) -> None:
    with bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB")) as allocator:
        empty = allocator.snapshot()
        bfc.report(allocator, page)
        assert block_of(page)["live_at_peak"] == []
        buffer = allocator.allocate(1000)
        bfc.report(allocator.snapshot(), page)
        assert [row[1] for row in block_of(page)["live_at_peak"]] == [1000]
        bfc.report(empty, page)
        assert block_of(page)["live_at_peak"] == []
        assert isinstance(empty, Snapshot)
        buffer.free()


def test_a_file_without_a_history_shows_what_was_live(tmp_path: Path, page: Path) -> None:
    with pool() as allocator:
        buffers = [allocator.allocate(3 * MIB), allocator.allocate(5000)]
        buffers.append(allocator.allocate(30 * MIB, stream=7))
        gone = allocator.allocate(50 * MIB, stream=7)
        gone.free()
        path = tmp_path / "state.pickle"
        allocator.snapshot().dump(path)
        bfc.report(path, page)
        from_file = block_of(page)
        bfc.report(allocator, page)
        living = block_of(page)
        for key in ("kind", "events", "peak_event", "peak_live", "peak_reserved", "live_at_peak"):
            assert from_file[key] == living[key]
        here, there = from_file["runs"][0]["segments"], living["runs"][0]["segments"]
        for key in ("address", "size", "stream", "live", "blocks"):
            assert here[key] == there[key]
        assert from_file["blocks"]["total"] == 3
        assert (from_file["runs"][0]["timeline"], from_file["runs"][0]["map"]) == (None, None)
        assert from_file["runs"][0]["remarks"][-1] == "the file has no history, only what was live"


def test_virtual_memory_shows_views(page: Path) -> None:
    source = bfc.SimulatedSubAllocator("16 MiB")
    with bfc.BFCAllocator(source, virtual_memory=True, page_size="2 MiB") as allocator:
        buffers = [allocator.allocate(2 * MIB) for _ in range(8)]
        for at in (1, 3, 5):
            buffers[at].free()
        stitched = allocator.allocate(6 * MIB)
        bfc.report(allocator, page)
        found = block_of(page)
        assert [stitched.ptr, 6 * MIB] == found["live_at_peak"][0][:2]
        assert sum(found["runs"][0]["segments"]["live"]) == found["peak_live"] == 16 * MIB
        for buffer in (*buffers, stitched):
            buffer.free()


@pytest.mark.parametrize("wrong", [7, None, [], bfc.Stats()])
def test_something_else_is_refused(wrong: Any, page: Path) -> None:
    with pytest.raises(TypeError, match="a report is of a trace, its file, or an allocator, not"):
        bfc.report(wrong, page)
    assert not page.exists()


def test_after_an_error_the_old_file_stays(page: Path) -> None:
    page.write_text("old")
    with pytest.raises(bfc.TraceError):
        bfc.report(bfc.Trace([0, 0], [0, 1], [1 << 62] * 2), page)
    assert page.read_text() == "old"
    with pytest.raises(OSError, match="folder"):
        bfc.report(random_trace(1), page.parent / "no such folder" / "report.html")


def test_names_from_strangers_are_text(page: Path) -> None:
    name = "</script><img src=x onerror=alert(1)><!--"
    trace = bfc.Trace(
        [0], [0], [MIB], owner=[1], owners=["", name], stack=[1], stacks=[(0, 0), (0, 0)],
        frames=[(name, 1, name + "\udc80\u2028")],
    )  # fmt: skip
    bfc.report(trace, page, title=name)
    found = block_of(page)
    assert found["live_at_peak"][0][2] == found["title"] == name
    assert name in found["texts"]
    assert "onerror" not in BLOCK.sub("", page.read_text("utf-8"))


@pytest.mark.parametrize("stitch", [False, True])
def test_it_shows_all_of_a_history_and_says_that_blocks_were_stitched(stitch: bool) -> None:
    """PyTorch's format holds no block whose pages were used at other addresses before."""
    device = bfc.SimulatedSubAllocator("256 MiB")
    with bfc.CachingAllocator(device, stitch=stitch) as allocator:
        allocator.record_history(context=None)
        blocks = [allocator.allocate_raw(6 << 20) for _ in range(10)]
        for block in blocks[::2]:
            allocator.deallocate_raw(block)
        allocator.allocate_raw(24 << 20)
        (run,) = shown(allocator)["runs"]
        assert run["peak_live"] == 60 * MIB
        assert run["peak_reserved"] == allocator.stats().peak_pool_bytes
        said = [remark for remark in run["remarks"] if "were stitched" in remark]
        assert len(said) == len(run["remarks"]) == stitch
