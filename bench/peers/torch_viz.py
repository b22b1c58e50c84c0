"""PyTorch 2.11.0's own viewer of memory snapshots, `torch.cuda._memory_viz`, without PyTorch.

It is one file of plain Python, the same in each published wheel, so `build()` downloads the
smallest one (for macOS, 80 MB) once and keeps that file and the licence. `load()` imports it.
`python -m bench.peers.torch_viz SNAPSHOT.pickle` draws the segments of a snapshot with it.
"""

from __future__ import annotations

import importlib.util
import pickle
import sys
from pathlib import Path
from types import ModuleType

from bench.peers.tensorflow import PeerUnavailable, default_cache
from bench.peers.torch_wheel import keep

VERSION = "2.11.0"
MODULE = "torch/cuda/_memory_viz.py"
LICENCE = f"torch-{VERSION}.dist-info/licenses/LICENSE"
KEPT = {name: Path(name).name for name in (MODULE, LICENCE)}


def build(cache: Path | None = None) -> Path:
    """The viewer's path; downloads only what the cache does not hold yet."""
    folder = (cache or default_cache()).resolve() / f"torch_viz-{VERSION}"
    kept = keep(folder, VERSION, KEPT.get) / KEPT[MODULE]
    if not kept.exists():
        raise PeerUnavailable(f"the wheel of torch {VERSION} holds no {MODULE}")
    return kept


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
