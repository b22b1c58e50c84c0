"""Files of torch's published wheels that are the same in each of them: Python, headers, licences.

They come from the smallest wheel of a version (for macOS, 80 MB and more), downloaded once.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
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
        _extract(_download(Path(name), version), made, place)
        if not any(made.iterdir()):
            raise PeerUnavailable(f"the wheel of torch {version} holds nothing of what is needed")
        try:
            made.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process was first, with the same files
                raise
    return folder


def _download(folder: Path, version: str) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "-q", *WHEEL]
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    package = [f"torch=={version}", *platforms, "-d", str(folder)]
    run([sys.executable, "-m", "pip", "download", *options, *package], "the download")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise PeerUnavailable(f"the download of torch {version} left no wheel")
    return wheels[0]


def _extract(wheel: Path, target: Path, place: Callable[[str], str | None]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            wanted = None if info.is_dir() else place(info.filename)
            if wanted is None or ".." in Path(wanted).parts:
                continue
            path = target / wanted
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(info) as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink)
