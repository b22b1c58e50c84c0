"""The command: what it prints, and the exit codes that scripts rely on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import bfc
from bfc_tools.cli import devices, main, replay, tables

TRACES = Path(__file__).parents[2] / "bench" / "traces"
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


@pytest.fixture
def namesakes(tmp_path: Path) -> list[str]:
    """Two traces of one stem, the second with half of its memory free when most is live."""
    paths = [tmp_path / folder / "t.npz" for folder in "AB"]
    for path, op in zip(paths, ([0, 0], [0]), strict=True):
        path.parent.mkdir()
        bfc.Trace(op, range(len(op)), [512] * len(op)).save(path)
    return [str(path) for path in paths]


def test_traces_of_one_stem_keep_their_own_pictures(capsys, namesakes):
    assert main(["replay", *namesakes, SMALL, "--device", "simulated:4GiB", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["traces"]
    assert [row["trace"] for row in rows] == [*namesakes, "gpu_lm_small"]
    assert main(["replay", *namesakes, "--device", "simulated:1KiB", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["traces"]
    pictures = [row["occupancy_when_most_is_live"] for row in rows]
    assert pictures == ["*" * 100, "*" * 50 + "_" * 50]


def test_traces_of_one_stem_are_told_apart_in_print(capsys, namesakes):
    assert main(["replay", *namesakes, "--device", "simulated:1KiB"]) == 0
    out = capsys.readouterr().out
    for path in namesakes:
        assert f"{path}, when most is live\n" in out
        assert sum(line.startswith(f"{path}  ") for line in out.splitlines()) == 1


@pytest.mark.parametrize("passes", ["abc", "0", "-3", "1.5", ""])
def test_passes_that_are_no_number_are_said_to_be_none(capsys, passes):
    with pytest.raises(SystemExit) as raised:
        main(["replay", SMALL, f"--passes={passes}"])
    assert raised.value.code == 2
    fault = f"argument --passes: {passes!r} is not a whole number of at least 1"
    assert fault in capsys.readouterr().err


class Bar:
    """What the command uses of tqdm."""

    made: list[Bar]

    def __init__(self, *, total: int, desc: str, **options: object) -> None:
        self.total, self.desc, self.options = total, desc, options
        self.steps: list[int] = []
        self.closed = False
        self.made.append(self)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.closed = True

    def update(self, events: int) -> None:
        assert not self.closed
        self.steps.append(events)


def terminal(is_one: bool) -> types.SimpleNamespace:
    """A `sys` for the command: pytest puts a stderr of its own into the real one."""
    return types.SimpleNamespace(stderr=types.SimpleNamespace(isatty=lambda: is_one))


@pytest.fixture
def bars(monkeypatch) -> list[Bar]:
    """The bars that are made, on a terminal, with tqdm installed, and however short the work."""
    monkeypatch.setattr(Bar, "made", [], raising=False)
    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=Bar))
    monkeypatch.setattr(replay, "LONG_TRACE", 1)
    monkeypatch.setattr(tables, "sys", terminal(True))
    return Bar.made


def test_the_bar_covers_every_replay(bars):
    trace = bfc.Trace.load(SMALL)
    assert main(["replay", SMALL, "--passes", "4", "--no-picture"]) == 0
    (bar,) = bars
    assert bar.desc == "gpu_lm_small"
    assert bar.total == len(trace) + 4 * len(trace.closed())
    assert bar.steps == [len(trace)] + 4 * [len(trace.closed())]
    assert bar.closed


def test_the_bar_of_a_long_trace_moves_within_a_replay(bars, tmp_path):
    count = 300_000
    path = tmp_path / "long.npz"
    bfc.Trace([0, 1] * (count // 2), [0] * count, [1, 0] * (count // 2)).save(path)
    assert main(["replay", str(path), "--passes", "1", "--no-picture"]) == 0
    (bar,) = bars
    assert sum(bar.steps) == bar.total == 2 * count
    assert len(bar.steps) == 4
    assert min(bar.steps) > 0


@pytest.mark.parametrize("why", ["short work", "no terminal", "no tqdm"])
def test_no_bar_where_it_is_of_no_use(bars, monkeypatch, why):
    if why == "short work":
        monkeypatch.setattr(replay, "LONG_TRACE", 1_000_000)
    elif why == "no terminal":
        monkeypatch.setattr(tables, "sys", terminal(False))
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main(["replay", SMALL, "--no-picture"]) == 0
    assert bars == []


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
        ([__file__], "it is not a recorded run"),
        (["/dev/null"], "it is a device"),
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


@pytest.mark.parametrize("name", ["trace.npz", "trace.pickle"])
def test_a_fifo_is_refused_and_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    done = run(sys.executable, "-m", "bfc", "replay", str(tmp_path / name))
    assert done.returncode == 2
    assert "it is a FIFO, and only regular files are read" in done.stderr


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


# -- devices ---------------------------------------------------------------------------------------


def test_devices_lists_what_there_is_and_what_is_missing(capsys):
    assert main(["devices"]) == 0
    out = capsys.readouterr().out
    for kind in ("CUDA is", "OpenCL is", "The host is always available"):
        assert kind in out
    assert main(["devices", "--json"]) == 0
    kinds = json.loads(capsys.readouterr().out)
    assert set(kinds) == {"cuda", "opencl", "host"}
    assert kinds["host"]["devices"][0]["total_bytes"] == bfc.HostSubAllocator().total_bytes
    for kind, module in (("cuda", bfc.cuda), ("opencl", bfc.opencl)):
        assert len(kinds[kind]["devices"]) == module.device_count()
        assert kinds[kind]["reason"] == str(module.is_available())


def test_devices_says_how_to_get_what_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    assert main(["devices"]) == 0
    assert "pip install 'bfc-allocator[opencl]'" in capsys.readouterr().out


def test_a_device_that_cannot_be_asked_hides_no_other(capsys, monkeypatch):
    def broken(number):
        raise RuntimeError(f"device {number} fell off the bus\nand more")

    monkeypatch.setattr(devices, "_opencl_device", broken)
    monkeypatch.setattr(devices, "_host", broken)
    assert main(["devices"]) == 0
    assert "cannot be asked: device 0 fell off the bus" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["opencl:64MiB", "opencl:0:64MiB", "opencl:0", "opencl"])
def test_a_replay_runs_in_opencl_memory(capsys, tmp_path, name):
    if not bfc.opencl.is_available():
        pytest.skip(str(bfc.opencl.is_available()))
    path = tmp_path / "t.npz"
    bfc.Trace([0, 0, 1], [0, 1, 0], [1000, 300, 0]).save(path)
    options = ["--device", name, "--memory-limit", "32MiB", "--json"]
    assert main(["replay", str(path), *options]) == 0
    (row,) = json.loads(capsys.readouterr().out)["traces"]
    assert (row["refused"], row["peak_bytes_in_use"]) == (0, 1536)


@pytest.mark.parametrize(
    "name", ["opencl:99", "opencl:0:plenty", "opencl:1MiB:0", "opencl:-1", "opencl:²"]
)
def test_a_replay_on_no_such_device_is_a_wrong_call(capsys, name):
    assert main(["replay", SMALL, "--device", name]) == 2
    said = capsys.readouterr().err
    assert said.startswith("bfc: ")
    assert "invalid literal" not in said


def test_the_version_is_the_packages(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"bfc {bfc.__version__}"
    running, compiled = second.split("; compiled by ")
    assert re.fullmatch(r"CPython 3\.\d+\.\w+, NumPy [\d.]+, Linux \w+", running)
    assert re.fullmatch(r"(gcc|clang) \d.* from Cython 3\.\d+\.\d+", compiled)
