"""`bfc report`, `bfc advise` and `bfc replay` of the log of a program that ran out of memory."""

from __future__ import annotations

import json
from pathlib import Path

import dump_texts
import pytest

import bfc
from bfc.__main__ import main
from bfc.snapshots.snapshot import Snapshot

MIB = 1 << 20
TEXT = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total "
    "capacity of 79.00 GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process "
    "has 78.00 GiB memory in use. Of the allocated memory {} is allocated by PyTorch, and 1.00 GiB "
    "is reserved by PyTorch but unallocated.\n"
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def log(here: Path) -> str:
    """Of a program with 32 MiB free in pieces of 4 MiB, which asked for 12 MiB."""
    with bfc.BFCAllocator(bfc.SimulatedSubAllocator("64 MiB"), memory_limit="64 MiB") as allocator:
        blocks = [allocator.allocate(4 * MIB) for _ in range(16)]
        for block in blocks[::2]:
            block.free()
        held = allocator.snapshot()
        for block in blocks[1::2]:
            block.free()
    held = Snapshot("GPU_0_bfc", held.stats, held.regions)
    lines = dump_texts.text("XLA 2025", held, 12 * MIB)
    (here / "oom.log").write_text("\n".join(lines))
    return "oom.log"


def test_report_says_why_and_draws_the_chunks(here: Path, log: str, capsys) -> None:
    assert main(["report", log]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("It ran out of memory: 12.00 MiB were refused to GPU 0 (JAX, line 1)")
    assert "this is fragmentation, since 32.00 MiB would do in one piece" in first
    assert last.startswith("oom.html: ")
    page = (here / "oom.html").read_text()
    assert "this is fragmentation, since 32.00 MiB would do" in page
    assert "nor when" in page


def test_advise_needs_no_device_and_replays_what_was_live(log: str, capsys) -> None:
    assert main(["advise", log]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == [
        "Replayed, what was live and then the request, on 64.00 MiB:",
        "  laid out anew (bfc): served",
        "  joined from pages (bfc+virtual_memory): served",
    ]
    assert main(["advise", log, "--device", "40MiB"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("refused")


def test_advise_for_scripts(log: str, capsys) -> None:
    assert main(["advise", log, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["logs"]
    (refusal,) = found["refusals"]
    assert (found["name"], refusal["cause"], refusal["largest_free"]) == (log, "pieces", 4 * MIB)
    assert main(["advise", log, "--csv"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert dict(zip(header.split(","), row.split(","), strict=False))["program"] == "JAX"


def test_replay_of_a_log_ends_with_the_request(log: str, capsys) -> None:
    assert main(["replay", log, "--device", "64MiB", "--no-picture"]) == 0
    assert "oom        10" in capsys.readouterr().out
    assert main(["replay", log, "--device", "40MiB", "--no-picture"]) == 1
    assert main(["report", log, "--policy", "bfc", "-o", "two.html"]) == 0


def test_a_text_has_nothing_to_draw_or_replay(here: Path, capsys) -> None:
    (here / "x.log").write_text(TEXT.format("76.00 GiB"))
    assert main(["report", "x.log"]) == 0
    out = capsys.readouterr().out
    assert "There is no page, since the text lists no chunks." in out
    assert "To know more, record: torch.cuda.memory._record_memory_history()" in out
    assert not (here / "x.html").exists()
    assert main(["replay", "x.log"]) == 2
    assert "an error text without a list of chunks" in capsys.readouterr().err


def test_a_folder_of_ranks(here: Path, capsys) -> None:
    for rank in range(4):
        folder = here / "logs" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(TEXT.format("76.00 GiB" if rank == 3 else "50.00 GiB"))
    assert main(["advise", "logs"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("3/stderr.log had 76.00 GiB, 26.00 GiB more than the middle of all")
    assert second.startswith("It ran out of memory: 8.00 GiB were refused to 3/stderr.log")
    assert main(["report", *(f"logs/attempt_0/{rank}/stderr.log" for rank in range(4))]) == 0
    assert capsys.readouterr().out.startswith("3/stderr.log had 76.00 GiB")


def test_what_is_wrong_is_said(here: Path, log: str, capsys) -> None:
    (here / "train.py").write_text("print('hello')\n")
    for command in (["report", "train.py"], ["advise", "train.py"], ["replay", "train.py"]):
        assert main(command) == 2
        err = capsys.readouterr().err
        assert err.startswith("bfc: train.py: it is not a recorded run")
        assert "no out-of-memory error of PyTorch, TensorFlow or JAX" in err
    bfc.Trace([0], [0], [512]).save(here / "run.npz")
    assert main(["report", log, "run.npz"]) == 2
    assert "others are recorded runs: name them apart" in capsys.readouterr().err
    assert main(["report", log, "--perfetto", "x.json"]) == 2
    assert "a log has no history" in capsys.readouterr().err
    assert main(["advise", "run.npz"]) == 2
    assert "--device SIZE is missing" in capsys.readouterr().err
