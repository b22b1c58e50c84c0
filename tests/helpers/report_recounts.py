"""Traces for reports, and slow, obvious recounts of what a page shows of them."""

from __future__ import annotations

import base64
import random
import zlib
from typing import Any, NamedTuple

import numpy as np

import bfc

TYPES = {"u8": "u1", "u16": "<u2", "u32": "<u4", "i32": "<i4", "u64": "<u8"}


def unpacked(value: dict[str, Any]) -> list[int]:
    """What a page makes of a packed array, one number after another."""
    raw, count = zlib.decompress(base64.b64decode(value["data"])), value["count"]
    dtype = np.dtype(TYPES[value["type"]])
    assert len(raw) == count * dtype.itemsize
    numbers = [raw[at::count] for at in range(count)]
    return [int(np.frombuffer(number, dtype)[0]) for number in numbers]


def opened(found: dict[str, Any]) -> dict[str, Any]:
    """What a page shows, with unpacked columns."""
    for table in ("frames", "stacks", "blocks"):
        columns = {k: unpacked(v) if type(v) is dict else v for k, v in found[table].items()}
        found = {**found, table: columns}
    return found


def random_trace(seed: int, events: int = 400) -> bfc.Trace:
    """A history with owners, stacks, times, streams and releases."""
    rng = random.Random(seed)
    rows: list[tuple[int, int, int, int]] = []
    live: list[int] = []
    free = list(range(60))
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


class Life(NamedTuple):
    """An allocation: the event that makes it, the one that frees it or -1, its bytes, and how many
    allocations were made in between."""

    born: int
    died: int
    size: int
    between: int

    def is_live_after(self, event: int) -> bool:
        return self.born <= event and (self.died < 0 or self.died > event)


class Recount(NamedTuple):
    """A trace, counted event by event."""

    live: list[int]
    peak: int
    lives: list[Life]

    @property
    def at_peak(self) -> list[Life]:
        return [life for life in self.lives if life.is_live_after(self.peak)]


def rebuilt_by(trace: bfc.Trace) -> int:
    """How many events rebuild what was live when a recording began."""
    torch = (trace.meta or {}).get("torch", {})
    first: int = torch.get("first_recorded_event", 0)
    return first


def gaps_of(trace: bfc.Trace) -> set[int]:
    """The events that allocate or free what comes and goes before the recorded history."""
    begun: dict[int, int] = {}
    gaps: set[int] = set()
    for event, (op, number) in enumerate(zip(trace.op.tolist(), trace.id.tolist(), strict=True)):
        if event == rebuilt_by(trace):
            break
        if op == 0:
            begun[number] = event
        else:
            gaps |= {event, begun.pop(number)}
    return gaps


def recount(trace: bfc.Trace) -> Recount:
    """Counts a trace. Gaps that a recording's rebuilt beginning fills for a moment do not count."""
    open_at: dict[int, tuple[int, int]] = {}
    lives: list[Life] = []
    sizes, live, gaps = trace.size.tolist(), [], gaps_of(trace)
    made = total = 0
    for event, (op, number) in enumerate(zip(trace.op.tolist(), trace.id.tolist(), strict=True)):
        if event in gaps:
            pass
        elif op == 0:
            made += 1
            open_at[number] = event, made
            total += sizes[event]
        elif op == 1:
            born, earlier = open_at.pop(number)
            lives.append(Life(born, event, sizes[born], made - earlier))
            total -= sizes[born]
        live.append(total)
    lives += [Life(born, -1, sizes[born], made - earlier) for born, earlier in open_at.values()]
    first = max(0, rebuilt_by(trace) - 1)
    peak = first + live[first:].index(max(live[first:])) if live else -1
    return Recount(live, peak, sorted(lives))


def addresses_of(trace: bfc.Trace) -> list[int]:
    """Those of PyTorch's policy on a large device."""
    result = trace.replay(bfc.CachingAllocator(bfc.SimulatedSubAllocator("200 GiB")))
    placed: list[int] = result.addresses.tolist()
    return placed


def frames_of(found: dict[str, Any], stack: int) -> list[tuple[str, int, str]]:
    """The frames of a stack of the page, innermost first."""
    frames = []
    while stack >= 0:
        stack, frame = found["stacks"]["parent"][stack], found["stacks"]["frame"][stack]
        frames.append(frame_of(found, frame))
    return frames


def frame_of(found: dict[str, Any], frame: int) -> tuple[str, int, str]:
    """A frame of the page."""
    filename, line, name = (found["frames"][part][frame] for part in ("file", "line", "name"))
    return found["texts"][filename], line, found["texts"][name]
