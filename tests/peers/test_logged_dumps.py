"""The log of TensorFlow's compiled allocator gives back what ours holds after the same history;
with BFC_TEST_NIGHTLY=1 that of the nightly's, too, from one end and from two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import dump_texts
import logged_history
import pytest

import bfc
from bench.peers.tensorflow import NIGHTLY, RELEASE, build
from bfc_tools.study.logs.log import read_log

pytestmark = pytest.mark.peers

HISTORIES = 200
VERSIONS = [RELEASE, NIGHTLY] if os.environ.get("BFC_TEST_NIGHTLY") == "1" else [RELEASE]


@pytest.fixture(scope="module", params=VERSIONS)
def logged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The logs of random histories, and what ours held."""
    build(version=request.param)
    folder = tmp_path_factory.mktemp("logged")
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests" / "helpers")]),
        "TF_CPP_VMODULE": "bfc_allocator=2",  # so that each refusal is dumped
        "TF_CPP_MIN_LOG_LEVEL": "0",
    }
    command = [sys.executable, logged_history.__file__, str(folder), "0", str(HISTORIES)]
    command.append(request.param)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def test_every_chunk_comes_back(logged: Path) -> None:
    refused = 0
    for seed in range(HISTORIES):
        said = json.loads((logged / f"{seed}.json").read_text())
        log = read_log(logged / f"{seed}.log")
        if not said["refused"]:
            assert not log.refusals
            continue
        refused += 1
        (refusal,) = log.refusals
        if not said["chunks"]:
            assert not refusal.is_whole
            continue
        ((_, snapshot),) = log.snapshots()
        found = [[it.ptr, it.size, it.in_use] for it in snapshot.chunks()]
        assert found == said["chunks"], seed
        assert [[it.ptr, it.size] for it in snapshot.regions] == said["regions"]
        assert refusal.is_whole, (seed, refusal.remarks)
        assert refusal.live == said["bytes_in_use"]
        assert refusal.nbytes == (said["asked"] + 255) // 256 * 256
    assert refused > HISTORIES // 2


def test_the_words_of_the_helper_are_the_originals(
    logged: Path, request: pytest.FixtureRequest
) -> None:
    """Other tests make logs of ours with these words."""
    form = "2.21" if request.node.callspec.params["logged"] == RELEASE else "XLA 2026"
    allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("64 MiB"), memory_limit="64 MiB")
    allocator.allocate_raw(1000)
    words = {line.split()[0] for line in dump_texts.dump(form, allocator.snapshot(), 1 << 30)
             if line and not set(line) <= set("*x_")}  # fmt: skip
    texts = [(logged / f"{seed}.log").read_text() for seed in range(20)]
    original = {
        line.rpartition("] ")[2].split()[0]
        for text in texts
        for line in text.splitlines()
        if line.strip() and "dump for" not in line
    }
    assert words - {"BFCAllocator"} <= original
