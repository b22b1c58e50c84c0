"""PyTorch's compiled caching allocators with expandable segments, our strict one, and the model:
told the same, they answer the same.

Compared are every address and refusal, all statistics and snapshots on the way, and at the end each
call of the driver, in order, and the trace. The device has no fabric handles: upstream then raises
an error of the driver at once, as the model does. `BFC_SEED=n` repeats the histories of one seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from caching_subject import CommonPeer, Ours
from torch_corners import MIB, POOL, failed
from torch_histories import (
    BROKEN,
    EXPANDABLE,
    NEWER,
    Make,
    assert_they_agree,
    first_difference,
    make_history,
    run_alone,
)

from bench.peers.server import Operation
from bench.peers.torch import Pool
from bfc.pytorch.rules import VERSIONS
from bfc_slow_models.torch_model import TorchModel
from bfc_slow_models.torch_ranges import Ranges
from bfc_slow_models.torch_records import Chunk, Request

profiles = pytest.mark.parametrize("profile", EXPANDABLE)
versions = pytest.mark.parametrize("torch", VERSIONS)


class RollsBack(TorchModel):
    """The model that undoes what a failed call has done."""

    def __init__(self, **options: Any) -> None:
        super().__init__(rolls_back=True, **options)


@pytest.mark.peers
@pytest.mark.usefixtures("torch_peer")
@pytest.mark.sampled(8)  # all of ours are beside the peer
@versions
@profiles
def test_the_model_is_the_peer(profile: str, torch: str) -> None:
    assert_they_agree(profile, torch, range(20), TorchModel, CommonPeer)


@pytest.mark.peers
@pytest.mark.usefixtures("torch_peer")
@versions
@profiles
def test_ours_is_the_peer(profile: str, torch: str) -> None:
    assert_they_agree(profile, torch, range(20), CommonPeer, Ours)


@pytest.mark.sampled(1)
@versions
@pytest.mark.parametrize("profile", EXPANDABLE | BROKEN)
def test_ours_is_the_model(profile: str, torch: str) -> None:
    assert_they_agree(profile, torch, range(12), RollsBack, Ours)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("profile", NEWER)
def test_ours_has_the_settings_of_2_15(profile: str) -> None:
    assert_they_agree(profile, "2.15", range(8), RollsBack, Ours)


@pytest.mark.peers
@pytest.mark.usefixtures("torch_peer")
@pytest.mark.parametrize("make", [TorchModel, Ours])
@pytest.mark.parametrize("profile", NEWER)
def test_the_settings_of_2_15_do_what_the_peer_does(profile: str, make: Make) -> None:
    assert_they_agree(profile, "2.15", range(20), CommonPeer, make)


# The histories and the model themselves ----------------------------------------------------------


class Best(Ranges):
    """Takes the smallest hole that is large enough."""

    def room(self, chunk: Chunk) -> int:
        return 0


class Tail(Ranges):
    """Grows at the end of a range alone."""

    def place_for(self, request: Request) -> Chunk | None:
        found = super().place_for(request)
        return found if found is None or found.segment[-2:-1] in ([found], []) else None


class Lazy(Ranges):
    """Keeps ranges that hold nothing."""

    def drop_range(self, chunk: Chunk) -> None:
        pass


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrong", [Best, Tail, Lazy])
def test_a_model_that_is_wrong_is_found_out(wrong: Callable[[TorchModel], Ranges]) -> None:
    def make(**options: Any) -> TorchModel:
        model = TorchModel(**options)
        model.ranges = wrong(model)
        return model

    told = (first_difference(make_history("x_plain", seed), TorchModel, make) for seed in range(40))
    difference = next((one for one in told if one is not None), None)
    assert difference is not None
    assert "tests/policies/test_expandable_beside_pytorch.py" in difference


def what_happened(profile: str, seeds: Iterable[int]) -> Counter[str]:
    """How often each of a history's notable things happened. A refused call has a "-"."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        history = make_history(profile, seed)
        answers = run_alone(RollsBack, history, history.operations)
        seen.update(str(answer) for answer in answers if isinstance(answer, str))
        log = [call for call in answers[-2] if not call[0].startswith("event_")]
        seen.update(name if third is not None else f"{name}-" for name, _, third in log)
        seen.update(entry["action"] for entry in answers[-1])
        references: Counter[Pool] = Counter()
        for answer, operation in zip(answers, history.operations, strict=True):
            if operation[0] in ("create_pool", "begin_pool", "release_pool"):
                references[operation[1]] += -1 if operation[0] == "release_pool" else 1
            elif operation == ("snapshot",):
                kinds = [segment["is_expandable"] for segment in answer]
                seen["both kinds at once"] += any(kinds) and not all(kinds)
                seen["several runs"] += sum(kinds) > 2
                used = {segment["segment_pool_id"] for segment in answer if segment["active_size"]}
                seen["live in a released pool"] += any(
                    pool in references and not references[pool] for pool in used
                )
            elif operation == ("stats",):
                seen["oversize"] += answer["oversize_allocations.current"] > 0
                seen["rejected"] += answer["num_oom_rejections"] > 0
    return seen


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("profile", "things"),
    [
        ("x_plain", ["unmap", "unreserve", "several runs", "segment_map", "segment_unmap"]),
        ("x_limits", ["a failure: oom", "create-"]),
        ("x_max_split", ["oversize", "a failure: oom"]),
        ("x_toggled", ["both kinds at once", "malloc", "free", "unmap"]),
        ("x_pools", ["unmap", "a failure: oom"]),
        ("x_failures", ["create-", "reserve-", "a failure: driver", "a failure: oom"]),
        ("x_resized", ["a failure: oom", "unmap"]),
        ("x_too_large", ["unreserve", "a failure: oom"]),
        ("throws", ["rejected", "a failure: oom", "free"]),
        ("x_throws", ["rejected", "unmap"]),
        ("x_reserve", ["unreserve", "a failure: oom", "unmap"]),
        ("x_broken", ["map-", "access-", "a failure: driver"]),
        ("x_released", ["unmap", "live in a released pool"]),
    ],
)
def test_the_histories_get_to_the_corners(profile: str, things: list[str]) -> None:
    seen = what_happened(profile, range(10))
    assert all(seen[thing] >= 5 for thing in things), seen


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("profile", "make"), [("x_plain", TorchModel), ("x_broken", RollsBack)])
def test_nothing_is_left_behind(profile: str, make: Make) -> None:
    for seed in range(20):
        history = make_history(profile, seed)
        subject = make(**history.options)
        subject.run(history.operations)
        (stats,) = subject.run([("stats",)])
        assert stats["reserved_bytes.all.current"] == 0
        assert (subject.live_bytes, subject.device.mapped, subject.device.pages) == (0, {}, {})


def test_upstream_leaves_pages_behind() -> None:
    for make, left in ((TorchModel, 60), (RollsBack, 0)):
        subject = make(settings="expandable_segments:True")
        subject.fail_at(2, 999, "map")
        answers = subject.run([("malloc", 60 << 20, 0, 1), ("empty_cache",)])
        assert (answers[0].kind, answers[1]) == ("driver", None)
        assert subject.live_bytes == left << 20


def test_upstream_forgets_a_released_pool_while_a_block_lives() -> None:
    """One mapping, one unmapping, and 4 MiB in use (PyTorch's behaviour, case 66g)."""
    operations: list[Operation] = [
        ("create_pool", POOL),
        ("begin_pool", POOL),
        ("malloc", 60 * MIB, 0, 1),
        ("free_slot", 1),
        ("malloc", 4 * MIB, 0, 2),
        ("end_pool", POOL),
        ("release_pool", POOL),
        ("release_pool", POOL),
        ("empty_cache",),
    ]
    for make, known in ((TorchModel, False), (RollsBack, True)):
        subject = make(settings="expandable_segments:True")
        subject.run(operations)
        assert (subject.pool_use_count(POOL) == 0) == known
        subject.run([("free_slot", 2), ("empty_cache",)])
        assert failed(subject.pool_use_count(POOL), "internal")


@pytest.mark.parametrize(
    ("make", "waits"),
    [
        pytest.param(CommonPeer, 1, marks=pytest.mark.peers, id="original"),
        pytest.param(TorchModel, 1, id="model"),
        pytest.param(RollsBack, 0, id="model that rolls back"),
        pytest.param(Ours, 0, id="ours"),
    ],
)
def test_upstream_remembers_a_released_pool_that_holds_nothing(make: Make, waits: int) -> None:
    """Two mappings, one unmapping, and nothing in use: each emptying of this pool counts a wait."""
    subject = make(settings="expandable_segments:True")
    operations: list[Operation] = [
        ("create_pool", POOL),
        ("begin_pool", POOL),
        ("malloc", 20 * MIB, 0, 1),
        ("malloc", 20 * MIB, 0, 2),
        ("free_slot", 1),
        ("free_slot", 2),
        ("end_pool", POOL),
        ("release_pool", POOL),
        ("release_pool", POOL),
        ("empty_cache",),
        ("stats",),
        ("empty_cache", POOL),
        ("stats",),
    ]
    before, _, after = subject.run(operations)[-3:]
    assert before["reserved_bytes.all.current"] == 0
    assert after["num_sync_all_streams"] - before["num_sync_all_streams"] == waits
    subject.close()


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        pytest.param(CommonPeer, [], marks=pytest.mark.peers, id="original"),
        pytest.param(TorchModel, [], id="model"),
        pytest.param(RollsBack, [20 * MIB, 60 * MIB], id="model that rolls back"),
    ],
)
def test_upstream_shows_of_one_pool_only_what_a_range_begins_with(
    make: Make, shown: list[int]
) -> None:
    subject = make(settings="expandable_segments:True")
    operations: list[Operation] = [
        ("create_pool", POOL),
        ("begin_pool", POOL),
        *(("malloc", 20 * MIB, 0, slot) for slot in range(4)),
        ("free_slot", 0),
        ("free_slot", 2),
        ("end_pool", POOL),
        ("release_pool", POOL),
        ("release_pool", POOL),
        ("empty_cache",),
        ("snapshot",),
        ("snapshot", POOL),
    ]
    answers = subject.run(operations)[-2:]
    places = [[segment["address"] - (1 << 44) for segment in answer] for answer in answers]
    assert places == [[20 * MIB, 60 * MIB], shown]
    subject.close()
