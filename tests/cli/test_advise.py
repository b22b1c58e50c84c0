"""`bfc advise`: what it prints where, its exit codes, and files that are no traces."""

from __future__ import annotations

import csv
import json
import os
import pickle
import pty
import select
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import bfc
from bfc_tools.cli import main

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "bench" / "traces"
SMALL = str(TRACES / "gpu_lm_small.npz")
RECORDING = str(ROOT / "tests" / "recordings" / "rec_silmont2000_memory_forward_bf16_128.npz")


def test_the_answer_comes_first_and_then_how_far_to_trust_it(capsys):
    assert main(["advise", RECORDING, "--device", "1GiB", "--jobs", "1"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[:2] == [
        (
            "PyTorch 2.15: It fits on 1.00 GiB as it is: under PyTorch's defaults it reserves at "
            "most 822.00 MiB, which leaves 202.00 MiB. Nothing has to change."
        ),
        "Replayed under PyTorch's defaults, it reserves 861929472 bytes, as recorded (822.00 MiB).",
    ]
    assert lines[2].startswith("PyTorch 2.15, ")
    assert lines[6].split()[:3] == ["settings", "fits", "refused"]
    assert err.splitlines()[0] == f"bfc advise: replaying {Path(RECORDING).name}, 2099 events"
    assert err.splitlines()[2].startswith(
        "bfc advise: the defaults: fits, 822.00 MiB reserved; exp"
    )
    assert main(["advise", RECORDING, "--device", "1GiB", "--jobs", "1", "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > len(lines) + 10


def test_json_is_all_that_stdout_has(capsys):
    assert main(["advise", SMALL, "--device", "3.2GiB", "--jobs", "1", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["rows"][content["best"]]["fits"] is True
    assert content["recorded"]["peak_reserved"] is None


def test_csv_has_every_row(capsys):
    assert main(["advise", SMALL, "--device", "3.2GiB", "--jobs", "1", "--csv"]) == 0
    first, *rows = csv.reader(capsys.readouterr().out.splitlines())
    assert first[:4] == ["policy", "settings", "fits", "refused"]
    assert len(rows) > 20


def test_the_version_that_is_asked_for_is_named_first(capsys):
    assert main(["advise", RECORDING, "--device", "1GiB", "--jobs", "1", "--torch", "2.11"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("PyTorch 2.11: It fits")
    assert lines[2] == "PyTorch 2.11, as asked for."
    with pytest.raises(SystemExit):
        main(["advise", RECORDING, "--device", "1GiB", "--torch", "2.12"])
    assert "invalid choice: '2.12'" in capsys.readouterr().err


def test_where_nothing_fits_the_exit_code_is_1(capsys):
    assert main(["advise", SMALL, "--device", "2GiB", "--jobs", "1"]) == 1
    out = capsys.readouterr().out
    assert "Nothing makes it fit on 2.00 GiB: 3.03 GiB are live at once, 1.03 GiB too many." in out


class Bad:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (os.environ["BFC_TEST_MARK"],)


def content_of(kind: str) -> bytes:
    recorder = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    recorder.record_history(context=None)
    recorder.deallocate_raw(recorder.allocate_raw(1000))
    whole = pickle.dumps(recorder.snapshot().to_torch(), protocol=4)
    return {
        "empty": b"",
        "text": b"hello\n",
        "zeros": bytes(1000),
        "truncated": whole[: len(whole) // 2],
        "executes": pickle.dumps(Bad(), protocol=4),
        "truncated archive": Path(SMALL).read_bytes()[:900],
        "archive of nothing": b"PK\5\6" + bytes(18),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        *("empty", "text", "zeros", "truncated", "executes"),
        *("truncated archive", "archive of nothing"),
    ],
)
@pytest.mark.parametrize("suffix", [".pickle", ".npz", ""])
def test_a_file_that_is_no_trace_is_one_line(tmp_path, monkeypatch, capsys, kind, suffix):
    mark = tmp_path / "mark"
    monkeypatch.setenv("BFC_TEST_MARK", str(mark))
    path = tmp_path / f"run{suffix}"
    path.write_bytes(content_of(kind))
    assert main(["advise", str(path), "--device", "1GiB"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith(f"bfc: {path}: ")
    assert len(line) > len(f"bfc: {path}: ") + 5
    assert not mark.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.pickle", "--device", "1GiB"], "missing.pickle"),
        ([str(TRACES), "--device", "1GiB"], "traces"),
        ([SMALL, "--device", "much"], "'much' is not a size"),
        ([SMALL, "--device", "34"], "34 bytes? Write 34GiB"),
        ([SMALL, "--device", "0"], "at least 1 byte"),
        ([SMALL, "--device", "1GiB", "--jobs", "0"], "jobs is at least 1"),
        ([SMALL, "--device", "1GiB", "--snapshot-device", "1"], "no devices to choose from"),
    ],
)
def test_a_wrong_call_is_one_line(capsys, arguments, said):
    assert main(["advise", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err.splitlines()[-1]


def test_a_log_of_rmm_is_a_run(tmp_path, capsys):
    path = tmp_path / "log.csv"
    mib = 1 << 20
    bfc.Trace([0, 0, 1], [0, 1, 0], [40 * mib, 2 * mib, 0]).log_csv(path, addresses=[1, 2, 0])
    assert main(["advise", str(path), "--device", "64MiB", "--jobs", "1"]) == 0
    assert "42.00 MiB live at most" in capsys.readouterr().out
    path.write_bytes(b"no log\n")
    assert main(["advise", str(path), "--device", "64MiB", "--jobs", "1"]) == 2
    assert capsys.readouterr().err.startswith(f"bfc: {path}: ")


def two_devices(path: Path) -> None:
    events = [
        {"action": action, "addr": 1 << 40, "size": 1000, "stream": 0}
        for action in ("alloc", "free_requested", "free_completed")
    ]
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [events, events]}, 4))


def test_a_snapshot_of_several_devices(tmp_path, capsys):
    path = tmp_path / "two.pickle"
    two_devices(path)
    asked = ["advise", str(path), "--device", "1GiB", "--jobs", "1"]
    assert main(asked) == 2
    assert "choose one with --snapshot-device" in capsys.readouterr().err
    assert main([*asked, "--snapshot-device", "1"]) == 0


def test_a_terminal_has_a_bar():
    """And nothing of it is left when the answer comes."""
    pytest.importorskip("tqdm")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    command = [sys.executable, "-m", "bfc", "advise", SMALL, "--device", "4GiB", "--jobs", "1"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=theirs, text=True, check=False, cwd=ROOT
    )
    assert select.select([ours], [], [], 0)[0]
    seen = os.read(ours, 1 << 16).decode()
    os.close(theirs)
    os.close(ours)
    assert done.returncode == 0
    assert "\r" in seen
    assert "replays" in seen
    assert seen.endswith("\r")
