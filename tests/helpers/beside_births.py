"""Holds what a prediction makes and frees to what `births.py` saw a real program make and free."""

from __future__ import annotations

from typing import Any

from births import SMALL

from bfc.trace.trace import ALLOCATE, FREE
from bfc_tools.predicting.kinds import WORKSPACES


def births_of(memory: Any) -> dict[str, list[int]]:
    """The events and sizes of a prediction, as `births.py` writes them: without what kernels work
    in, and small numbers."""
    numbers: dict[int, int] = {}
    events, sizes = [], []
    history = memory.history
    for op, block, size in zip(history.op, history.id, history.size, strict=True):
        if history.kinds[block] == WORKSPACES or size <= SMALL:
            continue
        if op == ALLOCATE:
            numbers[block] = len(sizes)
            sizes.append(size)
            events.append(numbers[block])
        elif op == FREE and block in numbers:
            events.append(~numbers.pop(block))
    return {"events": events, "sizes": sizes}


def numbered(found: dict[str, Any]) -> dict[str, Any]:
    """The same, its storages numbered in the order in which they were made, without gaps."""
    made = [it for it in found["events"] if it >= 0]
    new = {number: at for at, number in enumerate(made)}
    return {
        "events": [new[it] if it >= 0 else ~new[~it] for it in found["events"]],
        "sizes": [found["sizes"][it] for it in made],
        "names": [found["names"][it] for it in made],
        "sent": {new[it] for it in found["sent"] if it in new},
    }


def until_the_last_is_made(events: list[int]) -> list[int]:
    """What is freed when the program ends is freed in another order."""
    return events[: max(at for at, it in enumerate(events) if it >= 0) + 1]


def compare(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Fails unless both make the same storages in the same order, and free them at the same places,
    but for what is sent: gloo's threads hold that for a while."""
    real_one = numbered(theirs)
    assert mine["sizes"] == real_one["sizes"]
    ours, others = (until_the_last_is_made(it["events"]) for it in (mine, real_one))
    sent = {~it for it in real_one["sent"]}
    assert [it for it in ours if it not in sent] == [it for it in others if it not in sent]
