"""Which slot a request is for: the worked cases P-4 and P-5, and nearly repeated requests."""

from __future__ import annotations

import random

import numpy as np
import pytest

from bfc.plans._planning import match

SLOTS = [10, 20, 30, 20, 40]


def matched(slots: list[int], requests: list[int], *, smaller: bool = False) -> list[int]:
    found = np.empty(len(requests), np.int64)
    match(np.array(slots, np.uint64), np.array(requests, np.uint64), found, smaller)
    return found.tolist()


@pytest.mark.parametrize(
    ("requests", "slots"),
    [
        ([10, 20, 30, 20, 40], [0, 1, 2, 3, 4]),
        ([10, 99, 20, 30, 20, 40], [0, -1, 1, 2, 3, 4]),
        ([10, 30, 20, 40], [0, 2, 3, 4]),
        ([20, 10, 30, 20, 40], [1, 0, 2, 3, 4]),
        ([10, 25, 30, 20, 40], [0, -1, 2, 3, 4]),
        ([10, 20, 30, 20, 40, 40], [0, 1, 2, 3, 4, -1]),
    ],
)
def test_the_worked_cases(requests: list[int], slots: list[int]):
    assert matched(SLOTS, requests, smaller=True) == slots


def test_a_smaller_request_takes_the_place_that_was_expected():
    assert matched(SLOTS, [10, 15, 30, 20, 40], smaller=True) == [0, 1, 2, 3, 4]
    assert matched(SLOTS, [10, 15, 30, 20, 40]) == [0, -1, 2, 3, 4]
    assert matched(SLOTS, [10, 9, 30, 20, 40], smaller=True) == [0, -1, 2, 3, 4]


def test_what_has_no_slots_is_missed():
    assert matched([], [10, 20]) == [-1, -1]
    assert matched(SLOTS, []) == []


@pytest.mark.parametrize("seed", range(20))
def test_no_slot_is_given_twice_and_insertions_cost_little(seed: int):
    """A layer is asked for again and again, so that an inserted size is that of a later layer, too.
    One request of a hundred is put in; of the others nineteen of twenty find their slot."""
    dice = random.Random(seed)
    slots = [dice.randrange(1, 40) for _ in range(30)] * 40
    requests, wanted = [], []
    for number, size in enumerate(slots):
        if dice.random() < 0.01:
            requests.append(dice.choice(slots))
            wanted.append(-1)
        requests.append(size)
        wanted.append(number)
    found = matched(slots, requests)
    served = [slot for slot in found if slot >= 0]
    assert len(set(served)) == len(served)
    assert all(slots[slot] == size for slot, size in zip(found, requests, strict=True) if slot >= 0)
    right = sum(slot == number >= 0 for slot, number in zip(found, wanted, strict=True))
    assert right > 0.9 * len(slots), f"seed {seed}"
