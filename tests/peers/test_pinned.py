"""`PinnedAllocator` beside PyTorch's own policy: every address, every call of the driver in its
order, every figure.

`BFC_SEED=n pytest -m peers tests/peers/test_pinned.py -k random` repeats one random history of
each kind.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pinned_subject import Clock, Ours

import bfc
from bench.peers.server import Failure, Operation
from bench.peers.torch_host import STATS, VERSIONS, TorchHostPeer, build
from bfc.pinned import _blocks

pytestmark = pytest.mark.peers

OLD, NEW = VERSIONS
SEEDS = [int(os.environ["BFC_SEED"])] if "BFC_SEED" in os.environ else range(150)
KIB, MIB = 1 << 10, 1 << 20
STREAMS = (0, 5, 9)
#: The original adds up the peaks of its buckets; ours are true ones.
ACTIVE_PEAKS = ("active_requests.peak", "active_bytes.peak")
#: Wrong in 2.11; see `test_the_active_figures_of_2_11_are_wrong`.
WRONG_IN_OLD = tuple(
    name for name in STATS if name.startswith("active_") and not name.endswith(".allocated")
)


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    for version in VERSIONS:
        build(version)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(_blocks, "time", made)
    return made


class Pair:
    """The original and ours, told the same. Each answer is compared."""

    def __init__(self, version: str, clock: Clock) -> None:
        self.version, self.theirs, self.ours = version, TorchHostPeer(version), Ours(clock)

    def do(self, name: str, *arguments: object) -> Any:
        [theirs], [ours] = (it.run([(name, *arguments)]) for it in (self.theirs, self.ours))
        assert theirs == ours
        self.compare_figures(self.theirs.stats(), self.ours.stats())
        return ours

    def compare_figures(
        self, theirs: dict[str, int], ours: dict[str, int], one_bucket: bool = False
    ) -> None:
        wrong = WRONG_IN_OLD if self.version == OLD else ()
        loose = () if one_bucket else ACTIVE_PEAKS
        for name in STATS:
            if name not in wrong and name not in loose:
                assert theirs[name] == ours[name], name
            elif name not in wrong:
                assert theirs[name] >= ours[name], name

    def close(self) -> None:
        assert self.theirs.calls == self.ours.calls()
        self.theirs.close()
        self.ours.allocator.close()


@pytest.fixture(params=VERSIONS)
def pair(request: pytest.FixtureRequest, clock: Clock) -> Iterator[Pair]:
    made = Pair(request.param, clock)
    yield made
    made.close()


@pytest.fixture
def new_pair(clock: Clock) -> Iterator[Pair]:
    made = Pair(NEW, clock)
    yield made
    made.close()


# The corner cases, by their numbers ----------------------------------------------------------


def host_mallocs(pair: Pair) -> list[int]:
    """The sizes that the driver was asked for so far."""
    calls = pair.theirs.calls
    assert calls == pair.ours.calls()
    return [nbytes for name, nbytes, _ in calls if name == "host_malloc"]


def test_a_request_becomes_a_power_of_two(pair: Pair) -> None:  # (row 85)
    for slot, nbytes in enumerate((40_960, 81_920, 1, 65_536, 65_537, 3)):
        assert pair.do("allocate", nbytes, slot) > 0
    assert host_mallocs(pair) == [65_536, 131_072, 1, 65_536, 131_072, 4]
    assert pair.do("allocate", 0, 9) == 0
    pair.do("free", 9)
    assert not pair.do("record_event", 9, 5)
    assert len(host_mallocs(pair)) == 6


def test_the_block_that_was_freed_last_is_used_first(pair: Pair) -> None:  # (row 86)
    first, second = pair.do("allocate", 5000, 1), pair.do("allocate", 8192, 2)
    pair.do("free", 1)
    pair.do("free", 2)
    assert pair.do("allocate", 6000, 3) == second
    assert pair.do("allocate", 4097, 4) == first
    assert pair.do("allocate", 4096, 5) not in (first, second)


def test_a_block_comes_back_when_its_stream_has_finished(pair: Pair) -> None:  # (row 87)
    ptr = pair.do("allocate", 64 * KIB, 1)
    pair.do("hold", 5)
    assert pair.do("record_event", 1, 5)
    pair.do("free", 1)
    assert pair.do("allocate", 64 * KIB, 2) != ptr
    pair.do("finish", 5)
    assert pair.do("allocate", 64 * KIB, 3) == ptr
    pair.do("free", 3)
    assert pair.do("allocate", 64 * KIB, 4) == ptr, "nothing is left of the stream"


def test_the_oldest_event_holds_back_all_others(pair: Pair) -> None:  # (row 88)
    x, y = pair.do("allocate", 64 * KIB, 1), pair.do("allocate", 4 * KIB, 2)
    pair.do("hold", 5)
    assert pair.do("record_event", 1, 5)
    assert pair.do("record_event", 2, 9)
    pair.do("free", 1)
    pair.do("free", 2)
    assert pair.do("allocate", 4 * KIB, 3) != y
    pair.do("finish", 5)
    assert pair.do("allocate", 4 * KIB, 4) == y
    assert pair.do("allocate", 64 * KIB, 5) == x


def test_a_block_of_several_streams_waits_for_each(pair: Pair) -> None:
    ptr = pair.do("allocate", 4 * KIB, 1)
    for stream in (9, 5, 0, 9):
        pair.do("hold", stream)
        assert pair.do("record_event", 1, stream)
    pair.do("free", 1)
    for slot, stream in enumerate((0, 9, 5), 2):
        assert pair.do("allocate", 4 * KIB, slot) != ptr
        pair.do("finish", stream)
    assert pair.do("allocate", 4 * KIB, 9) == ptr
    recorded = [stream for name, _, stream in pair.theirs.calls if name == "event_record"]
    assert recorded == [9, 5, 0], "once a stream, in the order in which they were first named"


def test_an_address_inside_needs_the_context_of_the_block(pair: Pair) -> None:  # (row 89)
    ptr = pair.do("allocate", 64 * KIB, 1)
    pair.do("allocate", 64 * KIB, 2)
    pair.do("hold", 5)
    assert not pair.do("record_event", 1, 5, 100)
    pair.do("free", 1)
    assert pair.do("allocate", 64 * KIB, 1) == ptr, "nothing was tracked"
    assert pair.do("record_event", 1, 5, 100, 1)
    assert pair.do("record_event", 1, 5, 100, 2), "the context counts, not the address"
    for slot in (1, 2):
        pair.do("free", slot)
    assert pair.do("allocate", 64 * KIB, 3) not in (0, ptr)
    pair.do("finish", 5)


def test_emptying_the_cache_leaves_what_a_stream_uses(pair: Pair) -> None:  # (row 90)
    for slot in (1, 2, 3):
        pair.do("allocate", 64 * KIB, slot)
    pair.do("hold", 5)
    pair.do("record_event", 1, 5)
    pair.do("free", 1)
    pair.do("free", 2)
    pair.do("empty_cache")
    assert pair.do("live_bytes") == 128 * KIB
    pair.do("finish", 5)
    pair.do("empty_cache")
    assert pair.do("live_bytes") == 64 * KIB


def test_the_cache_is_emptied_by_bucket_and_then_by_age(pair: Pair) -> None:
    sizes = (9000, 1, 5000, 9000, 5000, 1 << 33)
    blocks = [pair.do("allocate", nbytes, slot) for slot, nbytes in enumerate(sizes)]
    for slot in (3, 0, 5, 4, 2, 1):
        pair.do("free", slot)
    pair.do("empty_cache")
    freed = [address for name, _, address in pair.ours.calls() if name == "host_free"]
    assert freed == [blocks[slot] for slot in (1, 4, 2, 3, 0, 5)]


def test_a_piece_of_the_reserve_is_lost_with_the_cache(pair: Pair) -> None:  # (row 91)
    pair.do("reserve", 256 * MIB)
    first = pair.do("allocate", 5000, 1)
    assert host_mallocs(pair) == [256 * MIB]
    pair.do("free", 1)
    assert pair.do("allocate", 5000, 2) == first
    pair.do("free", 2)
    pair.do("empty_cache")
    assert pair.do("allocate", 5000, 3) == first + 8 * KIB
    assert pair.do("allocate", 1, 4) == first + 16 * KIB
    assert pair.do("allocate", 1, 5) == first + 20 * KIB
    assert pair.do("allocate", 256 * MIB, 6) >= first + 256 * MIB
    assert pair.do("allocate", 128 * MIB, 7) == first + 24 * KIB
    assert pair.do("allocate", 128 * MIB, 8) > first + 256 * MIB, "24 KiB too few are left"
    for slot in (3, 4, 5, 6, 7, 8):
        pair.do("free", slot)
    pair.do("empty_cache")
    assert pair.do("live_bytes") == 256 * MIB


def test_no_block_serves_what_is_larger(new_pair: Pair) -> None:  # (row 92)
    new_pair.do("limit", 128 * MIB, 1024 * MIB)
    small = new_pair.do("allocate", 150 * MIB, 1)
    new_pair.do("free", 1)
    large = new_pair.do("allocate", 200 * MIB, 2)
    assert large != small
    new_pair.do("free", 2)
    assert new_pair.do("allocate", 140 * MIB, 3) == large, "the last freed that is large enough"
    assert new_pair.do("allocate", 150 * MIB, 4) == small
    assert host_mallocs(new_pair) == [150 * MIB, 200 * MIB]


def test_what_is_above_the_cap_goes_back(new_pair: Pair) -> None:
    new_pair.do("limit", 1024 * MIB, MIB)
    for slot, nbytes in enumerate((MIB, MIB + 512, 3 * MIB), 1):
        new_pair.do("allocate", nbytes, slot)
    new_pair.do("hold", 5)
    new_pair.do("record_event", 3, 5)
    for slot in (1, 2, 3):
        new_pair.do("free", slot)
    assert new_pair.do("live_bytes") == 4 * MIB
    new_pair.do("finish", 5)
    new_pair.do("allocate", MIB, 4)
    assert new_pair.do("live_bytes") == MIB
    assert host_mallocs(new_pair) == [MIB, MIB + 512, 3 * MIB]


# Where ours differs, and why -----------------------------------------------------------------


def test_the_active_figures_of_2_11_are_wrong(clock: Clock) -> None:
    """A free without events leaves them, and each block that waited for events adds a byte."""
    pair = Pair(OLD, clock)
    for slot in (1, 2):
        pair.do("allocate", 4096, slot)
    pair.do("record_event", 2, 5)
    pair.do("free", 1)
    pair.do("free", 2)
    pair.do("allocate", 1, 3)
    theirs, ours = pair.theirs.stats(), pair.ours.stats()
    assert (theirs["active_requests.current"], theirs["active_bytes.current"]) == (2, 2 * 4096 + 2)
    assert (ours["active_requests.current"], ours["active_bytes.current"]) == (1, 1)
    assert (theirs["active_requests.freed"], theirs["active_bytes.freed"]) == (1, -1)
    assert (ours["active_requests.freed"], ours["active_bytes.freed"]) == (2, 2 * 4096)
    pair.close()


def test_the_peaks_of_the_original_are_sums(clock: Clock) -> None:
    pair = Pair(NEW, clock)
    for slot, nbytes in enumerate((4096, 8192)):
        pair.do("allocate", nbytes, slot)
        pair.do("free", slot)
    assert pair.theirs.stats()["active_bytes.peak"] == 4096 + 8192
    assert pair.ours.stats()["active_bytes.peak"] == 8192
    pair.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_use_of_a_freed_block_is_an_error_of_the_original(version: str, clock: Clock) -> None:
    theirs, ours = TorchHostPeer(version), Ours(clock)
    for it in (theirs, ours):
        it.allocate(4096, 1)
        it.free(1)
    answer = theirs.record_event(1, 5, 0, 1)
    assert isinstance(answer, Failure)
    assert (answer.kind, "allocated_" in answer.text) == ("internal", True)
    assert ours.record_event(1, 5, 0, 1) is False
    # The next owner of the block has the context of the last one; ours tells them apart.
    for it in (theirs, ours):
        it.allocate(4096, 2)
    assert theirs.record_event(2, 5, 8, 1) is True
    assert ours.record_event(2, 5, 8, 1) is False


@pytest.mark.parametrize("version", VERSIONS)
def test_the_original_gives_up_where_ours_empties_its_cache(version: str, clock: Clock) -> None:
    theirs, ours = TorchHostPeer(version, capacity=MIB), Ours(clock, MIB)
    for it in (theirs, ours):
        it.allocate(512 * KIB, 1)
        it.free(1)
    before = theirs.stats()
    answer = theirs.allocate(MIB, 2)
    assert isinstance(answer, Failure)
    assert answer.kind == "oom"
    assert theirs.stats() == before
    assert ours.allocate(MIB, 2) > 0
    with pytest.raises(bfc.OutOfMemoryError):
        ours.allocate(1, 3)
    ours.allocator.check()


def test_above_the_limits_a_size_stays_as_it_is(clock: Clock) -> None:
    theirs, ours = TorchHostPeer(NEW), Ours(clock)
    for it in (theirs, ours):
        it.limit(MIB, 1 << 40)
        it.allocate(MIB + 1, 1)
        it.free(1)
        it.allocate(MIB + 512, 2)
    for it in (theirs, ours):
        assert it.stats()["allocated_bytes.current"] == MIB + 1 + MIB + 512


# Random histories ----------------------------------------------------------------------------


def any_size(dice: random.Random) -> int:
    power = 1 << dice.randrange(0, 34)
    return max(0, dice.choice([0, 1, power - 1, power, power + 1, dice.randint(1, 1 << 22)]))


def small_size(dice: random.Random) -> int:
    return dice.choice([1, 4095, 4096, 4097, dice.randint(1, 512 * KIB)])


def size_of_one_bucket(dice: random.Random) -> int:
    return dice.randint(4097, 8192)


def size_near_a_limit(dice: random.Random) -> int:
    """On both sides of 1 MiB, above which sizes stay as they are."""
    above = dice.randint(MIB + 1, 3 * MIB)
    return dice.choice([dice.randint(1, MIB), MIB, above, above, 4 * MIB, 4 * MIB - 1])


class History:
    """Random operations. `size` draws one; `more` are other operations, each with its weight."""

    def __init__(
        self,
        dice: random.Random,
        size: Callable[[random.Random], int],
        first: list[Operation],
        more: list[Callable[[random.Random], Operation]],
    ) -> None:
        self.dice, self.size, self.operations, self.more = dice, size, [*first], more
        self.live: list[int] = []
        self.slots = 0

    def draw(self, length: int) -> list[Operation]:
        while len(self.operations) < length:
            self.operations.append(self.one())
        return self.operations

    def one(self) -> Operation:
        dice = self.dice
        chance = dice.random()
        if chance < 0.35 or not self.live:
            self.slots += 1
            self.live.append(self.slots)
            return ("allocate", self.size(dice), self.slots)
        if chance < 0.62:
            return ("free", self.live.pop(dice.randrange(len(self.live))))
        if chance < 0.77:
            return self.record()
        if chance < 0.95:
            name = dice.choice(["hold", "finish", "finish_events", "finish_events"])
            count = [dice.randint(1, 3)] if name == "finish_events" else []
            return (name, dice.choice(STREAMS), *count)
        if chance < 0.97:
            return ("empty_cache",)
        if chance < 0.98 or not self.more:
            return (dice.choice(["reset_peak_stats", "reset_accumulated_stats"]),)
        return dice.choice(self.more)(dice)

    def record(self) -> Operation:
        """With the block's own context, with none, or another's; at its start, or inside."""
        slot, other = self.dice.choice(self.live), self.dice.choice(self.live)
        owner = self.dice.choice([slot, None, other])
        return ("record_event", slot, self.dice.choice(STREAMS), self.dice.choice([0, 0, 8]), owner)


def any_limits(dice: random.Random) -> Operation:
    return ("limit", dice.choice([1, 2]) * MIB, dice.choice([1, 2, 4]) * MIB)


KINDS: dict[str, tuple[str, Callable[[random.Random], int], list[Operation], list[Any]]] = {
    "any-2.11": (OLD, any_size, [], []),
    "reserve-2.11": (OLD, small_size, [("reserve", 4 * MIB)], []),
    "any-2.15": (NEW, any_size, [], []),
    "one-bucket-2.15": (NEW, size_of_one_bucket, [], []),
    "threshold-2.15": (NEW, size_near_a_limit, [("limit", MIB, 1 << 40)], []),
    "cap-2.15": (NEW, size_near_a_limit, [("limit", 1 << 40, MIB)], []),
    "limits-2.15": (NEW, size_near_a_limit, [("limit", MIB, 2 * MIB)], [any_limits]),
    "reserve-and-cap-2.15": (
        NEW,
        size_near_a_limit,
        [("reserve", 8 * MIB), ("limit", MIB, 2 * MIB)],
        [],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_random_histories_are_equal(kind: str, clock: Clock) -> None:
    version, size, first, more = KINDS[kind]
    for seed in SEEDS:
        operations = History(random.Random(f"{kind}{seed}"), size, first, more).draw(200)
        pair = Pair(version, clock)
        asked = [each for one in operations for each in (one, ("stats",))]
        theirs = pair.theirs.run(asked)
        again = f"BFC_SEED={seed} pytest -m peers tests/peers/test_pinned.py -k '{kind} and random'"
        for number, operation in enumerate(operations):
            [answer, figures] = pair.ours.run([operation, ("stats",)])
            try:
                assert theirs[2 * number] == answer
                pair.compare_figures(theirs[2 * number + 1], figures, kind.startswith("one"))
            except AssertionError as error:
                raise AssertionError(f"{again}\noperation {number}, {operation}: {error}") from None
        assert pair.theirs.calls == pair.ours.calls(), again
        pair.close()
