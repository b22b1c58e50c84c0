"""What the compiled PyTorch records of programs with private pools, read and replayed: each block
lies where PyTorch put it, in its pool."""

from __future__ import annotations

import io
import os
import pickle
import random
from typing import Any

import numpy as np
import pytest

import bfc
from bench.peers.torch import TorchPeer
from bfc.pytorch.rules import VERSIONS

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("torch_peer")]

MIB = 1 << 20
STREAMS = (0, 2)
SETTINGS = ("", "expandable_segments:True", "max_split_size_mb:21")
SEEDS = [int(os.environ["BFC_SEED"])] if "BFC_SEED" in os.environ else range(4)
#: What PyTorch writes where it was told to empty the cache, or a MemPool dies; the innermost first.
EMPTIES = ["c10::cuda::CUDACachingAllocator::emptyCache"]
POOL_DIES = [*EMPTIES, "c10::cuda::MemPool::~MemPool()"]


class Program:
    """Random calls, with scopes of pools, captures, and pools that are let go."""

    def __init__(self, seed: int, peer: TorchPeer) -> None:
        self.rng, self.peer = random.Random(seed), peer
        self.live: list[int] = []
        self.held: list[tuple[int, int]] = []
        self.made = 0
        #: The entries that were written while the cache was emptied, and the frames of these.
        self.emptied: list[tuple[int, int, list[str]]] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            chance = self.rng.random()
            if chance < 0.15:
                self.in_a_pool()
            elif chance < 0.21 and self.held:
                self.let_go()
            elif chance < 0.27:
                self.empty((0, 0), EMPTIES)
            else:
                self.work(self.rng.choice(STREAMS), 4)

    def in_a_pool(self) -> None:
        """A capture, or a scope of a MemPool, of a new pool or one that is held."""
        pool = self.rng.choice([None, *self.held])
        is_new = pool is None
        if pool is None:
            self.made += 1
            pool = self.rng.choice([(self.made, 0), (0, self.made)])
            self.held.append(pool)
        stream = self.rng.choice(STREAMS)
        assert self.peer.begin_pool(pool, stream) is None
        if is_capture := pool[1] == 0:
            self.peer.mark_capture(True)
            self.peer.capture(stream)
        self.work(stream, 6)
        if is_capture:
            self.peer.capture(stream, False)
            self.peer.mark_capture(False)
        assert self.peer.end_pool(pool) is None
        if not is_new:  # each scope has taken a reference, and one is enough
            assert self.peer.release_pool(pool) is None

    def let_go(self) -> None:
        pool = self.held.pop(self.rng.randrange(len(self.held)))
        assert self.peer.release_pool(pool) is None
        if pool[0] == 0:
            self.empty(pool, POOL_DIES)

    def empty(self, pool: tuple[int, int], names: list[str]) -> None:
        before = len(self.peer.trace())
        assert self.peer.empty_cache(pool) is None
        self.emptied.append((before, len(self.peer.trace()), names))

    def work(self, stream: int, steps: int) -> None:
        for _ in range(steps):
            if self.live and self.rng.random() < 0.5:
                self.peer.free(self.live.pop(self.rng.randrange(len(self.live))))
            else:
                most = self.rng.choice((4096, MIB, 12 * MIB, 40 * MIB))
                made = self.peer.malloc(self.rng.randrange(1, most), stream)
                assert isinstance(made, int)
                self.live.append(made)


def recorded(seed: int, version: str, settings: str) -> dict[str, Any]:
    """What `torch.cuda.memory._dump_snapshot` would pickle."""
    with TorchPeer(torch=version, settings=settings) as peer:
        peer.record_history(True)
        program = Program(seed, peer)
        program.run(60)
        entries: list[dict[str, Any]] = [
            {**entry, "time_us": 0, "frames": []} for entry in peer.trace()
        ]
        for before, after, names in program.emptied:
            for entry in entries[before:after]:
                entry["frames"] = [{"filename": "", "line": 0, "name": name} for name in names]
        segments = [{**it, "device": 0} for it in peer.snapshot()]
    said = {"PYTORCH_CUDA_ALLOC_CONF": settings}
    return {"segments": segments, "device_traces": [entries], "allocator_settings": said}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_recording_replays_with_its_pools(seed: int, version: str, settings: str) -> None:
    """BFC_SEED=n repeats the programs of this seed alone."""
    content = recorded(seed, version, settings)
    trace = bfc.Trace.from_torch(io.BytesIO(pickle.dumps(content, protocol=4)))
    assert trace.pool is not None
    assert trace.meta["torch"]["repairs"] == {}
    device = bfc.SimulatedSubAllocator(1 << 40)
    with bfc.CachingAllocator(device, settings=settings, strict=True, torch=version) as allocator:
        found = trace.replay(allocator)
        regions = [(it.size, it.pool_id) for it in allocator.snapshot().regions]
    if "expandable" not in settings:  # ranges are reserved at other addresses
        placed = np.array(trace.meta["torch"]["addresses"], np.uint64)
        assert np.flatnonzero(found.addresses != placed).tolist() == [], f"BFC_SEED={seed}"
    there = [(it["total_size"], it["segment_pool_id"]) for it in content["segments"]]
    assert sorted(regions) == sorted(there), f"BFC_SEED={seed}"
