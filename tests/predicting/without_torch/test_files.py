"""What a predicted program does to files is so for the program alone."""

from __future__ import annotations

import bz2
import contextlib
import glob
import gzip
import importlib
import io
import os
import random
import shutil
import sqlite3
import stat
import subprocess
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from os import remove as remove_it
from pathlib import Path
from typing import Any

import pytest

from bfc_tools.predicting.file_layer import laid_over
from bfc_tools.predicting.outside import MARK, keep


@contextlib.contextmanager
def thrown_away(started):
    with (
        tempfile.TemporaryDirectory(prefix="bfc-test-") as folder,
        laid_over(folder, started) as layer,
    ):
        yield layer
        layer.end()


NAMES = ("a", "b", "a/c", "a/d", "b/e", "a/c/f", "link", "link/g", "./a/../b")


def fill(folder: Path) -> None:
    (folder / "a/c").mkdir(parents=True)
    (folder / "a/d").write_text("of the user")
    (folder / "b").write_text("of the user, too")
    (folder / "b").chmod(0o640)
    (folder / "link").symlink_to("a")


def look(folder: str = ".") -> list[object]:
    """All that is there, as Python's functions tell."""
    found: list[object] = []
    for top, folders, files in sorted(os.walk(folder)):
        found.append((top, sorted(folders), sorted(files)))
        for name in sorted(folders + files):
            path = os.path.join(top, name)
            mode = os.lstat(path).st_mode
            permissions = 0 if stat.S_ISLNK(mode) else stat.S_IMODE(mode)
            found.append(
                (path, stat.S_IFMT(mode), permissions, os.path.relpath(os.path.realpath(path)))
            )
            if os.path.isfile(path):
                found.append((os.path.getsize(path), Path(path).read_text()))
    return found


def append(path: str) -> None:
    with open(path, "a") as file:
        file.write("more")


def change(path: str) -> None:
    with open(path, "r+") as file:
        file.write("XY")


def raw(path: str) -> None:
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(number, b"raw")
    os.close(number)


def text(path: str) -> tuple[str, str]:
    with open(path) as file:
        return file.read(), file.name


def tree(path: str) -> list[object]:
    with os.scandir(path) as entries:
        return sorted((one.name, one.path, one.is_dir(), one.is_symlink()) for one in entries)


ONE: dict[str, Callable[[str], Any]] = {
    "write": lambda path: Path(path).write_text(f"new {path}"),
    "append": append,
    "change": change,
    "raw": raw,
    "read": text,
    "mkdir": lambda path: os.mkdir(path),
    "makedirs": lambda path: os.makedirs(path + "/x/y"),
    "remove": lambda path: os.remove(path),
    "unlink": lambda path: Path(path).unlink(missing_ok=True),
    "rmdir": lambda path: os.rmdir(path),
    "rmtree": lambda path: shutil.rmtree(path),
    "chmod": lambda path: os.chmod(path, 0o600),
    "utime": lambda path: (os.utime(path, (1, 1)), os.path.getmtime(path)),
    "truncate": lambda path: os.truncate(path, 3),
    "listdir": lambda path: sorted(os.listdir(path)),
    "scandir": tree,
    "exists": lambda path: (os.path.exists(path), os.path.isdir(path), os.path.islink(path)),
    "readlink": lambda path: os.readlink(path),
    "access": lambda path: os.access(path, os.R_OK),
    "glob": lambda path: sorted(glob.glob(f"{path}/**", recursive=True)),
    "fchdir": lambda path: (
        os.fchdir(one := os.open(path, os.O_RDONLY)),
        os.close(one),
        append("in-fchdir"),
        os.chdir(".."),
    ),
    "chdir": lambda path: (
        os.chdir(path),
        os.path.basename(os.getcwd()),
        os.chdir(".."),
        os.listdir(".") and 0,
    ),
}
TWO: dict[str, Callable[[str, str], Any]] = {
    "rename": lambda old, new: os.rename(old, new),
    "replace": lambda old, new: os.replace(old, new),
    "move": lambda old, new: shutil.move(old, new),
    "copy": lambda old, new: shutil.copy(old, new),
    "copytree": lambda old, new: shutil.copytree(old, new, symlinks=True),
    "symlink": lambda old, new: os.symlink(old, new),
}


def history(seed: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    rng = random.Random(seed)
    for _ in range(40):
        first, second = rng.choice(NAMES), rng.choice(NAMES)
        name = rng.choice([*ONE, *TWO])
        if name in ONE:
            yield f"{name} {first}", lambda name=name, one=first: ONE[name](one)
        elif name != "copytree" or not ("link" in first + second or second.startswith(first)):
            yield f"{name} {first} {second}", lambda n=name, a=first, b=second: TWO[n](a, b)


def answers(seed: int) -> list[object]:
    """What each call returned or raised, and what was there after it."""
    found: list[object] = []
    here = os.getcwd()
    for what, call in history(seed):
        try:
            found.append((what, call()))
        except (OSError, shutil.Error) as error:
            found.append((what, type(error).__name__, getattr(error, "errno", None)))
        os.chdir(here)
        found.append(look())
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(60))  # `make soak` goes on
def test_a_program_sees_what_it_would_see(seed: int, tmp_path: Path, monkeypatch) -> None:
    """The same calls on files that are real, and over files that stay as they are."""
    for name in ("real", "kept"):
        (tmp_path / name / "x").mkdir(parents=True)
        fill(tmp_path / name / "x")
    monkeypatch.chdir(tmp_path / "real/x")
    expected = answers(seed)
    monkeypatch.chdir(tmp_path / "kept/x")
    before = look()
    with thrown_away(print):
        found = answers(seed)
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one == other, f"seed {seed}, step {at}: {found[at - at % 2]}"
    assert look() == before


def test_nothing_of_the_users_is_changed_in_other_ways(tmp_path: Path, monkeypatch) -> None:
    """By libraries of Python that got the functions before the prediction began, and by C."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    before = look()
    with thrown_away(print) as calls:
        remove_it("b")
        assert not os.path.exists("b")
        for name, module in (("a.gz", gzip), ("a.bz2", bz2)):
            with module.open(name, "wt") as file:
                file.write("text")
            with module.open(name, "rt") as file:
                assert file.read() == "text"
        with zipfile.ZipFile("a.zip", "w") as archive:
            archive.write("a.gz")
        database = sqlite3.connect("d.sqlite")
        database.execute("create table t (x)")
        database.close()
        with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as file:
            file.write("whole")
        os.replace(file.name, "named")
        Path("module_of_a_program.py").write_text("ANSWER = 42")
        monkeypatch.syspath_prepend(".")
        assert importlib.import_module("module_of_a_program").ANSWER == 42
        with open("own", "x", opener=lambda path, flags: os.open(path, flags)) as file:
            assert file.name == "own"
        shutil.make_archive("b", "tar", "a")
        shutil.unpack_archive("b.tar", "unpacked", filter="data")
        assert Path("unpacked/d").read_text() == "of the user"
        names = {
            os.path.relpath(path) for path in calls.changes().written if "__pycache__" not in path
        }
        archives = {"a.gz", "a.bz2", "a.zip", "b.tar", "unpacked/d"}
        assert names == {*archives, "d.sqlite", "named", "own", "module_of_a_program.py"}
        assert calls.changes().removed == [str(tmp_path / "b")]
    assert look() == before
    assert calls.changes().removed == [str(tmp_path / "b")]
    assert not os.path.exists(calls.folder)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "change",
    [
        lambda: io.FileIO("b", "w"),
        lambda: real_unlink("b"),
        lambda: real_rename("named", "b"),
        lambda: real_mkdir("new"),
    ],
    ids=["FileIO", "unlink", "rename", "mkdir"],
)
def test_what_cannot_be_kept_from_the_files_is_refused(change, tmp_path: Path, monkeypatch) -> None:
    """A function of the system's that somebody has put aside, where no module shows it."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    before = look()
    with thrown_away(print):
        Path("named").write_text("of the program")
        with pytest.raises(PermissionError, match="--real-files"):
            change()
    assert look() == before


class Hidden:
    unlink, rename, mkdir = os.unlink, os.rename, os.mkdir


def real_unlink(path: str) -> None:
    Hidden.unlink(path)


def real_rename(old: str, new: str) -> None:
    Hidden.rename(old, new)


def real_mkdir(path: str) -> None:
    Hidden.mkdir(path)


def test_temporary_files_are_real_and_other_programs_see_them() -> None:
    seen: list[str] = []
    with thrown_away(seen.append):
        with tempfile.TemporaryDirectory() as folder, open(f"{folder}/a", "w") as file:
            file.write("seen")
            file.flush()
            assert subprocess.run(["cat", f"{folder}/a"], capture_output=True).stdout == b"seen"
        assert not os.path.exists(folder)
        with tempfile.TemporaryFile() as file:
            file.write(b"x")
    assert seen == ["cat"]


def test_an_open_file_of_the_users_is_changed_for_the_program_alone(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    before = look()
    with thrown_away(print), open("b") as file:
        os.fchmod(file.fileno(), 0o600)
        os.utime(file.fileno(), (1, 1))
        assert (os.stat("b").st_mode & 0o777, os.stat("b").st_mtime) == (0o600, 1)
        Path(f"/proc/self/fd/{file.fileno()}").write_text("of the program")
        assert Path("b").read_text() == "of the program"
    assert look() == before


def test_what_fails_leaves_files_as_they_were(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    before = look()
    with thrown_away(print):
        os.mkdir("new")
        with pytest.raises(NotADirectoryError):
            os.open("b", os.O_WRONLY | os.O_TRUNC | os.O_DIRECTORY)
        with pytest.raises(NotADirectoryError):
            os.rename("new", "b")
        with pytest.raises(OSError, match="not empty"):
            os.rename("new", "a")
        os.rmdir("new")
        assert look() == before
    assert look() == before


def test_a_file_is_no_folder(tmp_path: Path, monkeypatch) -> None:
    """Also where a link leads through it, and nothing of the user's has its name."""
    monkeypatch.chdir(tmp_path)
    with thrown_away(print):
        Path("new").touch()
        os.symlink("new/e", "link")
        for path in ("new/e", "new/.", "link/a", "link"):
            with pytest.raises(NotADirectoryError):
                os.stat(path)


def test_a_file_in_a_large_folder_costs_no_more(tmp_path: Path, monkeypatch) -> None:
    """Libraries put the labels of a data set beside its images."""
    monkeypatch.chdir(tmp_path)
    for number in range(100):
        Path(f"{number}.jpg").touch()
    with thrown_away(print) as calls:
        Path("labels.cache").touch()
        assert len(os.listdir()) == len(list(os.scandir())) == 101
        with calls.aside():
            assert os.listdir(f"{calls.folder}/tree{tmp_path}") == ["labels.cache"]


def test_a_database_has_its_journal_and_attaches_no_other(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    mine = sqlite3.connect("base")
    mine.executescript("pragma journal_mode=wal; create table t (x); insert into t values (1)")
    assert os.path.getsize("base-wal")  # in which it stands
    before = {path: path.read_bytes() for path in tmp_path.glob("base*")}
    with thrown_away(print):
        base = sqlite3.connect("base")
        base.executescript("insert into t values (2); vacuum")
        assert base.execute("select x from t").fetchall() == [(1,), (2,)]
        with pytest.raises(sqlite3.DatabaseError, match="not authorized"):
            base.execute("attach 'b' as other")
        base.close()
    assert {path: path.read_bytes() for path in tmp_path.glob("base*")} == before
    mine.close()


def test_a_file_of_the_predictions_own_is_kept(tmp_path: Path, monkeypatch) -> None:
    """But for a recording of a real run no prediction is put in its place."""
    monkeypatch.chdir(tmp_path)
    Path("real.pickle").write_bytes(b"recorded")
    with thrown_away(print) as calls:
        os.makedirs("new")
        assert keep(calls, "new/snapshot.pickle", b"1") == "new/snapshot.pickle"
        assert keep(calls, "new/snapshot.pickle", b"2") == "new/snapshot.pickle"
        assert keep(calls, "real.pickle", b"3") == "real.predicted.pickle"
        assert Path("real.predicted.pickle").read_bytes() == b"3" + MARK
    assert Path("new/snapshot.pickle").read_bytes() == b"2" + MARK
    assert Path("real.pickle").read_bytes() == b"recorded"


def test_the_functions_are_back_afterwards(tmp_path: Path, monkeypatch) -> None:
    """Also in modules that took them while the program ran."""
    monkeypatch.chdir(tmp_path)
    functions = (open, os.open, os.stat, os.remove, os.scandir, shutil.os.rename, remove_it)

    def program() -> None:
        os.makedirs("in/it")
        os.chdir("in/it")
        exec("from os import remove as taken", globals())
        assert (open, os.open, os.stat, os.remove) != functions[:4]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), thrown_away(print):
        program()
    assert (open, os.open, os.stat, os.remove, os.scandir, os.rename, remove_it) == functions
    assert globals().pop("taken") is os.remove
    assert os.getcwd() == str(tmp_path)
    Path("after").write_text("real")
    assert os.listdir(tmp_path) == ["after"]


def test_threads_write_at_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(50):
                os.makedirs(f"out/{turn}/{number}")
                Path(f"out/{turn}/{number}/new").write_text(f"{turn}")
                os.replace(f"out/{turn}/{number}/new", f"out/{turn}/{number}/file")
                assert Path(f"out/{turn}/{number}/file").read_text() == f"{turn}"
        except BaseException as error:
            failed.append(error)

    with thrown_away(print) as calls:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(calls.changes().written) == 200
    assert not failed
    assert os.listdir(tmp_path) == []
