"""Whose memory is allocated: `bfc.owner`, and where its name is seen."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import pickle
import random
import subprocess
import sys
import threading
import tracemalloc
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import bfc
from bfc.allocators._play import Run
from bfc.buffers._scopes import set_ranges
from bfc.integrations import nvtx

MIB = 1 << 20

Make = Callable[[], Any]


def simulated(nbytes: int | str = "1 GiB") -> bfc.SimulatedSubAllocator:
    return bfc.SimulatedSubAllocator(nbytes)


POLICIES: dict[str, Make] = {
    "bfc": lambda: bfc.BFCAllocator(simulated(), allow_growth=True),
    "bfc+virtual_memory": lambda: bfc.BFCAllocator(simulated(), virtual_memory=True),
    "caching": lambda: bfc.CachingAllocator(simulated()),
    "caching+expandable": lambda: bfc.CachingAllocator(
        simulated(), settings="expandable_segments:True"
    ),
}


@pytest.fixture(params=POLICIES.values(), ids=POLICIES)
def allocator(request: pytest.FixtureRequest) -> Iterator[Any]:
    with request.param() as made:
        yield made


def owned(allocator: Any) -> dict[str, int]:
    """What each owner has in use, after a recount."""
    allocator.check()
    stats = allocator.stats()
    assert sum(stats.by_owner.values()) == stats.bytes_in_use
    chunks: dict[str, int] = {}
    for chunk in allocator.snapshot().live_chunks():
        chunks[chunk.owner] = chunks.get(chunk.owner, 0) + chunk.size
    assert chunks == stats.by_owner
    return dict(stats.by_owner)


def size_at(allocator: Any, ptr: int) -> int:
    size: int = allocator.allocated_size(ptr)
    return size


# -- what belongs to whom --------------------------------------------------------------------------


def test_what_is_allocated_within_belongs_to_the_owner(allocator: Any) -> None:
    assert owned(allocator) == {}
    with bfc.owner("weights"):
        weights = allocator.allocate_raw(3 * MIB)
    other = allocator.allocate_raw(MIB)
    assert owned(allocator) == {
        "weights": size_at(allocator, weights),
        "": size_at(allocator, other),
    }
    allocator.deallocate_raw(weights)
    assert owned(allocator) == {"": size_at(allocator, other)}
    assert allocator.stats().by_owner["weights"] == 0
    allocator.deallocate_raw(other)
    assert owned(allocator) == {}


def test_the_largest_comes_first(allocator: Any) -> None:
    for name, nbytes in {"a": MIB, "b": 5 * MIB, "c": 2 * MIB}.items():
        with bfc.owner(name):
            allocator.allocate_raw(nbytes)
    assert list(allocator.stats().by_owner) == ["b", "c", "a"]


def test_the_innermost_wins(allocator: Any) -> None:
    with bfc.owner("outer"):
        with bfc.owner("inner"):
            allocator.allocate_raw(256)
        allocator.allocate_raw(512)
    allocator.allocate_raw(1024)
    live = allocator.snapshot().live_chunks()
    assert [chunk.owner for chunk in sorted(live, key=lambda chunk: chunk.allocation_id)] == [
        "inner",
        "outer",
        "",
    ]


def test_the_free_may_come_from_anywhere(allocator: Any) -> None:
    with bfc.owner("a"):
        ptr = allocator.allocate_raw(1000)
    with bfc.owner("b"):
        allocator.deallocate_raw(ptr)
    assert owned(allocator) == {}
    with bfc.owner("a"):
        ptr = allocator.allocate_raw(1000)
    thread = threading.Thread(target=allocator.deallocate_raw, args=(ptr,))
    thread.start()
    thread.join()
    assert owned(allocator) == {}


def test_one_name_is_one_owner_in_every_allocator(allocator: Any) -> None:
    scope = bfc.owner("shared")
    with bfc.BFCAllocator(simulated()) as another, scope, bfc.owner("shared"):
        allocator.allocate_raw(256)
        another.allocate_raw(256)
        assert list(owned(allocator)) == list(owned(another)) == ["shared"]


def test_many_at_once(allocator: Any) -> None:
    with bfc.owner("many"):
        ptrs = allocator.allocate_many([1000] * 700)
        one = allocator.allocate_raw(100)
    assert owned(allocator)["many"] == sum(size_at(allocator, int(ptr)) for ptr in [*ptrs, one])
    allocator.deallocate_many(ptrs)
    assert owned(allocator) == {"many": size_at(allocator, one)}


def test_many_that_do_not_all_fit() -> None:
    with bfc.BFCAllocator(simulated("8 MiB")) as allocator, bfc.owner("many"):
        with pytest.raises(bfc.OutOfMemoryError):
            allocator.allocate_many([MIB] * 20)
        assert owned(allocator) == {}


def test_a_buffer_that_is_collected(allocator: Any) -> None:
    with bfc.owner("buffers"):
        buffer = allocator.allocate(1000)
    assert set(owned(allocator)) == {"buffers"}
    del buffer
    gc.collect()
    assert owned(allocator) == {}


def test_a_free_that_waits_for_a_stream(allocator: Any) -> None:
    source = allocator.sub_allocator
    source.hold(7)
    with bfc.owner("busy"):
        ptr = allocator.allocate_raw(1000)
    size = size_at(allocator, ptr)
    allocator.record_stream(ptr, 7)
    allocator.deallocate_raw(ptr)
    assert owned(allocator) == {"busy": size}
    source.finish(7)
    allocator.allocate_raw(100)  # looks at the streams
    assert "busy" not in owned(allocator)


def test_a_free_whose_fence_fails(monkeypatch: pytest.MonkeyPatch, allocator: Any) -> None:
    with bfc.owner("busy"):
        ptr = allocator.allocate_raw(1000)
    before = owned(allocator)
    allocator.sub_allocator.hold(7)
    allocator.record_stream(ptr, 7)

    def fail(_self: object, _stream: int) -> None:
        raise bfc.SubAllocatorError("lost")

    with monkeypatch.context() as patched:
        patched.setattr(bfc.SimulatedSubAllocator, "fence", fail)
        with pytest.raises(bfc.SubAllocatorError, match="lost"):
            allocator.deallocate_raw(ptr)
    assert owned(allocator) == before
    allocator.sub_allocator.finish(7)
    allocator.deallocate_raw(ptr)
    allocator.release_free_regions()
    assert owned(allocator) == {}


def test_random_work_adds_up(allocator: Any) -> None:
    rng = random.Random(7)
    live: list[int] = []
    allocator.sub_allocator.hold(9)
    for step in range(1500):
        if live and rng.random() < 0.48:
            ptr = live.pop(rng.randrange(len(live)))
            if rng.random() < 0.1:
                allocator.record_stream(ptr, 9)
            allocator.deallocate_raw(ptr)
        elif rng.random() < 0.2:
            live.append(allocator.allocate_raw(rng.randrange(1, 4 * MIB)))
        else:
            with bfc.owner(rng.choice(["a", "b", "c", "d"])):
                live.append(allocator.allocate_raw(rng.randrange(1, 2 * MIB)))
        if step % 100 == 0:
            owned(allocator)
        if step % 300 == 0:
            allocator.sub_allocator.finish(9)
            allocator.release_free_regions()
            allocator.sub_allocator.hold(9)
    allocator.sub_allocator.finish(9)
    allocator.deallocate_many(live)
    allocator.release_free_regions()
    assert owned(allocator) == {}


def test_memory_that_grows_in_place() -> None:
    with bfc.BFCAllocator(simulated(), virtual_memory=True) as allocator:
        with bfc.owner("cache"):
            ptr = allocator.allocate_raw(MIB)
        assert allocator.try_extend(ptr, 5 * MIB)
        assert owned(allocator) == {"cache": 5 * MIB}
        allocator.deallocate_raw(ptr)
        assert owned(allocator) == {}


def test_stitched_memory() -> None:
    with bfc.BFCAllocator(simulated("32 MiB"), virtual_memory=True, page_size=2 * MIB) as allocator:
        with bfc.owner("small"):
            ptrs = [allocator.allocate_raw(2 * MIB) for _ in range(16)]
        for ptr in ptrs[::2]:
            allocator.deallocate_raw(ptr)
        with bfc.owner("large"):
            large = allocator.allocate_raw(16 * MIB)
        assert owned(allocator) == {"large": 16 * MIB, "small": 16 * MIB}
        assert allocator.page_stats()["stitches"] > 0
        allocator.deallocate_raw(large)
        assert owned(allocator) == {"small": 16 * MIB}


def test_sleep_and_wake_keep_the_owners(allocator: Any) -> None:
    if allocator.sub_allocator.supports_virtual_memory and "virtual" in repr(allocator):
        pytest.skip("one of both is enough")
    allocator = bfc.CachingAllocator(simulated(), settings="expandable_segments:True")
    with allocator, allocator.tag("kv"):
        with bfc.owner("pages"):
            ptr = allocator.allocate_raw(4 * MIB)
        before = owned(allocator)
        allocator.sleep(drop=["kv"])
        assert owned(allocator) == before
        allocator.wake()
        assert owned(allocator) == before == {"pages": 4 * MIB}
        allocator.deallocate_raw(ptr)
        assert owned(allocator) == {}


def test_a_private_pool() -> None:
    with bfc.CachingAllocator(simulated()) as allocator:
        pool = bfc.MemPool(allocator)
        with bfc.use_mem_pool(pool), bfc.owner("graph"):
            ptr = allocator.allocate_raw(1000)
        assert set(owned(allocator)) == {"graph"}
        allocator.deallocate_raw(ptr)
        del pool
        assert owned(allocator) == {}


def test_closing_leaves_nothing() -> None:
    for make in POLICIES.values():
        allocator = make()
        with bfc.owner("left"):
            allocator.allocate_raw(1000)
        allocator.close()
        assert allocator.stats().by_owner == {}


# -- where a scope holds ---------------------------------------------------------------------------


def owner_of_new(allocator: Any) -> str:
    """Whose an allocation is that is made here."""
    ptr = allocator.allocate_raw(1000)
    (found,) = [chunk for chunk in allocator.snapshot().live_chunks() if chunk.ptr == ptr]
    allocator.deallocate_raw(ptr)
    owner: str = found.owner
    return owner


def test_a_thread_does_not_inherit(allocator: Any) -> None:
    found = []
    with bfc.owner("here"):
        thread = threading.Thread(target=lambda: found.append(owner_of_new(allocator)))
        thread.start()
        thread.join()
        assert owner_of_new(allocator) == "here"
    assert found == [""]


def test_threads_have_owners_of_their_own(allocator: Any) -> None:
    failed: list[str] = []

    def work(name: str) -> None:
        for _ in range(300):
            with bfc.owner(name):
                found = owner_of_new(allocator)
            if found != name or owner_of_new(allocator):
                failed.append(f"{name}: {found}")

    threads = [threading.Thread(target=work, args=(f"thread {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert owned(allocator) == {}


def test_asyncio_tasks_do_not_mix(allocator: Any) -> None:
    async def work(name: str) -> list[str]:
        found = []
        for _ in range(5):
            with bfc.owner(name):
                await asyncio.sleep(0)
                found.append(owner_of_new(allocator))
                await asyncio.sleep(0)
                found.append(owner_of_new(allocator))
            await asyncio.sleep(0)
            found.append(owner_of_new(allocator))
        return found

    async def main() -> list[list[str]]:
        return await asyncio.gather(*(work(f"task {i}") for i in range(3)))

    for i, found in enumerate(asyncio.run(main())):
        assert found == [f"task {i}", f"task {i}", ""] * 5


def test_a_task_inherits_and_keeps(allocator: Any) -> None:
    async def main() -> list[str]:
        async def child() -> str:
            await asyncio.sleep(0.01)
            return owner_of_new(allocator)

        with bfc.owner("parent"):
            task = asyncio.create_task(child())
            in_thread = await asyncio.to_thread(owner_of_new, allocator)
        return [in_thread, owner_of_new(allocator), await task]

    assert asyncio.run(main()) == ["parent", "", "parent"]


def test_a_copied_context_keeps_the_owner(allocator: Any) -> None:
    with bfc.owner("copied"):
        context = contextvars.copy_context()
    assert owner_of_new(allocator) == ""
    assert context.run(owner_of_new, allocator) == "copied"


def test_one_scope_can_be_entered_again_and_within_itself(allocator: Any) -> None:
    scope = bfc.owner("again")
    for _ in range(2):
        with scope, scope:
            assert owner_of_new(allocator) == "again"
    assert owner_of_new(allocator) == ""


def test_one_scope_in_two_threads(allocator: Any) -> None:
    scope = bfc.owner("both")
    inside, go_on = threading.Event(), threading.Event()
    found = []

    def work() -> None:
        with scope:
            inside.set()
            go_on.wait(10)
            found.append(owner_of_new(allocator))
        found.append(owner_of_new(allocator))

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(10)
    with scope:
        pass
    assert owner_of_new(allocator) == ""
    go_on.set()
    thread.join()
    assert found == ["both", ""]


def test_a_scope_that_was_not_entered_here() -> None:
    scope = bfc.owner("never")
    with pytest.raises(RuntimeError, match="was not entered here"):
        scope.__exit__(None, None, None)
    scope.__enter__()
    with pytest.raises(RuntimeError, match="was not entered here"):
        contextvars.Context().run(scope.__exit__, None, None, None)
    scope.__exit__(None, None, None)


def test_an_error_ends_the_scope(allocator: Any) -> None:
    with pytest.raises(ZeroDivisionError), bfc.owner("broken"):
        raise ZeroDivisionError
    assert owner_of_new(allocator) == ""


@pytest.mark.parametrize(("name", "error"), [(3, TypeError), (None, TypeError), ("", ValueError)])
def test_a_name_that_is_no_name(name: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        bfc.owner(name)


def test_what_a_scope_says_of_itself() -> None:
    scope = bfc.owner("kv cache")
    assert repr(scope) == "bfc.owner('kv cache')"
    assert scope.name == "kv cache"


def test_a_forked_child_has_the_owners() -> None:
    with bfc.CachingAllocator(simulated()) as allocator, bfc.owner("parent"):
        allocator.allocate_raw(1000)
        child = os.fork()
        if child == 0:
            with bfc.owner("child"):
                allocator.allocate_raw(1000)
            expected = {"parent": 512 * 2, "child": 512 * 2}
            os._exit(0 if owned(allocator) == expected and owner_of_new(allocator) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert set(owned(allocator)) == {"parent"}


MORE_THAN_FIT = """
import warnings
import bfc
allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), allow_growth=True)
names = [f"request {n}" for n in range(65_527)]
warnings.simplefilter("error")
for name in names:
    bfc.owner(name)
with bfc.owner(names[-1]):
    allocator.allocate_raw(256)
warnings.simplefilter("always")
for name in "one more", "and one more", names[0]:
    with warnings.catch_warnings(record=True) as caught, bfc.owner(name) as scope:
        allocator.allocate_raw(512)
    print(scope.name, len(caught), [str(warning.message)[:35] for warning in caught])
allocator.check()
print(allocator.stats().by_owner)
"""


def test_more_owners_than_there_are_numbers() -> None:
    command = [sys.executable, "-c", MORE_THAN_FIT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stderr == ""
    text = "['this process has named 65527 owners']"
    assert done.stdout.splitlines() == [
        f"one more 1 {text}",
        f"and one more 1 {text}",
        "request 0 0 []",
        "{'(more owners)': 1024, 'request 0': 512, 'request 65526': 256}",
    ]


# -- tags ------------------------------------------------------------------------------------------


def test_a_tag_is_an_owner(allocator: Any) -> None:
    with allocator.tag("weights"):
        ptr = allocator.allocate_raw(1000)
        assert set(owned(allocator)) == {"weights"}
        with bfc.owner("embedding"):
            assert owner_of_new(allocator) == "embedding"
        assert owner_of_new(allocator) == "weights"
    with bfc.owner("outside"), allocator.tag("weights"):
        assert owner_of_new(allocator) == "weights"
    allocator.deallocate_raw(ptr)
    assert owner_of_new(allocator) == ""


def test_a_tag_is_an_owner_in_its_allocator_alone(allocator: Any) -> None:
    with bfc.CachingAllocator(simulated()) as another, bfc.owner("outer"):
        with allocator.tag("weights"):
            assert owner_of_new(another) == "outer"
            assert owner_of_new(allocator) == "weights"
            with another.tag("other"):
                assert owner_of_new(allocator) == "weights"
                assert owner_of_new(another) == "other"
        assert owner_of_new(allocator) == "outer"


def test_a_tag_ends_for_the_tasks_that_were_started_in_it(allocator: Any) -> None:
    with bfc.owner("outer"), allocator.tag("weights"):
        context = contextvars.copy_context()
        assert context.run(owner_of_new, allocator) == "weights"
    assert context.run(owner_of_new, allocator) == "outer"


# -- where a name is seen --------------------------------------------------------------------------


def test_the_history_names_owners() -> None:
    with bfc.CachingAllocator(simulated("64 MiB")) as allocator:
        allocator.record_history(context=None)
        with bfc.owner("weights"):
            ptr = allocator.allocate_raw(1000)
            with pytest.raises(bfc.OutOfMemoryError), bfc.owner("too much"):
                allocator.allocate_raw(200 * MIB)
        other = allocator.allocate_raw(1000)
        allocator.deallocate_raw(ptr)
        allocator.deallocate_raw(other)
        found = [(entry.action, entry.owner) for entry in allocator.history()]
        assert found == [
            ("segment_alloc", ""),
            ("alloc", "weights"),
            ("oom", "too much"),
            ("alloc", ""),
            ("free_requested", "weights"),
            ("free_completed", "weights"),
            ("free_requested", ""),
            ("free_completed", ""),
        ]


def test_a_full_history_gives_the_newest_entry_its_owner() -> None:
    with bfc.CachingAllocator(simulated("64 MiB")) as allocator:
        allocator.record_history(context=None, max_entries=3, skip_actions=["segment_alloc"])
        for i in range(5):
            with bfc.owner(f"owner {i}"):
                allocator.allocate_raw(1000)
        owners = [entry.owner for entry in allocator.history()]
        assert owners == ["owner 2", "owner 3", "owner 4"]
        allocator.record_history(context=None, skip_actions=["alloc"])
        with bfc.owner("unseen"):
            allocator.deallocate_raw(allocator.allocate_raw(1000))
        assert [entry.owner for entry in allocator.history()] == ["unseen", "unseen"]


def test_statistics_can_be_compared_hashed_and_written() -> None:
    with bfc.BFCAllocator(simulated()) as allocator:
        before = allocator.stats()
        with bfc.owner("a"):
            allocator.allocate_raw(256)
        stats = allocator.stats()
        assert stats == allocator.stats() != before
        assert hash(stats) == hash(allocator.stats())
        assert stats.as_dict()["by_owner"] == {"a": 256}


def test_a_refusal_names_the_three_largest() -> None:
    with bfc.BFCAllocator(simulated("64 MiB")) as allocator:
        with pytest.raises(bfc.OutOfMemoryError) as refused:
            allocator.allocate_raw(100 * MIB)
        assert "owners" not in str(refused.value)
        for name, mib in {"weights": 8, "kv cache": 16, "a": 1, "b\nc": 2}.items():
            with bfc.owner(name):
                allocator.allocate_raw(mib * MIB)
        allocator.allocate_raw(4 * MIB)
        with pytest.raises(bfc.OutOfMemoryError) as refused:
            allocator.allocate_raw(100 * MIB)
        largest = "kv cache 16.00 MiB, weights 8.00 MiB, nobody 4.00 MiB, 2 more 3.00 MiB"
        assert f"\n  owners        {largest}\n" in str(refused.value)
        assert refused.value.by_owner == allocator.stats().by_owner
        again = pickle.loads(pickle.dumps(refused.value))
        assert str(again) == str(refused.value)
        assert again.by_owner == refused.value.by_owner


def test_the_dict_for_pytorch_names_owners() -> None:
    with bfc.CachingAllocator(simulated("64 MiB")) as allocator:
        allocator.record_history(context=None)
        for name in "weights", "käse \udc80", "weights":
            with bfc.owner(name):
                allocator.allocate_raw(1000)
        allocator.allocate_raw(1000)
        snapshot = allocator.snapshot()
    entries = snapshot.to_torch()["device_traces"][0]
    found = [entry["user_metadata"] for entry in entries if entry["action"] == "alloc"]
    assert found == ["weights", "käse \udc80", "weights", ""]
    again = pickle.loads(pickle.dumps(snapshot))  # of objects: no columns
    assert again.to_torch() == snapshot.to_torch()
    assert [chunk.owner for chunk in again.live_chunks()] == found


# -- leaks -----------------------------------------------------------------------------------------


def test_leaks_are_what_is_live(allocator: Any) -> None:
    assert allocator.leaks() == ()
    assert str(allocator.leaks()).startswith("nothing is live in <bfc.")
    source = allocator.sub_allocator
    source.hold(7)
    with bfc.owner("weights"):
        first = allocator.allocate_raw(1000)
        second = allocator.allocate_raw(2000)
        waits = allocator.allocate_raw(3000)
    third = allocator.allocate_raw(MIB)
    allocator.record_stream(waits, 7)
    allocator.deallocate_raw(waits)
    found = {leak.ptr: (leak.nbytes, leak.owner, leak.frames) for leak in allocator.leaks()}
    assert found == {
        first: (1000, "weights", ()),
        second: (2000, "weights", ()),
        third: (MIB, "", ()),
    }
    text = str(allocator.leaks())
    assert "3 allocations, 1.00 MiB, still live in <bfc." in text
    assert "2 allocations, 2.9 KiB, of 'weights', the first at" in text
    assert text.count("lines are not known: record_history() keeps them") == 2


def test_leaks_name_the_lines_that_a_history_kept() -> None:
    with bfc.CachingAllocator(simulated("64 MiB")) as allocator:
        allocator.record_history()
        with bfc.owner("weights"):
            kept = [allocator.allocate_raw(1000) for _ in range(3)]
        before = len(allocator.history())
        leaks = allocator.leaks()
        assert len(allocator.history()) == before
        assert [leak.ptr for leak in leaks] == kept
        assert {leak.frames[0].filename for leak in leaks} == {__file__}
        assert "kept = [allocator.allocate_raw(1000) for _ in range(3)]" in str(leaks)


# -- replays ---------------------------------------------------------------------------------------


def test_a_replay_has_the_owner_of_its_scope(allocator: Any) -> None:
    trace = bfc.Trace([0, 0, 1, 0], [1, 2, 1, 3], [1000, 2 * MIB, 0, 5 * MIB])
    with bfc.owner("replayed"):
        trace.replay(allocator)
    assert set(owned(allocator)) == {"replayed"}
    allocator.deallocate_many([leak.ptr for leak in allocator.leaks()])
    assert owned(allocator) == {}
    trace.replay(allocator)
    assert set(owned(allocator)) == {""}


def test_a_replay_has_the_owners_of_its_trace(allocator: Any) -> None:
    events = [0, 0, 1, 0], [1, 2, 1, 3], [1000, 2 * MIB, 0, 5 * MIB]
    trace = bfc.Trace(*events, owner=[1, 1, 0, 0], owners=["", "recorded"])
    trace.replay(allocator)
    found = owned(allocator)
    assert found.keys() == {"", "recorded"}
    assert found["recorded"] >= 2 * MIB
    with bfc.owner("around"):
        trace.replay(allocator)
    both = owned(allocator)
    assert both.keys() == {"", "recorded", "around"}
    assert both[""] == found[""]
    assert both["around"] >= 5 * MIB


def test_a_replay_takes_owners_from_a_column(allocator: Any) -> None:
    op, number = np.array([0, 0, 1, 0, 0], np.uint8), np.array([0, 1, 0, 2, 3], np.uint32)
    size = np.array([MIB, 2 * MIB, 0, 4 * MIB, 8 * MIB], np.uint64)
    stream, handles = np.zeros(5, np.uint16), np.empty(4, np.uint32)
    columns = allocator, op, number, size, stream, handles, np.empty(5, np.uint64)
    owner = np.array([1, 2, 1, 0, 2], np.uint16)
    run = Run(*columns, owner, ["", "a", "b"])
    run.play()
    found = owned(allocator)
    assert found == {"b": 10 * MIB, "": 4 * MIB}
    with pytest.raises(ValueError, match="event 1 names owner 2, and the table has 2"):
        Run(*columns, owner, ["", "a"])
    with pytest.raises(ValueError, match="differ in length"):
        Run(*columns, owner[:3], ["", "a", "b"])


# -- tracemalloc -----------------------------------------------------------------------------------


@pytest.fixture
def tracing() -> Iterator[None]:
    tracemalloc.start(1)
    yield
    tracemalloc.stop()


def traced(domain: int) -> dict[int, int]:
    """The bytes of a domain by line of this file."""
    only = tracemalloc.DomainFilter(True, domain)
    snapshot = tracemalloc.take_snapshot().filter_traces([only])
    statistics = snapshot.statistics("lineno")
    assert {statistic.traceback[0].filename for statistic in statistics} <= {__file__}
    return {statistic.traceback[0].lineno: statistic.size for statistic in statistics}


def here() -> int:
    return sys._getframe(1).f_lineno


@pytest.mark.usefixtures("tracing")
def test_tracemalloc_counts_the_memory_by_line(allocator: Any) -> None:
    allocator.allocate_raw(1000)
    allocator.set_tracemalloc_domain(77)
    assert traced(77) == {}
    ptrs = [allocator.allocate_raw(2 * MIB) for _ in range(3)]
    line = here() - 1
    many = allocator.allocate_many([MIB] * 4)
    buffer = allocator.allocate(3 * MIB)
    of_many = sum(size_at(allocator, int(ptr)) for ptr in many)
    assert traced(77) == {line: 6 * MIB, line + 2: of_many, line + 3: 3 * MIB}
    allocator.deallocate_raw(ptrs.pop())
    allocator.deallocate_many(many)
    assert traced(77) == {line: 4 * MIB, line + 3: 3 * MIB}
    del buffer
    assert traced(77) == {line: 4 * MIB}
    allocator.check()
    allocator.set_tracemalloc_domain(78)
    assert traced(77) == traced(78) == {}
    allocator.allocate_raw(MIB)
    allocator.set_tracemalloc_domain(None)
    assert traced(78) == {}
    assert allocator.tracemalloc_domain is None
    allocator.deallocate_raw(allocator.allocate_raw(MIB))
    allocator.check()


@pytest.mark.usefixtures("tracing")
def test_tracemalloc_forgets_what_waited_and_what_was_closed() -> None:
    allocator = bfc.CachingAllocator(simulated())
    allocator.set_tracemalloc_domain(77)
    allocator.sub_allocator.hold(7)
    with bfc.owner("both"):
        ptr = allocator.allocate_raw(2 * MIB)
    line = here() - 1
    allocator.record_stream(ptr, 7)
    allocator.deallocate_raw(ptr)
    assert traced(77) == {line: 2 * MIB}
    allocator.sub_allocator.finish(7)
    allocator.release_free_regions()
    assert traced(77) == {}
    allocator.allocate_raw(2 * MIB)
    allocator.close()
    assert traced(77) == {}


@pytest.mark.usefixtures("tracing")
def test_tracemalloc_follows_memory_that_grows() -> None:
    with bfc.BFCAllocator(simulated(), virtual_memory=True) as allocator:
        allocator.set_tracemalloc_domain(77)
        ptr = allocator.allocate_raw(MIB)
        assert allocator.try_extend(ptr, 5 * MIB)
        assert list(traced(77).values()) == [5 * MIB]


def test_a_domain_without_tracemalloc_does_nothing(allocator: Any) -> None:
    assert not tracemalloc.is_tracing()
    allocator.set_tracemalloc_domain(77)
    allocator.deallocate_raw(allocator.allocate_raw(MIB))
    allocator.check()


@pytest.mark.parametrize(
    ("domain", "error"),
    [(0, ValueError), (-1, ValueError), (1 << 32, ValueError), ("a", TypeError)],
)
def test_a_domain_that_is_none(allocator: Any, domain: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="a domain is"):
        allocator.set_tracemalloc_domain(domain)


# -- NVTX ------------------------------------------------------------------------------------------


class FakeNvtx(types.ModuleType):
    """The two functions of the package nvtx that we call."""

    def __init__(self) -> None:
        super().__init__("nvtx")
        self.calls: list[tuple[object, ...]] = []

    def start_range(self, message: str, domain: str) -> int:
        self.calls.append(("start", message, domain))
        return len(self.calls)

    def end_range(self, number: int) -> None:
        self.calls.append(("end", number))


def test_scopes_can_be_ranges_of_nvtx(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvtx()
    monkeypatch.setitem(sys.modules, "nvtx", fake)
    nvtx.enable()
    try:
        with bfc.owner("outer"), bfc.owner("inner"):
            pass
        last = bfc.owner("last")
        last.__enter__()
    finally:
        nvtx.disable()
    last.__exit__()
    with bfc.owner("unseen"):
        pass
    assert fake.calls == [
        ("start", "outer", "bfc"),
        ("start", "inner", "bfc"),
        ("end", 2),
        ("end", 1),
        ("start", "last", "bfc"),
        ("end", 5),
    ]


def test_a_range_that_fails_leaves_no_owner(allocator: Any) -> None:
    def fail(_name: str) -> None:
        raise ZeroDivisionError

    set_ranges(fail, None)
    try:
        with pytest.raises(ZeroDivisionError):
            bfc.owner("broken").__enter__()
    finally:
        nvtx.disable()
    assert owner_of_new(allocator) == ""


def test_the_real_package_of_nvtx() -> None:
    pytest.importorskip("nvtx")
    nvtx.enable("bfc test")
    try:
        with bfc.owner("real"):
            pass
    finally:
        nvtx.disable()


def test_nvtx_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(bfc.DeviceUnavailableError, match="pip install nvtx"):
        nvtx.enable()
