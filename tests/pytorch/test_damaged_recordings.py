"""Recordings whose parts contradict each other: sizes, addresses, order and missing entries are
changed at random. What is read is a trace in which no two blocks lie over each other and whose end
is the file's, or the file is refused."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from typing import Any

import pytest
from torch_dumps import MIB, event, facts, free, read, recorded, recording, segment

import bfc

SIZES = (0, 1, 511, 512, MIB, 2 * MIB, 30 * MIB, 1 << 40)
MOVES = (0, 1, 512, -512, MIB, -MIB, 30 * MIB)
ACTIONS = (
    *("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free"),
    *("segment_map", "segment_unmap", "oom", "unheard_of"),
)


def damaged(seed: int) -> dict[str, Any]:
    dice = random.Random(seed)
    content = recorded(seed, dice.choice([6, 20, 60])).snapshot(dice.choice([None, 10, 30]))
    for _ in range(dice.choice([1, 1, 2, 3, 10])):
        if dice.random() < 0.8:
            damage_history(dice, content["device_traces"][0])
        elif content["segments"]:
            damage_segment(dice, dice.choice(content["segments"]))
    return content


def damage_history(dice: random.Random, events: list[dict[str, Any]]) -> None:
    if not events:
        return
    at, other = dice.randrange(len(events)), dice.randrange(len(events))
    what = dice.randrange(7)
    if what == 0:
        events[at]["size"] = dice.choice(SIZES)
    elif what == 1:
        events[at]["addr"] = events[other]["addr"] + dice.choice(MOVES)
    elif what == 2:
        events[at]["action"] = dice.choice(ACTIONS)
    elif what == 3:
        events.insert(at, dict(events[other]))
    elif what == 4:
        events[at], events[other] = events[other], events[at]
    elif what == 5:
        gone = dice.choice(ACTIONS)
        events[:] = [one for one in events if one["action"] != gone]
    else:
        del events[at : at + dice.choice([1, 1, 15])]


def damage_segment(dice: random.Random, content: dict[str, Any]) -> None:
    block, move = content["blocks"][-1], dice.choice([512, MIB, 30 * MIB])
    what = dice.randrange(4)
    if what == 0:
        for one in [content, *content["blocks"]]:
            one["address"] += move
    elif what == 1:
        block["size"] += move
        content["total_size"] += move
    elif what == 2:
        block["state"] = dice.choice(["inactive", "active_allocated", "active_pending_free"])
    else:
        content["is_expandable"] = True


def live_at_the_end(trace: bfc.Trace) -> dict[int, int]:
    """The address and the size of what is live at the end. No block may ever lie over another, and
    each is freed at most once."""
    live: dict[int, int] = {}
    order: list[int] = []
    held: dict[int, int] = {}
    columns = (trace.op, trace.id, trace.size)
    rows = zip(*(column.tolist() for column in columns), facts(trace)["addresses"], strict=True)
    for op, number, size, address in rows:
        if op == 0:
            at = bisect_left(order, address)
            assert order[at : at + 1] == [] or address + max(size, 1) <= order[at]
            assert at == 0 or order[at - 1] + max(live[order[at - 1]], 1) <= address
            assert number not in held
            insort(order, address)
            live[address], held[number] = size, address
        elif op == 1:
            order.remove(held[number])
            del live[held.pop(number)]
    return live


def test_a_damaged_recording_is_refused_or_ends_as_the_file_says():
    refused = repaired = 0
    for seed in range(150):
        content = damaged(seed)
        try:
            trace = read(content)
        except bfc.TraceError:
            refused += 1
            continue
        live, segments = live_at_the_end(trace), content["segments"]
        inside = {
            address: size
            for address, size in live.items()
            for one in segments
            if address < one["address"] + one["total_size"]
            and one["address"] < address + max(size, 1)
        }
        assert inside == {
            block["address"]: block["requested_size"]
            for one in segments
            for block in one["blocks"]
            if block["state"] != "inactive"
        }, seed
        repairs = facts(trace)["repairs"]
        assert len(live) - len(inside) == repairs.get("live_outside_segments", 0), seed
        with bfc.CachingAllocator(bfc.SimulatedSubAllocator(1 << 50)) as allocator:
            trace.replay(allocator)
        repaired += bool(repairs)
    assert refused > 0
    assert repaired > 50


OVER_A_HOLE = segment((20 * MIB, -1))
OVER_A_BLOCK = segment((10 * MIB, 10 * MIB), (10 * MIB, -1))


@pytest.mark.parametrize(
    ("content", "events", "left_out"),
    [
        (OVER_A_HOLE, free(0, 30 * MIB), 0),
        (OVER_A_HOLE, [*free(0, 30 * MIB), event("alloc", 0, 2 * MIB), *free(0, 2 * MIB)], 0),
        (OVER_A_BLOCK, free(5 * MIB, 30 * MIB), 1),
    ],
)
def test_a_freed_block_that_is_larger_than_its_segment_is_repaired(content, events, left_out):
    """It was live before the history where nothing else was, and is left out over a block."""
    trace = read(recording([content], events))
    live = {} if content is OVER_A_HOLE else {content["address"]: 10 * MIB}
    assert live_at_the_end(trace) == live
    repairs = facts(trace)["repairs"]
    assert repairs.get("allocations_before_left_out", 0) == left_out
    assert repairs.get("allocations_before_outside_segments", 0) == 1 - left_out
