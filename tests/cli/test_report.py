"""`bfc report`: what it writes, what it prints, and files that are no runs."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import bfc
from bfc.files import replacing
from bfc_tools.cli import main

ROOT = Path(__file__).parents[2]
SMALL = str(ROOT / "bench" / "traces" / "gpu_lm_small.npz")
RECORDING = str(ROOT / "tests" / "recordings" / "rec_silmont2000_memory_forward_bf16_128.npz")
BLOCK = re.compile(r'<script type="application/json" id="bfc-report">(.*?)</script>', re.DOTALL)
MIB = 1 << 20


def written(path: Path) -> dict[str, Any]:
    (text,) = BLOCK.findall(path.read_text("utf-8"))
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "report.html"


def test_one_run(capsys, page):
    assert main(["report", SMALL, "-o", str(page)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{page}: gpu_lm_small, 62 events. PyTorch 2.1")
    assert err == ""
    found = written(page)
    assert (found["events"], found["peak_event"], found["peak_live"]) == (62, 34, 3249143816)
    assert [run["label"] for run in found["runs"]] == ["caching"]


def test_when_tags_slept_is_said(capsys, page, tmp_path):
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), stitch=True)
    allocator.record_history()
    with allocator.tag("kv"):
        allocator.allocate("100 MiB").free()
    allocator.sleep()
    allocator.snapshot().dump(tmp_path / "run.pickle")
    assert main(["report", str(tmp_path / "run.pickle"), "-o", str(page)]) == 0
    said = "tag kv slept once, 100.00 MiB, and 100.00 MiB sleep at the end"
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_runs_and_policies_stand_side_by_side(page):
    policies = ["--policy", "caching:max_split_size_mb:128", "--policy", "bfc"]
    assert main(["report", RECORDING, SMALL, *policies, "-o", str(page), "--title", "two"]) == 0
    found = written(page)
    assert found["title"] == "two"
    name = Path(RECORDING).stem
    assert [run["label"] for run in found["runs"]] == [
        f"{name}: as recorded",
        f"{name}: caching:max_split_size_mb:128",
        f"{name}: bfc",
        "gpu_lm_small: caching:max_split_size_mb:128",
        "gpu_lm_small: bfc",
    ]
    recorded, split, whole = found["runs"][:3]
    assert recorded["peak_reserved"] == 861929472
    assert (split["policy"], split["settings"]) == ("caching", "max_split_size_mb:128")
    assert whole["peak_reserved"] == 80 << 30


def test_a_folder_of_runs(tmp_path, page):
    for name in ("b", "a"):
        bfc.Trace([0], [0], [MIB]).save(tmp_path / f"{name}.npz")
    assert main(["report", str(tmp_path), "-o", str(page)]) == 0
    assert [run["trace"] for run in written(page)["runs"]] == ["a", "b"]


def test_a_run_that_is_refused_midway_is_shown(tmp_path, page):
    bfc.Trace([0, 0, 1, 0], [0, 1, 0, 2], [30 * MIB, 40 * MIB, 0, MIB]).save(tmp_path / "a.npz")
    device = ["--device", "simulated:64MiB", "--policy", "caching", "--memory-limit", "1.0"]
    assert main(["report", str(tmp_path / "a.npz"), "-o", str(page), *device]) == 0
    found = written(page)
    (run,) = found["runs"]
    assert (run["completed"], run["refusals"], run["first_refusal"]) == (False, 1, 1)
    assert (found["peak_live"], run["peak_live"]) == (70 * MIB, 30 * MIB)
    assert [row[:2] for row in found["live_at_peak"]] == [[0, 40 * MIB], [1 << 40, 30 * MIB]]


def test_the_runs_for_perfetto(tmp_path, page):
    out = tmp_path / "run.json"
    assert main(["report", SMALL, "-o", str(page), "--perfetto", str(out)]) == 0
    content = json.loads(out.read_text())
    counters = [event for event in content["traceEvents"] if event["ph"] == "C"]
    live = [event["args"]["bytes"] for event in counters if event["name"] == "live"]
    assert max(live) == 3249143816


def test_a_file_without_a_history_is_a_state(capsys, tmp_path, page):
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")) as allocator:
        buffer = allocator.allocate(3 * MIB)
        path = tmp_path / "state.pickle"
        allocator.snapshot().dump(path)
        buffer.free()
    assert "no history" in wrong(capsys, path, "-o", page, "--perfetto", tmp_path / "x.json")
    assert not page.exists()
    assert main(["report", str(path), "-o", str(page)]) == 0
    assert written(page)["kind"] == "state"
    assert main(["report", str(path), "-o", str(page), "--policy", "caching"]) == 0
    found = written(page)
    assert [run["label"] for run in found["runs"]] == ["as recorded", "caching"]
    assert (found["peak_event"], found["peak_live"]) == (found["events"] - 1, 3 * MIB)


class Evil:
    """Its pickle runs a command when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def wrong(capsys, *arguments: object) -> str:
    """The one line that a wrong call prints."""
    assert main(["report", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


def test_a_hostile_pickle_is_not_run(capsys, tmp_path, page):
    mark, path = tmp_path / "mark", tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[Evil(mark)]]}, protocol=4))
    assert wrong(capsys, path, "-o", page).startswith(f"bfc: {path}: ")
    assert not mark.exists()
    assert not page.exists()


@pytest.mark.parametrize("name", ["x.pickle", "x.npz", "x.csv", "x.json"])
@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"PK\x03\x04no", b"\xff" * 4000])
def test_files_that_are_no_runs(capsys, tmp_path, page, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    assert wrong(capsys, path, "-o", page).startswith(f"bfc: {path}: ")
    assert not page.exists()


def test_other_wrong_calls(capsys, tmp_path, page):
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "fifo.npz")
    assert "No such file" in wrong(capsys, tmp_path / "none.npz", "-o", page)
    assert "no .npz" in wrong(capsys, tmp_path / "empty", "-o", page)
    assert "it is a FIFO" in wrong(capsys, tmp_path / "fifo.npz", "-o", page)
    nowhere = tmp_path / "none" / "x.html"
    assert f"No such file or directory: '{nowhere}'" in wrong(capsys, SMALL, "-o", nowhere)
    assert "--policy fast" in wrong(capsys, SMALL, "-o", page, "--policy", "fast")
    assert "need a --policy" in wrong(capsys, SMALL, "-o", page, "--strict")
    assert "--device x" in wrong(capsys, SMALL, "-o", page, "--device", "x")
    assert "at most 16 runs" in wrong(capsys, *[SMALL] * 17, "-o", page)
    assert not page.exists()


def test_the_device_of_a_snapshot_is_chosen(capsys, tmp_path, page):
    path = tmp_path / "two.pickle"
    event = {"action": "alloc", "addr": 1 << 40, "size": MIB, "stream": 0}
    block = {"size": 2 * MIB, "requested_size": MIB, "state": "active_allocated"}
    segments = [
        {"address": 1 << 40, "total_size": 2 * MIB, "device": device, "blocks": [block]}
        for device in (0, 1)
    ]
    content = {"segments": segments, "device_traces": [[event], [event]]}
    path.write_bytes(pickle.dumps(content, protocol=4))
    assert "choose one with --snapshot-device" in wrong(capsys, path, "-o", page)
    assert main(["report", str(path), "-o", str(page), "--snapshot-device", "1"]) == 0
    assert written(page)["peak_live"] > 0


def test_a_page_goes_into_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        link = f"/proc/self/fd/{reader}"  # as /dev/stdout is in a pipeline
        with replacing(link) as file:
            file.write(b"page")
        assert os.read(reader, 10) == b"page"
    finally:
        os.close(reader)


def test_without_a_name_the_page_has_the_runs(capsys, tmp_path, monkeypatch):
    """It stands where the user is, takes the place of an older page, and of no other file."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(["report", SMALL]) == 0
        assert capsys.readouterr().out.startswith("gpu_lm_small.html: ")
    (tmp_path / "sub").mkdir()
    bfc.Trace([0], [0], [512]).save(tmp_path / "sub" / "a.npz")
    assert main(["report", "sub"]) == 0
    assert capsys.readouterr().out.startswith("sub.html: ")
    (tmp_path / "sub.html").write_text("mine")
    assert "sub.html: it exists, and is no report" in wrong(capsys, "sub")
    assert (tmp_path / "sub.html").read_text() == "mine"
