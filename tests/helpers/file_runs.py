"""Runs `file_history.py` in a folder, apart as `bfc predict` does, and looks at the folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HELPER, HISTORY = (
    Path(__file__).with_name("kept_apart.py"),
    Path(__file__).with_name("file_history.py"),
)
#: What the system refuses, by what is left then.
CASES = {
    "namespace": "",
    "namespace of an ordinary user": "root",
    "landlock": "root,unshare",
}
BLOCK = {"block": "block"}
STEPS = 1000


def state(folder: Path) -> list[tuple[str, int, int, bytes]]:
    """All that is known of what is in a folder."""
    found = []
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found.append((str(path), status.st_mode, status.st_mtime_ns, content))
    return found


def fill(folder: Path) -> None:
    (folder / "c/d").mkdir(parents=True)
    for name in ("a", "c/a", "c/d/a"):
        (folder / name).write_text(f"mine: {name}")
    (folder / "link").symlink_to("c")
    for path in folder.rglob("*"):
        os.utime(path, (7, 7), follow_symlinks=False)


def history(folder: Path, arguments: list[str], refused: str | None = None) -> list[str]:
    """What the program prints in a folder, of which nothing changes if it runs apart."""
    fill(folder)
    tmp = folder.parent / "tmp"
    tmp.mkdir(exist_ok=True)
    before = state(folder)
    apart = [] if refused is None else [str(HELPER), refused]
    done = subprocess.run(
        [sys.executable, *apart, str(HISTORY), *arguments],
        cwd=folder,
        env=os.environ | {"TMPDIR": str(tmp), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if refused is not None:
        assert state(folder) == before, f"file_history.py {' '.join(arguments)}"
    return done.stdout.splitlines()


def see_the_same(folder: Path, case: str, seed: int, steps: int) -> None:
    """A history that runs apart in `folder/mine` sees what it sees in `folder/real`."""
    arguments = [str(seed), str(steps), "all" if case.startswith("namespace") else "python"]
    real = history(folder / "real", arguments)
    ours = history(folder / "mine", arguments, (CASES | BLOCK)[case])
    for one, other in zip(ours, real, strict=True):
        assert one == other, f"file_history.py {' '.join(arguments)}"


def files(case: str, seed: int) -> int:
    """A history of a case, or under Landlock one of what it knows of C and other programs, which
    see the user's files and not the script's."""
    with tempfile.TemporaryDirectory() as folder:
        if case == "attack":
            history(Path(folder, "mine"), [str(seed), str(STEPS), case], CASES["landlock"])
        else:
            see_the_same(Path(folder), case, seed, STEPS)
    return STEPS
