"""`torch.cuda.empty_cache()` in a recording: a release where it is sure, else a count."""

from __future__ import annotations

import io
import pickle
import random
from typing import Any

import pytest
from caching_subject import CommonPeer, Ours
from torch_dumps import MIB, event, facts, free, read, recording, segment
from torch_recorder import Recorder, random_places, random_run, replayed

import bfc
from bench.peers.server import Failure
from bench.peers.torch import build

PYTHON = {"filename": "/usr/lib/python3/site-packages/torch/cuda/memory.py", "line": 224}
EMPTIES: list[dict[str, Any]] = [PYTHON | {"name": "empty_cache"}]
EMPTIES_IN_C = [
    {"filename": "??", "line": 0, "name": "torch::unwind::unwind()"},
    {"filename": "??", "line": 0, "name": "c10::cuda::CUDACachingAllocator::Native::emptyCache()"},
    {"filename": "train.py", "line": 7, "name": "<module>"},
]
RETRIES = [
    {"filename": "??", "line": 0, "name": "c10::cuda::CUDACachingAllocator::Native::malloc()"},
    {"filename": "train.py", "line": 9, "name": "forward"},
]
OF_A_POOL = [
    {"filename": "??", "line": 0, "name": "c10::cuda::CUDACachingAllocator::Native::emptyCache()"},
    {"filename": "??", "line": 0, "name": "c10::cuda::MemPool::~MemPool()"},
]
OF_THE_USER = [{"filename": "train.py", "line": 3, "name": "empty_cache"}]


def went(addr: int, size: int, frames: Any = None) -> dict[str, Any]:
    rest = {} if frames is None else {"frames": frames}
    return event("segment_free", addr, size, **rest)


def two_segments(*run: dict[str, Any], after: list[Any] | None = None, **rest: Any) -> bfc.Trace:
    """Segments of 20 and 30 MiB are taken, all in them is freed, and the run follows."""
    far = 100 * MIB
    events = [
        event("segment_alloc", 0, 20 * MIB),
        event("alloc", 0, 5 * MIB),
        event("segment_alloc", far, 30 * MIB),
        event("alloc", far, 30 * MIB),
        *free(0, 5 * MIB),
        *free(far, 30 * MIB),
        *run,
        *(after or []),
    ]
    left = {0: 20 * MIB, far: 30 * MIB}
    for entry in (*run, *(after or [])):
        at = entry.get("addr", 0) - (1 << 40)
        if entry["action"] == "segment_free":
            del left[at]
        elif entry["action"] == "segment_alloc":
            left[at] = entry["size"]
    return read(
        recording([segment((size, -1), addr=at) for at, size in left.items()], events, **rest)
    )


def all_of_it(frames: Any = None) -> list[dict[str, Any]]:
    return [went(0, 20 * MIB, frames), went(100 * MIB, 30 * MIB, frames)]


TAKES = [event("segment_alloc", 200 * MIB, 40 * MIB)]
FAILS = [{"action": "oom", "device_free": 5, "size": 40 * MIB, "stream": 0}]


def outcome(trace: bfc.Trace) -> tuple[int, int]:
    return int((trace.op == 2).sum()), facts(trace)["releases_unsure"]


@pytest.mark.parametrize(
    "after", [[], TAKES, FAILS], ids=["alone", "before a segment", "before oom"]
)
@pytest.mark.parametrize("frames", [EMPTIES, EMPTIES_IN_C, EMPTIES_IN_C + EMPTIES])
def test_frames_that_name_it_make_a_release(frames, after):
    trace = two_segments(*all_of_it(frames), after=after)
    assert outcome(trace) == (1, 0)
    assert trace.op[-1] == 2
    assert (trace.id[-1], trace.size[-1], facts(trace)["addresses"][-1]) == (0, 0, 0)


def test_it_may_keep_segments_where_frames_name_it():
    assert outcome(two_segments(went(0, 20 * MIB, EMPTIES))) == (1, 0)


@pytest.mark.parametrize("frames", [None, []])
def test_without_frames_all_must_go_and_nothing_be_taken_at_once(frames):
    assert outcome(two_segments(*all_of_it(frames))) == (1, 0)
    assert outcome(two_segments(went(0, 20 * MIB, frames))) == (0, 1)
    assert outcome(two_segments(*all_of_it(frames), after=TAKES)) == (0, 1)
    assert outcome(two_segments(*all_of_it(frames), after=FAILS)) == (0, 1)


def test_an_entry_between_shows_that_no_request_tried_again():
    other = [event("user_defined", 0, 0), *TAKES]
    assert outcome(two_segments(*all_of_it(), after=other)) == (1, 0)


def test_a_lock_that_is_let_go_makes_all_without_frames_unsure():
    settings = {"release_lock_on_cudamalloc": True}
    assert outcome(two_segments(*all_of_it(), allocator_settings=settings)) == (0, 1)
    assert outcome(two_segments(*all_of_it(EMPTIES), allocator_settings=settings)) == (1, 0)


@pytest.mark.parametrize("after", [TAKES, FAILS])
def test_a_request_that_tries_again_is_no_release(after):
    assert outcome(two_segments(*all_of_it(RETRIES), after=after)) == (0, 0)


def test_frames_of_another_call_are_not_guessed_at():
    assert outcome(two_segments(*all_of_it(RETRIES))) == (0, 1)
    assert outcome(two_segments(*all_of_it(OF_A_POOL))) == (0, 1)
    assert outcome(two_segments(*all_of_it(OF_A_POOL), after=TAKES)) == (0, 1)


def test_a_function_of_the_users_with_that_name_may_try_again():
    assert outcome(two_segments(*all_of_it(OF_THE_USER))) == (1, 0)
    assert outcome(two_segments(*all_of_it(OF_THE_USER), after=TAKES)) == (0, 1)


def test_a_request_may_try_again_right_behind_a_release():
    run = [went(0, 20 * MIB, EMPTIES), went(100 * MIB, 30 * MIB, RETRIES)]
    assert outcome(two_segments(*run, after=TAKES)) == (1, 0)


@pytest.mark.parametrize("frames", [7, "emptyCache", [None], [{"name": 3}], [{"line": 1}], {}])
def test_frames_of_an_odd_kind_say_nothing(frames):
    assert outcome(two_segments(*all_of_it(frames))) == (1, 0)


def test_a_private_pool_keeps_what_is_free_in_it():
    content = recording(
        [segment((20 * MIB, -1), addr=500 * MIB, segment_pool_id=(0, 1))],
        [event("segment_alloc", 0, 20 * MIB), event("alloc"), *free(), went(0, 20 * MIB)],
    )
    assert outcome(read(content)) == (1, 0)


def mapped(action: str, addr: int, size: int) -> dict[str, Any]:
    return event(action, addr, size)


@pytest.mark.parametrize(
    ("left", "expected"), [([], (1, 0)), ([(20, 20)], (1, 0)), ([(40, 20)], (0, 1))]
)
def test_pages_of_an_expandable_segment_go(left, expected):
    """60 MiB are mapped, of which 4 MiB at 20 MiB may stay live. Then a whole page may be left."""
    events = [mapped("segment_map", 0, 60 * MIB), event("alloc", 0, 60 * MIB), *free(0, 60 * MIB)]
    gone = {0, 20, 40} - {at for at, _ in left}
    lives = [at for at, _ in left if at == 20]
    events += [event("alloc", at * MIB, 4 * MIB) for at in lives]
    events += [mapped("segment_unmap", at * MIB, 20 * MIB) for at in sorted(gone)]
    segments = [
        segment(
            *([(4 * MIB, 4 * MIB), (16 * MIB, -1)] if at in lives else [(20 * MIB, -1)]),
            addr=at * MIB,
            is_expandable=True,
        )
        for at, _ in left
    ]
    assert outcome(read(recording(segments, events))) == expected


@pytest.mark.long
def test_many_runs_over_many_segments_end_soon():
    """A file could ask for a look at each segment after each run."""
    count = 20_000
    held = [segment((2 * MIB, 1000), (0, -1))] and [
        {
            "address": (1 << 44) + (number << 22),
            "total_size": 2 * MIB,
            "stream": 0,
            "blocks": [{"size": 2 * MIB, "requested_size": 2 * MIB, "state": "active_allocated"}],
        }
        for number in range(count)
    ]
    events = []
    for _ in range(count):
        events += [event("segment_alloc", 0, 2 * MIB), went(0, 2 * MIB), event("user_defined")]
    trace = read(recording(held, events))
    sure, unsure = outcome(trace)
    assert sure + unsure == count
    assert 0 < sure < count


@pytest.mark.parametrize("seed", range(8))
def test_releases_of_a_random_run_are_found_and_no_others(seed: int):
    dice = random.Random(seed)
    recorder = Recorder(random_places(dice))
    emptied = 0
    for _ in range(12):
        random_run(dice, recorder, 25)
        before = len(recorder.segments)
        recorder.empty_cache()
        recorder.note("user_defined", 0, 0, 0)
        emptied += len(recorder.segments) < before
    with_frames = recorder.snapshot()
    for entry in with_frames["device_traces"][0]:
        if entry["action"] == "segment_free":
            entry["frames"] = EMPTIES
    named, plain = read(with_frames), read(recorder.snapshot())
    assert facts(named)["releases_unsure"] == 0
    assert int((named.op == 2).sum()) >= emptied > 0
    assert int((plain.op == 2).sum()) + facts(plain)["releases_unsure"] == (named.op == 2).sum()
    again = Recorder(random_places(random.Random(seed)))
    assert all(one == other for one, other in replayed(named, again))


# Our own recordings --------------------------------------------------------------------------


def peak_of(content: dict[str, Any]) -> int:
    """The most that was reserved, from the raw file: what is there at its end, walked back."""
    reserved = peak = sum(one["total_size"] for one in content["segments"])
    for entry in reversed(content["device_traces"][0]):
        if entry["action"] in ("segment_alloc", "segment_map"):
            reserved -= entry["size"]
        elif entry["action"] in ("segment_free", "segment_unmap"):
            reserved += entry["size"]
        peak = max(peak, reserved)
    return peak


def work(pool: bfc.CachingAllocator, dice: random.Random, steps: int = 400) -> int:
    """Allocations on a device too small for them. How often the cache was emptied of something."""
    live: list[int] = []
    emptied = 0
    for _ in range(steps):
        roll = dice.random()
        if roll < 0.55 or not live:
            try:
                live.append(
                    pool.allocate_raw(dice.choice([900, 3000, 2 * MIB, dice.randint(1, 40 * MIB)]))
                )
            except bfc.OutOfMemoryError:
                pool.deallocate_raw(live.pop(0))
        elif roll < 0.96:
            pool.deallocate_raw(live.pop(dice.randrange(len(live))))
        else:
            emptied += pool.empty_cache() > 0
    return emptied


SETTINGS = [
    "",
    "garbage_collection_threshold:0.5",
    "max_split_size_mb:30",
    "expandable_segments:True",
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("context", [None, "all"])
@pytest.mark.parametrize("last", [None, 500])
@pytest.mark.parametrize("settings", SETTINGS)
def test_our_own_recordings_come_back_with_their_releases(settings: str, last, context):
    found = 0
    for seed in range(5):
        source = bfc.SimulatedSubAllocator("400 MiB")
        with bfc.CachingAllocator(source, settings=settings, strict=True) as pool:
            if settings.startswith("garbage"):
                pool.memory_limit  # noqa: B018
            pool.record_history(context=context, max_entries=last)
            emptied = work(pool, random.Random(seed))
            content = pool.snapshot().to_torch()
        trace = bfc.Trace.from_torch(io.BytesIO(pickle.dumps(content, 4)))
        assert facts(trace)["releases_unsure"] == 0
        releases = int((trace.op == 2).sum())
        assert releases == emptied if last is None else releases <= emptied
        found += releases
        if last is None:
            with bfc.CachingAllocator(
                bfc.SimulatedSubAllocator("400 MiB"), settings=settings, strict=True
            ) as again:
                assert trace.replay(again).peak_bytes_reserved == peak_of(content)
    assert found > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", SETTINGS)
def test_our_own_recordings_without_frames_hold_no_release_that_was_none(settings: str):
    sure = unsure = 0
    for seed in range(5):
        with bfc.CachingAllocator(bfc.SimulatedSubAllocator("400 MiB"), settings=settings) as pool:
            pool.record_history()
            work(pool, random.Random(seed))
            content = pool.snapshot().to_torch()
        named = bfc.Trace.from_torch(io.BytesIO(pickle.dumps(content, 4)))
        for entry in content["device_traces"][0]:
            del entry["frames"]
        plain = bfc.Trace.from_torch(io.BytesIO(pickle.dumps(content, 4)))
        places, other = [0], [0]
        for trace, found in ((named, places), (plain, other)):
            for op in trace.op.tolist():
                if op == 2:
                    found.append(found[0])
                else:
                    found[0] += 1
        assert set(other[1:]) <= set(places[1:])
        sure += len(other) - 1
        unsure += facts(plain)["releases_unsure"]
    assert sure > 0


def of_pytorch(dice: random.Random) -> list[Any]:
    """Operations of a peer on a device that is too small for them."""
    operations: list[Any] = [("record_history", True, 1 << 20)]
    live: list[int] = []
    for slot in range(500):
        roll = dice.random()
        if roll < 0.05:
            operations.append(("empty_cache",))
        elif roll < 0.5 and live:
            operations.append(("free_slot", live.pop(dice.randrange(len(live)))))
        else:
            live.append(slot)
            size = dice.choice([900, 3000, 2 * MIB, dice.randint(1, 40 * MIB)])
            operations.append(("malloc", size, 0, slot))
    return [*operations, ("snapshot",), ("trace",)]


def numbered(operations: list[Any], answers: list[Any]) -> set[int]:
    """How many blocks had been allocated and freed when the cache was emptied, each time."""
    found, done, live = set(), 0, set()
    for operation, answer in zip(operations, answers, strict=True):
        if operation[0] == "empty_cache":
            found.add(done)
        elif operation[0] == "malloc" and not isinstance(answer, Failure):
            live.add(operation[3])
            done += 1
        elif operation[0] == "free_slot" and operation[1] in live:
            live.remove(operation[1])
            done += 1
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [pytest.param(CommonPeer, marks=pytest.mark.peers), Ours])
@pytest.mark.parametrize("settings", SETTINGS)
def test_no_release_is_made_up_in_recordings_without_frames(kind: Any, settings: str):
    """Of runs that retry and collect: PyTorch's own, and ours."""
    if kind is CommonPeer:
        build()
    sure = unsure = exact = 0
    for seed in range(20):
        operations = of_pytorch(random.Random(seed))
        capacity = (400 if seed % 2 else 3000) * MIB
        subject = kind(settings=settings, capacity=capacity)
        answers = subject.run(operations)
        subject.close()
        *_, segments, history = answers
        refused = [entry for entry in history if entry["action"] == "oom"]
        for entry in refused:
            entry["device_free"] = entry.pop("addr")
        content = recording(segments, history)
        trace = read(content)
        found: list[int] = []
        done = 0
        for op in trace.op.tolist():
            found += [done] if op == 2 else []
            done += op != 2
        assert facts(trace)["first_recorded_event"] == 0
        assert set(found) <= numbered(operations, answers)
        sure += len(found)
        unsure += facts(trace)["releases_unsure"]
        if not facts(trace)["releases_unsure"] and not refused:
            source = bfc.SimulatedSubAllocator(capacity)
            with bfc.CachingAllocator(source, settings=settings, strict=True) as again:
                assert trace.replay(again).peak_bytes_reserved == peak_of(content)
                exact += 1
    assert sure > 100
    assert unsure > 10
    assert exact > 1
