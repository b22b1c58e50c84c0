"""Plays random histories on ours and on the compiled original until both refuse a request, and
keeps what the original has logged. Its logger writes to descriptor 2 of a whole process, so it runs
in one of its own: `python logged_history.py FOLDER FIRST LAST VERSION` leaves a .log and a .json
for each seed. Of the nightly, every other history has two ends."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from tensorflow_pairs import RULES, arguments_of

import bfc
from bench.peers.tensorflow import RELEASE, TensorFlowBFC

MIB = 1 << 20


def options_of(rng: random.Random) -> dict[str, Any]:
    limit = rng.randrange(8 * MIB, 512 * MIB)
    return {
        "memory_limit": limit,
        "allow_growth": rng.random() < 0.7,
        "garbage_collection": rng.random() < 0.5,
        "capacity": rng.choice([1 << 50, limit // 2 + (4 << 20)]),
        "gap": rng.choice([0, 4096]),
        "timing_counter": False,
    }


def play(seed: int, folder: Path, version: str) -> None:
    rng = random.Random(seed)
    options = options_of(rng)
    if version != RELEASE and seed % 2:
        options |= {"spatial_partitioning": True, "allow_growth": False}
    has_ends = "spatial_partitioning" in options
    device = bfc.SimulatedSubAllocator(
        options["capacity"], gap=options["gap"], supports_coalescing=False
    )
    rules = RULES[version]
    ours = bfc.BFCAllocator(device, strict=True, tensorflow=rules, **arguments_of(options))
    theirs = TensorFlowBFC(version=version, **options)
    live: list[int] = []
    limit = options["memory_limit"]
    for _ in range(rng.choice([3, 40, 400])):
        if live and rng.random() < 0.45:
            address = live.pop(rng.randrange(len(live)))
            ours.deallocate_raw(address)
            theirs.deallocate_raw(address)
            continue
        nbytes = rng.randrange(2400, limit // rng.choice([4, 30, 200]))
        upper = has_ends and rng.random() < 0.5
        address = theirs.allocate_raw(nbytes, upper=upper)
        try:
            end = {"allocation_end": "upper"} if upper else {}
            assert ours.allocate_raw(nbytes, **end) == address
            live.append(address)
        except bfc.OutOfMemoryError:
            assert not address
    snapshot = ours.snapshot()
    asked = rng.choice(
        [limit + 1, snapshot.stats.largest_free_block_bytes + rng.randrange(1, limit)]
    )
    kept = os.dup(2)
    log = os.open(folder / f"{seed}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 2)
    refused = theirs.allocate_raw(asked) == 0
    os.dup2(kept, 2)
    os.close(log)
    try:
        ours.allocate_raw(asked)
        assert not refused
    except bfc.OutOfMemoryError:
        assert refused
    snapshot = ours.snapshot()
    said = {
        "refused": refused,
        "asked": asked,
        "chunks": [(it.ptr, it.size, it.in_use) for it in snapshot.chunks()],
        "regions": [(it.ptr, it.size) for it in snapshot.regions],
        "limit": limit,
        "bytes_in_use": snapshot.stats.bytes_in_use,
    }
    (folder / f"{seed}.json").write_text(json.dumps(said))
    ours.close()
    theirs.close()


if __name__ == "__main__":
    where, first, last, which = sys.argv[1:]
    for number in range(int(first), int(last)):
        play(number, Path(where), which)
