"""The command: what it prints, and the exit codes that scripts rely on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import bfc
from bfc.cli import main

TRACES = Path(__file__).parents[1] / "bench" / "traces"
SMALL = str(TRACES / "gpu_lm_small.npz")


def test_replay_prints_a_picture_and_a_table(capsys):
    assert main(["replay", SMALL, "--device", "simulated:4GiB"]) == 0
    out = capsys.readouterr().out
    assert "gpu_lm_small, when most is live" in out
    headings, row = out.splitlines()[-2:]
    assert headings.split()[:2] == ["trace", "events"]
    assert row.split()[:4] == ["gpu_lm_small", "62", "3.03", "GiB"]


def test_replay_of_a_folder_has_a_line_for_each_trace(capsys):
    assert main(["replay", str(TRACES), "--no-picture", "--passes", "1"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 1 + len(list(TRACES.glob("*.npz")))


def test_json_is_for_scripts(capsys):
    assert main(["replay", SMALL, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (row,) = report["traces"]
    assert (row["trace"], row["events"], row["refused"]) == ("gpu_lm_small", 62, 0)
    assert len(row["occupancy_when_most_is_live"]) == 100


def test_json_has_no_nan(capsys, tmp_path):
    bfc.Trace([], [], []).save(tmp_path / "empty.npz")
    assert main(["replay", str(tmp_path / "empty.npz"), "--json", "--no-picture"]) == 0
    assert json.loads(capsys.readouterr().out)["traces"][0]["fragmentation"] is None


def test_the_exit_code_is_1_where_an_allocation_was_refused(capsys):
    assert main(["replay", SMALL, "--device", "simulated:1GiB", "--no-picture"]) == 1
    assert int(capsys.readouterr().out.split()[-1]) > 0


def test_real_memory_holds_a_trace(capsys):
    assert main(["replay", SMALL, "--device", "host:5GiB", "--passes", "1"]) == 0


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["nowhere.npz"], "nowhere.npz"),
        ([__file__], "it is no .npz archive"),
        ([SMALL, "--device", "tpu"], "--device tpu"),
        ([SMALL, "--device", "simulated"], "--device simulated"),
        ([SMALL, "--device", "simulated:many"], "is not a size"),
        ([SMALL, "--memory-limit", "4 furlongs"], "is not a size"),
        ([str(Path(__file__).parent / "data-that-is-not-there")], "data-that-is-not-there"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(capsys, arguments, fault):
    assert main(["replay", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("bfc: ")
    assert captured.err.count("\n") == 1
    assert fault in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("limit", ["0.5", "2 GiB", str(2 << 30)])
def test_a_limit_is_bytes_a_text_or_a_fraction(capsys, limit):
    assert (
        main(["replay", SMALL, "--device", "simulated:4GiB", "--memory-limit", limit, "--json"])
        == 1
    )
    row = json.loads(capsys.readouterr().out)["traces"][0]
    assert row["peak_bytes_reserved"] == 2 << 30


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_python_m_bfc_is_the_command():
    done = run(sys.executable, "-m", "bfc", "replay", SMALL, "--no-picture")
    assert (done.returncode, done.stderr) == (0, "")
    assert "gpu_lm_small" in done.stdout


def test_the_script_is_the_command():
    done = run(str(Path(sys.executable).with_name("bfc")), "replay", "nowhere.npz")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_no_error():
    done = run(
        "bash",
        "-c",
        f"set -o pipefail; {sys.executable} -m bfc replay {TRACES} --passes 1 | head -1",
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == 0
