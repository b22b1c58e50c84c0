"""What all commands share: a list of them, errors in one line, and output under any encoding."""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bfc
from bfc import trace
from bfc_tools import cli
from bfc_tools.cli import commands, completion, devices, main
from bfc_tools.study import advise

ODD = "café 中文 \U0001f600"


def test_without_a_command_there_is_a_line_for_each(capsys):
    assert main([]) == 0
    out = " ".join(capsys.readouterr().out.split())
    names = commands()[1]
    assert {"advise", "demo", "devices", "replay", "report"} <= names.keys()
    for name in names:
        assert re.search(rf" {name} \w+ \w+ \w+", out)


@pytest.mark.parametrize(
    ("error", "printed"),
    [
        (KeyError(7), "KeyError: 7: bfc did not expect this"),
        (IndexError("list\nindex"), "IndexError: list index: bfc did not expect this"),
        (UnicodeError("odd"), "UnicodeError: odd: bfc did not expect this"),
        (AssertionError(), "AssertionError: bfc did not expect this"),
        (MemoryError(), "MemoryError: the command needs more memory"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_command_does_not_expect_is_one_line(capsys, monkeypatch, error, printed):
    def broken(*_arguments: object) -> None:
        raise error

    monkeypatch.setattr(devices, "_listed", broken)
    assert main(["devices"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"bfc: {printed}")
    assert "--traceback" in err or isinstance(error, MemoryError)
    for words in (["--traceback", "devices"], ["devices", "--traceback"]):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert err.startswith("Traceback (most recent call last):")
        assert "in broken" in err
        assert f"\nbfc: {printed}" in err


def test_every_command_prints_in_any_encoding(tmp_path, monkeypatch):
    """The name of a file, and the name of an owner, do not fit."""
    run = tmp_path / f"{ODD}.npz"
    bfc.Trace([0], [0], [4096], owner=[1], owners=["", ODD]).save(run)
    other = tmp_path / "other.npz"
    bfc.Trace([0], [0], [512]).save(other)
    for words in (
        ["replay", str(run)],
        ["diff", str(other), str(run), "--allow", "1GiB"],
        ["diff", str(other), str(run), "--allow", "1GiB", "--csv"],
        ["report", str(run), "-o", str(tmp_path / f"{ODD}.html")],
        ["anonymise", str(run), str(tmp_path / f"{ODD} 2.npz")],
        ["devices"],
    ):
        out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", out)
        assert main(words) == 0
        out.seek(0)
        assert "caf\\xe9 \\u4e2d" in out.read() or words == ["devices"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "settings",
    [
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=["latin-1", "C"],
)
def test_a_locale_is_an_encoding(tmp_path, settings):
    path = tmp_path / "run.npz"
    bfc.Trace([0], [0], [4096], owner=[1], owners=["", ODD]).save(path)
    empty = tmp_path / "empty.npz"
    bfc.Trace([], [], []).save(empty)
    done = subprocess.run(
        [sys.executable, "-m", "bfc", "diff", str(path), str(empty)],
        capture_output=True,
        check=False,
        env={**os.environ, **settings},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u4e2d" in done.stdout


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("out", "code"), [("/dev/full", 2), (None, 0)])
def test_where_nothing_can_be_printed_there_is_no_traceback(out, code):
    to = f"> {out}" if out else ">&-"
    words = ["sh", "-c", f"{sys.executable} -m bfc devices --csv {to}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr in (
        "",
        "bfc: [Errno 28] No space left on device: 'standard output'\n",
    )


def test_a_warning_is_a_line_without_a_place_in_the_program(tmp_path):
    """A recording with a key that no PyTorch known today writes."""
    path = tmp_path / "newer.pickle"
    keys = ("segments", "device_traces", "host_segments", "host_traces", "new_thing")
    settings = {"pinned_max_cached_size": 1, "pinned_max_round_threshold": 1}
    content = {key: [] for key in keys} | {"allocator_settings": settings}
    content["device_traces"] = [[{"action": "alloc", "addr": 4096, "size": 512, "stream": 0}]]
    path.write_bytes(pickle.dumps(content))
    words = [sys.executable, "-m", "bfc", "replay", str(path), "--no-picture"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stderr.startswith("bfc: the snapshot is read as one of PyTorch 2.15: it has keys")
    assert done.stderr.count("\n") == 1


def test_a_warning_of_either_package_is_bfcs():
    for module in (trace, advise):
        assert cli._in_a_line("odd", UserWarning, module.__file__, 1) == "bfc: odd\n"
    of_a_script = cli._in_a_line("odd", UserWarning, __file__, 1)
    assert of_a_script.startswith(f"{__file__}:1: UserWarning: odd")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["predcit"], "bfc: error: there is no command 'predcit'. Did you mean 'predict'?"),
        (["--traceback", "replya", "x.npz"], "'replya'. Did you mean 'replay'?"),
        (["xyzzy"], "there is no command 'xyzzy'. There are demo, run, predict, advise,"),
        (["replay", "x", "--jsno"], "bfc replay: error: unrecognized arguments: --jsno. Did"),
        (["predict", "--devcie=h100", "t.py"], "--devcie=h100. Did you mean '--device'?"),
        (["--versoin"], "unrecognized arguments: --versoin. Did you mean '--version'?"),
        (["devices", "all"], "bfc devices: error: unrecognized arguments: all\n"),
    ],
)
def test_a_name_that_is_not_there_is_answered_with_one_that_is(capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


COMPLETED = [
    ("bfc pre", "predict"),
    ("bfc diff --al", "--allow"),
    ("bfc predict --by m", "module"),
    ("bfc advise LICE", "LICENSE"),
    ("bfc predict --device 24GiB READ", "README.md"),
]


@pytest.mark.parametrize(("typed", "completed"), COMPLETED)
def test_bash_completes_commands_options_and_files(capsys, tmp_path, typed, completed):
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "bfc"
    script.write_text(capsys.readouterr().out)
    *_, last = words = typed.split()
    tried = (
        f"source {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; "
        '_shtab_bfc bfc {last}; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", tried.replace("{last}", last)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert (done.stdout.split(), done.stderr) == ([completed], "")


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_a_shell_takes_the_script(capsys, tmp_path, shell):
    pytest.importorskip("shtab")
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    done = subprocess.run([shell, "-n", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_shtab_it_is_said_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "zsh"]) == 2
    assert "pip install 'bfc-allocator[cli]'" in capsys.readouterr().err
