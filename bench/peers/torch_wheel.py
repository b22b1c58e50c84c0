"""Torch's published wheels: what is downloaded of them, once, and kept.

`keep` has what is the same in each wheel of a version (Python, headers, licences), of the smallest
one (for macOS, 80 MB and more).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.peers.tensorflow import PeerUnavailable, run

WHEEL = ("--python-version", "3.11", "--implementation", "cp", "--abi", "cp311")
PLATFORMS = ("macosx_11_0_arm64", "macosx_14_0_arm64")


def keep(folder: Path, version: str, place: Callable[[str], str | None]) -> Path:
    """The folder, made if it is not there yet, with what `place` names of the wheel's files: where
    in the folder a file is kept, or None.

    Raises PeerUnavailable where the wheel cannot be had, or holds nothing of that.
    """
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder.parent) as name:
        made = Path(name) / "kept"
        made.mkdir()
        for wheel in download(Path(name), [f"torch=={version}"], WHEEL, PLATFORMS):
            extract(wheel, made, place)
        if not any(made.iterdir()):
            raise PeerUnavailable(f"the wheel of torch {version} holds nothing of what is needed")
        rename(made, folder)
    return folder


def rename(made: Path, wanted: Path) -> None:
    try:
        made.rename(wanted)
    except OSError:
        if not wanted.exists():  # otherwise another process was first, with the same files
            raise


def download(
    folder: Path, packages: Sequence[str], python: Sequence[str], platforms: Sequence[str]
) -> list[Path]:
    """The wheels of some packages, for a Python and the first of the platforms that has one."""
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "-q", *python]
    named = [word for name in platforms for word in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", *options, *named, *packages]
    # A machine may cap what pip installs. What is downloaded here is only unpacked.
    uncapped = ["env", f"PIP_CONSTRAINT={os.devnull}"]
    run([*uncapped, *command, "-d", str(folder)], "the download")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != len(packages):
        raise PeerUnavailable(f"the download of {', '.join(packages)} is incomplete")
    return wheels


def extract(wheel: Path, target: Path, place: Callable[[str], str | None]) -> None:
    """Keeps what `place` names of a wheel, and deletes the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            wanted = None if info.is_dir() else place(info.filename)
            if wanted is None or ".." in Path(wanted).parts:
                continue
            path = target / wanted
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(info) as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink)
    wheel.unlink()
