"""A script runs apart: what it does to files is so for the script alone, and ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
from file_runs import BLOCK, CASES, HELPER, history, see_the_same, state

from bfc_tools.predicting import kernel, outside

IN_A_NAMESPACE = [case for name, case in CASES.items() if name.startswith("namespace")]
NEITHER = "root,unshare,landlock_create_ruleset"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A user's folder."""
    folder = tmp_path / "mine"
    (folder / "data").mkdir(parents=True)
    (folder / "data.bin").write_text("mine")
    (folder / "data/one").write_text("mine, too")
    (folder / "data.bin").chmod(0o640)
    (tmp_path / "tmp").mkdir()
    return folder


def begin(
    mine: Path, program: str, refused: str = "", within: Sequence[str] = ()
) -> subprocess.Popen[str]:
    script = mine.parent / "program.py"
    script.write_text(textwrap.dedent(program))
    return subprocess.Popen(
        [*within, sys.executable, HELPER, refused, script],
        cwd=mine,
        env=os.environ
        | {"TMPDIR": str(mine.parent / "tmp"), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def run(
    mine: Path, program: str, refused: str = "", within: Sequence[str] = ()
) -> tuple[int, str, str]:
    """The code, and what was printed. Nothing of the user's has changed, and nothing is left."""
    before = state(mine)
    running = begin(mine, program, refused, within)
    out, err = running.communicate(timeout=120)
    assert state(mine) == before
    assert os.listdir(mine.parent / "tmp") == []
    return running.returncode, out, err


FILES = """
    import ctypes, os, sqlite3, subprocess
    open("new", "w").write("new")
    open("data.bin", "r+").write("XY")
    os.rename("data/one", "two")
    os.mkdir("folder")
    os.replace("folder", "other")
    os.rename("data", "data_old")
    os.rename("data_old", "data")
    open("/dev/shm/bfc-moved", "w").write("new")
    os.replace("/dev/shm/bfc-moved", "moved")
    os.chmod("data.bin", 0o600)
    os.utime("two", (1, 1))
    os.setxattr("two", "user.x", b"1")
    subprocess.run("echo child > child; cat two; rm two; touch -d 1999-01-01 data", shell=True)
    libc = ctypes.CDLL(None)
    libc.truncate(b"data.bin", ctypes.c_long(1))
    base = sqlite3.connect("base"); base.execute("create table t (x)"); base.commit(); base.close()
    print(sorted(os.listdir()), open("data.bin").read(), os.stat("data.bin").st_mode & 0o777)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("refused", IN_A_NAMESPACE)
def test_python_c_and_programs_see_the_files_of_the_script(mine: Path, refused: str) -> None:
    code, out, err = run(mine, FILES, refused)
    assert (code, err) == (0, "")
    seen = ["base", "child", "data", "data.bin", "moved", "new", "other"]
    assert out == f"mine, too{seen} X {0o600}\n"


IN_PYTHON = """
    import os, sqlite3, subprocess
    open("new", "w").write("new")
    open("data.bin", "r+").write("XY")
    os.rename("data/one", "two")
    os.rename("data", "other")
    os.chmod("data.bin", 0o600)
    os.utime("two", (1, 1))
    base = sqlite3.connect("base"); base.execute("create table t (x)"); base.commit(); base.close()
    done = subprocess.run("echo child > child", shell=True, stderr=subprocess.DEVNULL)
    assert done.returncode != 0
    print(sorted(os.listdir()), open("data.bin").read(), os.stat("data.bin").st_mode & 0o777)
"""


def test_under_landlock_python_sees_them_and_programs_cannot_write(mine: Path) -> None:
    code, out, err = run(mine, IN_PYTHON, CASES["landlock"])
    assert (code, err) == (0, "")
    assert out == f"{['base', 'data.bin', 'new', 'other', 'two']} XYne {0o600}\n"


WAYS = {
    "a link in a temporary folder": """
        import os, tempfile
        link = tempfile.mkdtemp() + "/link"
        os.symlink(os.path.abspath("data.bin"), link)
        for way in (
            lambda: open(link, "w").write("gone"),
            lambda: open(link, "a").write("gone"),
            lambda: open(link, "r+").write("gone"),
            lambda: os.truncate(link, 0),
            lambda: os.chmod(link, 0),
            lambda: os.utime(link, (1, 1)),
        ):
            try: way()
            except PermissionError: pass
    """,
    "an open file": """
        import os
        own = f"/proc/{os.getpid()}/fd"
        for where in ("/dev/fd", "/proc/self/fd", own, "/proc/thread-self/fd"):
            try: open(f"{where}/{os.open('data.bin', os.O_RDONLY)}", "w").write("gone")
            except PermissionError: pass
    """,
    "the root of a process outside": """
        import os
        for root in (f"/proc/{os.getppid()}/root", f"/proc/{os.getppid()}/cwd/../../../../.."):
            try: open(root + os.path.abspath("data.bin"), "w").write("gone")
            except OSError: pass
            else: raise SystemExit("it is open")
    """,
    "its own root": """
        import os
        for root in ("/proc/self/root", "/proc/self/cwd/../../../../../../../.."):
            try: open(root + os.path.abspath("data.bin"), "w").write("gone")
            except PermissionError: pass
    """,
    "a database": """
        import os
        from sqlite3 import DatabaseError, dbapi2
        try:
            base = dbapi2.connect("file:data/base?mode=rwc", uri=True)
            base.execute("attach 'data/other' as other")
            base.execute("create table other.t (x)")
        except (DatabaseError, PermissionError): pass
    """,
    "a hard link": """
        import os, tempfile
        link = tempfile.mkdtemp() + "/link"
        try:
            os.link("data.bin", link)
            open(link, "w").write("gone")
        except OSError: pass
    """,
}


#: Each way is tried in a folder that has its name: one that is there shows which file was changed.
EACH_WAY = f"""
import os, textwrap
for way, program in {WAYS!r}.items():
    os.chdir(way)
    exec(textwrap.dedent(program), {{}})
    os.chdir("..")
    print(way)
"""


@pytest.mark.parametrize("refused", CASES.values(), ids=CASES)
def test_there_is_no_way_to_a_file_of_the_users(mine: Path, refused: str) -> None:
    for way in WAYS:
        (mine / way / "data").mkdir(parents=True)
        (mine / way / "data.bin").write_text("mine")
    code, out, err = run(mine, EACH_WAY, refused)
    assert (code, err) == (0, "")
    assert out.splitlines() == list(WAYS)


def test_without_any_way_to_keep_files_nothing_runs(mine: Path) -> None:
    code, out, err = run(mine, "print('it runs')", NEITHER)
    assert (code, out) == (1, "")
    assert "--real-files" in err
    assert err.count("\n") == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("refused", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("import os; os._exit(0)", 2, "the script ended its process itself (code 0)"),
        ("import os; os._exit(7)", 2, "the script ended its process itself (code 7)"),
        ("import os; os.kill(os.getpid(), 9)", 137, "ended by SIGKILL"),
        ("import os; os.abort()", 134, "ended by SIGABRT"),
        ("import os; os.execv('/bin/true', ['true'])", 2, "the script ended its process itself"),
        ("import os; os.fork() or os.setsid()\nimport time; os.fork() or time.sleep(99)", 0, ""),
    ],
)
def test_it_cleans_up_after_every_end(mine: Path, refused, program, code, said) -> None:
    found, out, err = run(mine, program, refused)
    assert found == code
    assert said in err
    assert not out
    assert bool(err) == bool(said)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("hears_hangups")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_ends_it(mine: Path, number: int) -> None:
    program = """
        import signal, sys, time
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(one, lambda number, frame: print("got", number, flush=True))
        open("new", "w").write("x" * 100_000)
        print("ready", flush=True)
        while True: time.sleep(9)
    """
    before = state(mine)
    running = begin(mine, program)
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    running.send_signal(number)
    assert running.stdout.readline() == f"got {number}\n"
    while running.poll() is None:
        running.send_signal(number)
        signal.sigtimedwait([], 0.1)
    running.communicate()
    assert running.returncode == 128 + number
    assert state(mine) == before
    assert os.listdir(mine.parent / "tmp") == []


def test_what_a_killed_prediction_left_the_next_one_removes(mine: Path) -> None:
    running = begin(mine, "print('ready', flush=True)\nimport time; time.sleep(600)")
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    running.kill()
    running.communicate()
    (left,) = (mine.parent / "tmp").iterdir()
    os.utime(left / "lock", (1, 1))
    assert run(mine, "print('next')")[:2] == (0, "next\n")


#: What is odd about a system: what makes it so, and what it refuses.
OVERLAY = "overlay $TMPDIR -o userxattr,lowerdir=low,upperdir=up,workdir=work"
ODD = {
    "TMPDIR is full": ("mount -t tmpfs -o nr_inodes=1 tmpfs $TMPDIR", ""),
    "TMPDIR is read-only": ("mount -t tmpfs -o ro tmpfs $TMPDIR", ""),
    "TMPDIR cannot be an upper layer": (
        f"cd .. && mkdir low up work && mount -t overlay {OVERLAY} && cd mine",
        "",
    ),
    "the home folder is a link": ("ln -s $PWD ../home && cd ../home", ""),
    "no user namespaces": ("echo 0 >/proc/sys/user/max_user_namespaces", "root"),
    "mount is forbidden": ("true", "mount"),
    "Landlock is forbidden": ("true", "landlock_create_ruleset"),
}


def odd(how: str) -> list[str]:
    """A shell with users and mounts of its own, whose system is odd."""
    return ["unshare", "--map-root-user", "--mount", "sh", "-ec", f'{how}; exec "$@"', "-"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ODD)
def test_an_odd_system_is_no_reason_to_change_a_file(mine: Path, name: str) -> None:
    how, refused = ODD[name]
    program = "open('new', 'w').write('new'); print(open('new').read())"
    assert run(mine, program, refused, odd(how)) == (0, "new\n", "")


#: A folder for temporary files with a hundred folders, the oldest of which is the working one, and
#: something that is mounted inside.
CROWD = (
    "mkdir ../crowd; mount -t tmpfs - ../crowd; cd ../crowd; mkdir $(seq 100) inner; "
    "mount -t tmpfs - inner; touch -d 1999-01-01 1; chmod 1777 .; cd 1"
)
IN_THE_CROWD = """
    import os
    open("new", "w").write("new")
    open("../inner/new", "w").write("new")
    with open("/proc/self/mountinfo") as file:
        over = [line.split()[4] for line in file if " - overlay " in line]
    print(len([path for path in over if "/crowd" in path]))
    os.mkdir("../other")
"""


@pytest.mark.sampled(1)
def test_a_user_has_something_over_few_of_many_temporary_folders(mine: Path) -> None:
    """Over what is mounted inside, and over those that changed last and the working one."""
    code, out, err = run(mine, IN_THE_CROWD, "root", odd(CROWD))
    assert (code, out) == (2, f"{kernel.MOST_TEMPORARY + 1}\n")
    assert "Read-only file system: '../other'" in err


def test_root_has_one_folder_over_each_file_system(mine: Path) -> None:
    """Over the outer one and over the inner one, which is mounted in it: the script may write into
    both. Where this process may not mount, it is an ordinary user."""
    as_root = ["unshare", "--mount"]
    if subprocess.run([*as_root, "true"], check=False, capture_output=True).returncode:
        as_root.insert(1, "--map-root-user")
    within = [*as_root, "sh", "-ec", f'{CROWD}; exec "$@"', "-"]
    code, out, err = run(mine, IN_THE_CROWD, "", within)
    if len(as_root) == 2:
        assert (code, out, err) == (0, "2\n", "")
    else:
        assert (code, out) == (2, f"{kernel.MOST_TEMPORARY + 1}\n")


def test_where_the_working_folder_is_gone_nothing_runs(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError, match="cd to one that is there"):
        outside.begin(real_files=False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "how",
    [
        "mount --bind $PWD $PWD && mount -o remount,bind,ro $PWD && cd $PWD",
        "cd .. && mount --bind . . && mount -o remount,bind,ro . && mount -t tmpfs - tmp; cd mine",
    ],
    ids=["the working folder", "the script's, too"],
)
def test_a_tree_that_is_read_only_stays_so(mine: Path, how: str) -> None:
    within = odd(how)
    code, out, err = run(mine, "print(open('data.bin').read()); open('new', 'w')", "", within)
    assert (code, out) == (2, "mine\n")
    assert "Read-only file system: 'new'" in err


@pytest.mark.sampled(2)
@pytest.mark.parametrize("refused", CASES.values(), ids=CASES)
def test_a_full_disk_ends_the_script_with_words(mine: Path, refused: str) -> None:
    program = """
        import time
        with open("large", "wb") as file:
            try:
                while True: file.write(bytes(1 << 20)); file.flush()
            except OSError: time.sleep(60)
    """
    within = odd("mount -t tmpfs -o size=40m tmpfs $TMPDIR")
    code, out, err = run(mine, program, refused, within)
    assert (code, out) == (2, "")
    assert "the script wrote" in err
    assert "nearly full" in err


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(6))  # `make soak` goes on
@pytest.mark.parametrize("case", CASES | BLOCK)
def test_a_script_sees_what_it_would_see_and_changes_nothing(
    tmp_path: Path, case: str, seed: int
) -> None:
    see_the_same(tmp_path, case, seed, 400)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(12))
def test_under_landlock_c_and_programs_change_nothing(tmp_path: Path, seed: int) -> None:
    """They see the user's files, and not the script's."""
    history(tmp_path / "mine", [str(seed), "400", "attack"], CASES["landlock"])
