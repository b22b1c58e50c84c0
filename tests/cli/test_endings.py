"""How a command ends that is not left alone: signals, a full disk, names that move the cursor."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import bfc
from bfc import files
from bfc_tools.cli import main, streams
from bfc_tools.cli.endings import Ended, ended_in_order

pytestmark = pytest.mark.usefixtures("hears_hangups")

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "bench" / "traces"
COMMAND = [sys.executable, "-m", "bfc"]
ODD = "a\x1b[31m\u202eb\x00\x9b2J"
RAW = ["\x1b", "\u202e", "\x00", "\x9b"]


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc")
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("pause", [pytest.param(0.0, marks=pytest.mark.long), 0.4])
def test_a_signal_leaves_neither_folders_nor_workers(tmp_path: Path, number: int, pause: float):
    words = ["advise", str(TRACES / "unet_buckets.npz"), "--device", "80GiB", "--thorough"]
    command = subprocess.Popen(
        [*COMMAND, *words, "--jobs", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("bfc-advise-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(pause)
    workers = children(command.pid)
    for _ in range(2):  # a terminal that is closed sends several
        command.send_signal(number)
        if number == signal.SIGINT:
            break
    out, err = command.communicate(timeout=60)
    said = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    assert (command.returncode, out) == (128 + number, ""), err
    assert err.splitlines()[-1] == f"bfc: {said}"
    assert not list(tmp_path.glob("bfc-*"))
    deadline = time.monotonic() + 20
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))


def test_what_a_killed_search_left_the_next_one_removes(tmp_path: Path):
    words = ["advise", str(TRACES / "unet_buckets.npz"), "--device", "80GiB", "--jobs", "2"]
    ours = os.environ | {"TMPDIR": str(tmp_path)}
    command = subprocess.Popen([*COMMAND, *words, "--thorough"], cwd=ROOT, env=ours)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("bfc-advise-*/lock")) and time.monotonic() < deadline:
        time.sleep(0.01)
    command.kill()
    command.wait()
    (left,) = tmp_path.glob("bfc-advise-*")
    os.utime(left / "lock", (0, 0))  # one that was made just now may be about to be locked
    words[1] = str(TRACES / "gpu_lm_small.npz")  # which is soon done
    subprocess.run(
        [*COMMAND, *words], cwd=ROOT, env=ours, check=True, stdout=subprocess.DEVNULL, timeout=120
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_file_that_is_half_written_goes(tmp_path: Path, number: int):
    code = f"""
import os, sys
from pathlib import Path
import bfc_tools.browser.report as report
real = report.replacing
def stopped(path):
    class Now:
        def __enter__(self):
            self.made = real(path)
            file = self.made.__enter__()
            os.kill(os.getpid(), {int(number)})
            return file
        def __exit__(self, *error):
            return self.made.__exit__(*error)
    return Now()
report.replacing = stopped
from bfc_tools.cli import main
sys.exit(main())
"""
    words = ["report", str(TRACES / "gpu_lm_small.npz"), "-o", str(tmp_path / "report.html")]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 128 + number, done.stderr
    assert not list(tmp_path.iterdir())


def test_a_signal_that_somebody_handles_is_left_alone():
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with ended_in_order():
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Ended, match="ended by SIGHUP"), ended_in_order():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("number", "ends"), [(signal.SIGTERM, Ended), (signal.SIGINT, KeyboardInterrupt)]
)
def test_an_error_while_things_are_cleaned_up_does_not_hide_the_signal(number: int, ends: type):
    def write() -> None:
        try:
            signal.raise_signal(number)
        finally:
            raise ValueError("as zipfile, whose file is open still")

    with pytest.raises(ends), ended_in_order():
        write()


@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_ctrl_c_during_imports_is_one_line(seconds: float):
    """Sent when the interpreter has just begun to import the command, or some time after that."""
    code = f"""
import signal, sys, threading, time
from bfc_tools import command
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "bfc_tools.cli":
            signal.setitimer(signal.ITIMER_REAL, {seconds} or 1e-6)
            time.sleep({0 if seconds else 0.05})
        return None
signal.signal(signal.SIGALRM, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
sys.argv = ["bfc", "advise", {str(TRACES / "unet_buckets.npz")!r}, "--device", "80GiB",
            "--thorough", "--jobs", "1"]
sys.exit(command.main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == "bfc: interrupted"
    assert "Traceback" not in done.stderr


# Names -----------------------------------------------------------------------------------------


def test_only_line_ends_and_tabulators_stay():
    assert streams.escaped("plain\ttext\n") == "plain\ttext\n"
    assert streams.escaped("café 中文 █") == "café 中文 █"
    assert streams.escaped(ODD) == r"a\x1b[31m\u202eb\x00\x9b2J"
    assert streams.escaped("a\rb\u2066\ud800") == r"a\rb\u2066\ud800"


def snapshot_of_odd_names() -> dict[str, object]:
    """A snapshot of PyTorch with odd names wherever it has names."""
    frame = {"filename": f"/home/me/{ODD}.py", "name": ODD, "line": 3}
    block = {"addr": 1 << 40, "size": 2 << 20, "requested_size": 2 << 20, "frames": [frame]}
    entry = {"addr": 1 << 40, "size": 2 << 20, "stream": 0, "frames": [frame], "time_us": 1}
    actions = ("segment_alloc", "alloc", "free_requested", "free_completed", "alloc")
    return {
        "segments": [
            {
                "address": 1 << 40,
                "total_size": 2 << 20,
                "stream": 0,
                "segment_type": "small",
                "allocated_size": 2 << 20,
                "active_size": 2 << 20,
                "requested_size": 2 << 20,
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "device": 0,
                "frames": [frame],
                "blocks": [block | {"state": "active_allocated", "user_metadata": ODD}],
            }
        ],
        "device_traces": [[entry | {"action": action, "user_metadata": ODD} for action in actions]],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ODD, "torch_version": ODD},
    }


@pytest.mark.parametrize(
    "words",
    [
        ["advise", "--device", "1MiB", "--jobs", "1"],
        ["advise", "--device", "8GiB", "--jobs", "1", "--all"],
        ["report", "-o", "{}.html"],
        ["replay"],
        ["plan", "-o", "{}.npz"],
        ["anonymise", "{}.out"],
        ["diff", "{run}"],
        ["nothing"],
        ["report", "--no-such-option-{}"],
    ],
    ids=lambda words: words[0],
)
def test_no_command_prints_control_characters_of_names(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str], monkeypatch
):
    name = ODD.replace("\x00", "\n")
    run = tmp_path / f"{name}.pickle"
    run.write_bytes(pickle.dumps(snapshot_of_odd_names()))
    monkeypatch.chdir(tmp_path)
    words = [word.replace("{run}", str(run)).replace("{}", name) for word in words]
    try:
        main([words[0], str(run), *words[1:]])
    except SystemExit:
        pass
    out, err = capfd.readouterr()
    assert out or err
    for raw in RAW:
        assert raw not in out
        assert raw not in err


# Full disks ------------------------------------------------------------------------------------

FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")


@FULL
@pytest.mark.parametrize("words", [["report", "{run}", "-o", "{}"], ["anonymise", "{run}", "{}"]])
def test_a_full_disk_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], words):
    full = tmp_path / "full.npz"
    full.symlink_to("/dev/full")
    run = str(TRACES / "gpu_lm_small.npz")
    assert main([word.replace("{run}", run).replace("{}", str(full)) for word in words]) == 2
    err = capsys.readouterr().err
    assert f"No space left on device: '{full}'" in err


def test_a_file_that_grows_too_large_is_named_and_goes(tmp_path: Path):
    page = tmp_path / "report.html"
    done = subprocess.run(
        [*COMMAND, "report", str(TRACES / "gpu_lm_small.npz"), "-o", str(page)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert (done.returncode, done.stderr) == (2, f"bfc: [Errno 27] File too large: '{page}'\n")
    assert not list(tmp_path.iterdir())


@FULL
def test_a_full_standard_output_is_named():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "replay", str(TRACES / "gpu_lm_small.npz")],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=False,
        )
    assert done.returncode == 2
    assert "No space left on device: 'standard output'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_only_an_error_of_writing_gets_a_name():
    with pytest.raises(OSError, match="No such file") as caught, files.naming("mine"):
        open("/nowhere/at/all")  # noqa: SIM115
    assert caught.value.filename == "/nowhere/at/all"
    with pytest.raises(BrokenPipeError) as pipe, files.naming("mine"):
        raise BrokenPipeError(32, "Broken pipe")
    assert pipe.value.filename is None


def test_a_full_folder_of_temporary_files_is_named(monkeypatch: pytest.MonkeyPatch):
    def full(*arguments: object, **arrays: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bfc_tools.study.workers.np.savez", full)
    with pytest.raises(OSError, match=r"bfc-advise-.*trace\.npz"):
        bfc.advise(bfc.Trace([0], [0], [4]), "1 GiB", jobs=2)
