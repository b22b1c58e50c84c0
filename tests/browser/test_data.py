"""What a page shows equals a slow, obvious recount of the trace."""

from __future__ import annotations

import base64
import json
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bfc
from bfc.browser.data import LISTED, OTHERS, TEMPORARY, data_of
from bfc.browser.packed import packed
from bfc.browser.runs import COLUMNS, ROWS, SAMPLES

TYPES = {"u8": "u1", "u16": "<u2", "u32": "<u4", "i32": "<i4", "u64": "<u8"}
FILES = [
    *sorted((Path(__file__).parents[2] / "bench/traces").glob("*.npz")),
    *sorted((Path(__file__).parents[1] / "recordings").glob("*.npz")),
]


def unpacked(value: dict[str, Any]) -> list[int]:
    """What a page makes of a packed array, one number after another."""
    raw, count = zlib.decompress(base64.b64decode(value["data"])), value["count"]
    dtype = np.dtype(TYPES[value["type"]])
    numbers = [raw[at::count] if count else b"" for at in range(count)]
    return [int(np.frombuffer(number, dtype)[0]) for number in numbers]


def random_trace(seed: int, events: int = 400) -> bfc.Trace:
    """A history with owners, stacks, times, streams and releases."""
    rng = random.Random(seed)
    rows, live, free = [], [], list(range(60))
    frames = [(f"file{at % 5}.py", at, f"<script>{at}</script>") for at in range(12)]
    stacks = [(0, 0)] + [(rng.randrange(at), rng.randrange(12)) for at in range(1, 30)]
    for _ in range(events):
        kind = rng.random()
        if kind < 0.02:
            rows.append((2, 0, 0, 0))
        elif free and (not live or kind < 0.55):
            live.append(free.pop(rng.randrange(len(free))))
            size = rng.choice([0, 1, 512, 3 << 20, 40 << 20, rng.randrange(1 << 24)])
            rows.append((0, live[-1], size, rng.randrange(3)))
        else:
            free.append(live.pop(rng.randrange(len(live))))
            rows.append((1, free[-1], rng.randrange(9), 0))
    op, ids, size, stream = zip(*rows, strict=True)
    return bfc.Trace(
        op,
        ids,
        size,
        stream,
        time_us=[7 * at for at in range(events)],
        owner=[rng.randrange(4) for _ in rows],
        stack=[rng.randrange(30) for _ in rows],
        owners=["", "weights", "</script>", "kv"],
        frames=frames,
        stacks=stacks,
    )


def recount(trace: bfc.Trace) -> tuple[int, int, dict[int, int], list[tuple[int, int, int]]]:
    """The peak's event and bytes; the allocations that are live then, by their event, with the
    bytes; and all allocations: event, free, how many were made in between."""
    live: dict[int, int] = {}
    at_peak: dict[int, int] = {}
    lives: list[list[int]] = []
    peak, most, made, total = -1, -1, 0, 0
    row_of: dict[int, int] = {}
    for event, (op, number) in enumerate(zip(trace.op.tolist(), trace.id.tolist(), strict=True)):
        if op == 0:
            live[number], row_of[number] = event, len(lives)
            lives.append([event, -1, made])
            made += 1
            total += int(trace.size[event])
        elif op == 1:
            total -= int(trace.size[live.pop(number)])
            row = lives[row_of[number]]
            row[1:] = [event, made - row[2] - 1]
        if total > most:
            peak, most = event, total
            at_peak = {}
            if len(trace) < 2000:
                at_peak = {born: int(trace.size[born]) for born in live.values()}
    for row in lives:
        if row[1] < 0:
            row[2] = made - row[2] - 1
    if not at_peak:
        gone = {row[0]: row[1] for row in lives}
        at_peak = {
            born: int(trace.size[born])
            for born, died in gone.items()
            if born <= peak and (died < 0 or died > peak)
        }
    return peak, max(most, 0), at_peak, [(b, d, n) for b, d, n in lives]


def text_of_stack(found: dict[str, Any], stack: int) -> list[tuple[str, int, str]]:
    """The frames of a stack of the page, innermost first."""
    frames = []
    while stack >= 0:
        stack, frame = found["stacks"]["parent"][stack], found["stacks"]["frame"][stack]
        filename, line, name = (found["frames"][part][frame] for part in ("file", "line", "name"))
        frames.append((found["texts"][filename], line, found["texts"][name]))
    return frames


def opened(found: dict[str, Any]) -> dict[str, Any]:
    """The same with unpacked columns."""
    for table in ("frames", "stacks", "blocks"):
        columns = {k: unpacked(v) if type(v) is dict else v for k, v in found[table].items()}
        found = {**found, table: columns}
    return found


def check_blocks(found: dict[str, Any], trace: bfc.Trace, addresses: list[int]) -> None:
    """The rows of the blocks, one by one."""
    found = opened(found)
    peak, most, at_peak, lives = recount(trace)
    assert (found["events"], found["peak_event"], found["peak_live"]) == (len(trace), peak, most)
    listed = found["live_at_peak"]
    expected = sorted(at_peak.items(), key=lambda block: (-block[1], block[0]))
    assert found["left_out"] == max(0, len(expected) - LISTED)
    assert found["left_out_bytes"] == sum(size for _, size in expected[LISTED:])
    owner = None if trace.owner is None else trace.owner.tolist()
    for (address, size, name, stack), (born, nbytes) in zip(listed, expected[:LISTED], strict=True):
        assert (address, size) == (addresses[born], nbytes)
        assert name == ("" if owner is None or not trace.owners else trace.owners[owner[born]])
        assert text_of_stack(found, stack) == list(trace.frames_of(born))
    blocks = found["blocks"]
    assert blocks["at_peak"] == len(listed)
    assert blocks["total"] == len(lives)
    assert blocks["total_bytes"] == sum(int(trace.size[born]) for born, _, _ in lives)
    others = sorted(
        (life for life in lives if life[0] not in at_peak),
        key=lambda life: (-int(trace.size[life[0]]), life[0]),
    )[:OTHERS]
    known = {born: (died, between) for born, died, between in lives}
    births = [born for born, _ in expected[:LISTED]] + [born for born, _, _ in others]
    others = [born for born, _, _ in others]
    assert blocks["born"] == births
    assert blocks["died"] == [known[born][0] for born in births]
    assert blocks["between"] == [min(known[born][1], 255) for born in births]
    assert blocks["size"] == [int(trace.size[born]) for born in others]
    assert blocks["address"] == [addresses[born] for born in others]
    assert blocks["owner"] == [-1 if owner is None else owner[born] for born in others]
    assert blocks["stream"] == [int(trace.stream[born]) for born in births]
    for stack, born in zip(blocks["stack"], others, strict=True):
        assert text_of_stack(found, stack) == list(trace.frames_of(born))


def addresses_of(trace: bfc.Trace) -> list[int]:
    """Those of PyTorch's policy on a large device."""
    result = trace.replay(bfc.CachingAllocator(bfc.SimulatedSubAllocator("200 GiB")))
    placed: list[int] = result.addresses.tolist()
    return placed


@pytest.mark.parametrize("seed", range(6))
def test_blocks_of_random_traces_equal_a_recount(seed: int) -> None:
    print("seed", seed)
    trace = random_trace(seed)
    check_blocks(data_of([("random", trace)]), trace, addresses_of(trace))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_blocks_of_recorded_traces_equal_a_recount(file: Path) -> None:
    trace = bfc.Trace.load(file)
    found = json.loads(json.dumps(data_of([(file.stem, trace)])))
    recorded = (trace.meta or {}).get("torch", {}).get("addresses")
    check_blocks(found, trace, recorded or addresses_of(trace))


def test_packed_arrays_come_back() -> None:
    for dtype in ("uint8", "uint16", "uint32", "int32", "uint64"):
        info = np.iinfo(dtype)
        numbers = [info.min, 0, 1, 255, info.max]
        assert unpacked(packed(np.array(numbers, dtype))) == numbers
    assert unpacked(packed(np.zeros(0, np.uint8))) == []


def test_limits_hold() -> None:
    trace = random_trace(1, events=30_000)
    (run,) = data_of([("long", trace)])["runs"]
    assert len(run["timeline"]["event"]) <= SAMPLES
    assert (run["map"]["columns"], run["map"]["rows"]) == (COLUMNS, ROWS)
    assert len(unpacked(run["map"]["fill"])) == COLUMNS * ROWS
    assert TEMPORARY == 10
