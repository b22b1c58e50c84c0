"""PyTorch 2.11.0's own viewer of memory snapshots, `torch.cuda._memory_viz`, without PyTorch.

It is one file of plain Python, the same in each published wheel, so `build()` downloads the
smallest one (for macOS, 80 MB) once and keeps that file and the licence. `load()` imports it.
`python -m bench.peers.torch_viz SNAPSHOT.pickle` draws the segments of a snapshot with it.
"""

from __future__ import annotations

import importlib.util
import pickle
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType

from bench.peers.tensorflow import PeerUnavailable, default_cache, run
from bench.peers.torch import VERSION

MODULE = "torch/cuda/_memory_viz.py"
LICENCE = f"torch-{VERSION}.dist-info/licenses/LICENSE"
WHEEL = ("--python-version", "3.11", "--implementation", "cp", "--abi", "cp311")
PLATFORM = ("--platform", "macosx_11_0_arm64")


def build(cache: Path | None = None) -> Path:
    """The viewer's path; downloads only what the cache does not hold yet."""
    root = (cache or default_cache()).resolve()
    folder = root / f"torch_viz-{VERSION}"
    kept = folder / Path(MODULE).name
    if kept.exists():
        return kept
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=root) as name:
        made = Path(name) / "kept"
        made.mkdir()
        _extract(_download(Path(name)), made)
        try:
            made.rename(folder)
        except OSError:
            if not kept.exists():  # otherwise another process was first, with the same file
                raise
    return kept


def _download(folder: Path) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "-q"]
    package = [f"torch=={VERSION}", *WHEEL, *PLATFORM, "-d", str(folder)]
    run([sys.executable, "-m", "pip", "download", *options, *package], "the download")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise PeerUnavailable(f"the download of torch {VERSION} left no wheel")
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in (MODULE, LICENCE):
            try:
                source = archive.open(name)
            except KeyError:
                raise PeerUnavailable(f"the wheel of torch {VERSION} holds no {name}") from None
            with source, (target / Path(name).name).open("wb") as sink:
                shutil.copyfileobj(source, sink)


def load(cache: Path | None = None) -> ModuleType:
    """The viewer as a module. It needs nothing of PyTorch for what is not a profile."""
    spec = importlib.util.spec_from_file_location("torch_memory_viz", build(cache))
    if spec is None or spec.loader is None:
        raise PeerUnavailable("the viewer cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    with open(sys.argv[1], "rb") as file:
        print(load().segsum(pickle.load(file)))


if __name__ == "__main__":
    main()
