"""Plans in use that stop to pay: a new plan of the last steps, or none."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import pytest

import bfc
from bfc.allocators._plan_use import keeps_history
from bfc.plans import watching
from bfc.testing import Misbehaving

MIB = 1 << 20
POLICIES = ("caching", "bfc")
#: Sizes in MiB, one after the other. Without a plan the policies need more than the largest.
PLANNED, OTHER = (8, 9, 11), (20, 30, 40)


def made(policy: str, source: bfc.SubAllocator, **options: Any) -> bfc.Allocator:
    if policy == "caching":
        return bfc.CachingAllocator(source, **options)
    return bfc.BFCAllocator(source, allow_growth=True, **options)


def trace_of(*steps: tuple[int, ...]) -> bfc.Trace:
    ops, ids, sizes, marks = [], [], [], []
    for step in steps:
        marks.append([len(ops), "train"])
        for size in step:
            ids += [len(ops) // 2] * 2
            sizes += [size * MIB, 0]
            ops += [0, 1]
    return bfc.Trace(ops, ids, sizes, meta={"marks": marks})


def plan_of(policy: str) -> bfc.Plan:
    return bfc.Plan.from_trace(trace_of(*[PLANNED] * 4), fallback=policy)


def play(pool: bfc.Allocator, sizes: tuple[int, ...], steps: int, kind: str = "train") -> None:
    for _ in range(steps):
        with pool.step(kind):
            for size in sizes:
                pool.allocate(size * MIB).free()
        assert pool.check() is None


def await_look() -> None:
    for thread in threading.enumerate():
        if thread.name == "bfc plan":
            thread.join()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_program_that_changes_gets_a_new_plan(policy: str):
    """What lives before, and through the change, keeps its memory."""
    with made(policy, bfc.HostSubAllocator(), memory_limit="1 GiB", plan=plan_of(policy)) as pool:
        kept = pool.allocate("1 MiB")
        ctypes.memset(kept.ptr, 77, kept.nbytes)
        play(pool, PLANNED, 4)
        assert pool.plan_stats()["agreement"] > 0.9
        play(pool, OTHER, 2 + 5)  # two cost too much; then four are recorded, and what ends them
        await_look()
        before = pool.plan_stats()
        assert before["replanned"] == 0
        assert before["first_departure"]["step"] == 5
        play(pool, OTHER, 4)
        after = pool.plan_stats()
        assert (after["replanned"], after["span"], after["agreement"]) == (1, 40 * MIB, 1.0)
        assert (after["steps"], after["departed_steps"]) == (4, 0)
        assert ctypes.string_at(kept.ptr, kept.nbytes) == b"\x4d" * kept.nbytes
        assert not keeps_history(pool)
        play(pool, PLANNED, 12)  # 11 MiB lie in the places of 40: nothing better is found
        await_look()
        play(pool, PLANNED, 2)
        assert pool.plan_stats()["span"] == 40 * MIB
        del kept


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_that_does_not_pay_any_more_is_switched_off(policy: str):
    source = bfc.SimulatedSubAllocator("1 GiB")
    with made(policy, source, plan=plan_of(policy)) as pool:
        play(pool, PLANNED, 2)
        play(pool, (32,), 2 + 5)
        await_look()
        with pytest.warns(RuntimeWarning, match=r"does not pay any more.*the policy serves all"):
            play(pool, (32,), 1)
        stats = pool.plan_stats()
        assert stats["state"] == "switched off"
        assert stats["why"].endswith("would have 32.00 MiB without one")
        play(pool, (32,), 1)
        assert pool.stats().pool_bytes == 32 * MIB  # the region of the bodies went back
        pool.use_plan(plan_of(policy))
        assert pool.plan_stats()["state"] == "between steps"


def test_a_plan_that_follows_is_not_looked_at_and_neither_is_one_without_a_gate():
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), plan=plan_of("caching")) as pool:
        play(pool, PLANNED, 12)
        for _ in range(3):
            with pool.step("evaluation"):  # the plan says nothing of these
                pool.allocate(40 * MIB).free()
        assert not keeps_history(pool)
        pool.use_plan(plan_of("caching"), gate=None)
        play(pool, OTHER, 12)
        assert not keeps_history(pool)
        assert pool.plan_stats()["replanned"] == 0


def test_a_history_of_the_user_is_left_alone():
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), plan=plan_of("caching")) as pool:
        pool.record_history()
        play(pool, OTHER, 12)
        assert len(pool.history()) > 12 * 6
        pool.record_history(None)
        play(pool, OTHER, 2)
        assert keeps_history(pool)  # of the watch
        pool.record_history()  # and now of the user
        play(pool, OTHER, 10)
        assert len(pool.history()) > 10 * 6
        pool.record_history(None)
        with pool.record_plan() as recording:
            play(pool, OTHER, 2)
            pool.record_history()
            play(pool, OTHER, 4)
        assert len(pool.history()) > 4 * 6
        with pytest.raises(bfc.PlanError, match="another history was begun"):
            recording.plan()
        await_look()


def test_another_plan_ends_the_recording_of_steps():
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), plan=plan_of("caching")) as pool:
        play(pool, OTHER, 4)
        assert keeps_history(pool)
        pool.use_plan(None)
        assert not keeps_history(pool)


@pytest.mark.parametrize("policy", POLICIES)
def test_replays_come_to_the_same(policy: str):
    """They wait for what the thread finds."""
    run = trace_of(*[PLANNED] * 3, *[OTHER] * 12)
    found = []
    for _ in range(3):
        with made(policy, bfc.SimulatedSubAllocator("1 GiB"), plan=plan_of(policy)) as pool:
            addresses = run.replay(pool).addresses.tolist()
            found.append((addresses, pool.plan_stats()["replanned"]))
            assert pool.check() is None
    assert found[0] == found[1] == found[2]
    assert found[0][1] == 1


def test_the_plan_stays_while_a_stream_is_captured():
    """What the watch has found is put off."""
    source = Misbehaving("1 GiB")
    with bfc.CachingAllocator(source, plan=plan_of("caching")) as pool:
        play(pool, PLANNED, 3)
        play(pool, OTHER, 7)
        await_look()
        with pool.capture(7) as graph:
            source.captures.begin(7)
            before = dict(source.counts)
            for _ in range(4):
                with pool.step("train"):
                    pass
            assert source.counts == before
            with pytest.raises(RuntimeError, match="a stream is being captured: change the plan"):
                pool.use_plan(None)
            source.captures.end(7)
        assert pool.plan_stats()["replanned"] == 0
        play(pool, OTHER, 2)
        assert pool.plan_stats()["replanned"] == 1
        graph.release()


def test_a_new_plan_for_steps_that_are_over_is_dropped(monkeypatch: pytest.MonkeyPatch):
    """Steps are judged while a look runs."""
    may_end = threading.Event()
    find = watching.what_follows
    monkeypatch.setattr(watching, "what_follows", lambda *args: may_end.wait() and find(*args))
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), plan=plan_of("caching")) as pool:
        play(pool, PLANNED, 3)
        play(pool, OTHER, 7)
        play(pool, PLANNED, 4)
        may_end.set()
        await_look()
        play(pool, PLANNED, 2)
        stats = pool.plan_stats()
        assert (stats["replanned"], stats["span"]) == (0, 11 * MIB)


def test_what_is_kept_for_ever_does_not_keep_a_plan_that_pays_from_coming():
    """The new plan waits for the region to become idle, and then serves beside it."""
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), plan=plan_of("caching")) as pool:
        play(pool, PLANNED, 3)
        guest = pool.allocate(2 * MIB)  # lies in the region between steps
        play(pool, OTHER, 7)
        await_look()
        play(pool, OTHER, 15)
        assert pool.plan_stats()["replanned"] == 0
        play(pool, OTHER, 4)
        stats = pool.plan_stats()
        assert (stats["replanned"], stats["span"], stats["agreement"]) == (1, 40 * MIB, 1.0)
        play(pool, OTHER, 1)
        assert pool.stats().pool_bytes == (11 + 40) * MIB
        guest.free()
        play(pool, OTHER, 1)
        assert pool.stats().pool_bytes == 40 * MIB


def test_a_new_plan_is_given_up_where_both_regions_would_take_too_much():
    """Looks go on, and the next one may be used."""
    planned, other = (40, 41, 42), (30, 35, 45)  # of which one alone lies beside the region
    plan = bfc.Plan.from_trace(trace_of(*[planned] * 4))
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), plan=plan) as pool:
        play(pool, planned, 3)
        guest = pool.allocate(2 * MIB)
        play(pool, other, 7 + 1)
        await_look()
        play(pool, other, 16)
        guest.free()
        play(pool, other, 4)
        assert pool.plan_stats()["replanned"] == 0
        play(pool, other, 16 + 7)
        await_look()
        play(pool, other, 1)
        assert pool.plan_stats()["replanned"] == 1


def test_a_program_that_changes_back_gets_its_plan_back():
    """Just when the new plan comes into use, which would else stay until a later look."""
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), plan=plan_of("caching")) as pool:
        play(pool, PLANNED, 4)
        play(pool, OTHER, 7)
        await_look()
        play(pool, PLANNED, 2)
        stats = pool.plan_stats()
        assert (stats["replanned"], stats["span"]) == (1, 40 * MIB)
        play(pool, PLANNED, 3)
        stats = pool.plan_stats()
        assert (stats["replanned"], stats["span"], stats["agreement"]) == (2, 11 * MIB, 1.0)
        assert pool.stats().pool_bytes == 11 * MIB
        play(pool, OTHER, 3)  # no plan comes back twice
        assert pool.plan_stats()["replanned"] == 2


def test_a_capture_waits_for_a_plan_that_changes():
    """The driver is asked for memory in between, which would break the capture."""
    began, marked = threading.Event(), threading.Event()

    def slow() -> None:
        began.set()
        assert not marked.wait(0.05)

    source = Misbehaving("1 GiB")
    source.on("alloc", first=slow)
    with bfc.CachingAllocator(source) as pool:

        def capture() -> None:
            began.wait()
            pool.mark_capture_begin()
            marked.set()

        thread = threading.Thread(target=capture)
        thread.start()
        pool.use_plan(plan_of("caching"), strict=True)
        thread.join()
        with pytest.raises(RuntimeError, match="a stream is being captured"):
            pool.use_plan(None)
        pool.mark_capture_end()
        pool.use_plan(None)


def test_a_child_that_is_forked_while_a_thread_looks_goes_on(monkeypatch: pytest.MonkeyPatch):
    """The thread is not in the child: there the plan stays, and later steps are looked at."""
    may_end = threading.Event()
    find = watching.what_follows
    monkeypatch.setattr(watching, "what_follows", lambda *args: may_end.wait() and find(*args))
    with bfc.CachingAllocator(bfc.HostSubAllocator(), memory_limit="1 GiB") as pool:
        pool.use_plan(plan_of("caching"))
        play(pool, PLANNED, 3)
        play(pool, OTHER, 7)
        child = os.fork()
        if child == 0:  # pytest must not go on here, whatever happens
            code = 1
            try:
                may_end.set()
                play(pool, OTHER, 16 + 4)
                assert pool.plan_stats()["replanned"] == 0
                play(pool, OTHER, 4)
                await_look()
                play(pool, OTHER, 2)
                code = int(pool.plan_stats()["replanned"] != 1)
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        may_end.set()
        await_look()
        play(pool, OTHER, 2)
        assert pool.plan_stats()["replanned"] == 1


def test_what_stands_behind_the_colon_of_a_kind_does_not_count():
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")) as pool:
        with pool.record_plan(iterations=2) as recording:
            for length in range(4):
                play(pool, PLANNED, 1, f"train:{length}")
            assert not keeps_history(pool)  # it has ended by itself
        pool.use_plan(recording.plan(), strict=True)
        play(pool, PLANNED, 3, "train:512")
        assert pool.plan_stats()["agreement"] == 1.0


def test_no_thread_keeps_an_allocator():
    source = bfc.SimulatedSubAllocator("1 GiB")
    pool = bfc.CachingAllocator(source, plan=plan_of("caching"))
    play(pool, OTHER, 8)
    del pool
    assert not source.live_bytes
    await_look()


def test_the_first_departure_is_told():
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), plan=plan_of("caching")) as pool:
        play(pool, PLANNED, 2)
        pool.record_history()
        with pool.step("train"):
            pool.allocate(8 * MIB).free()
            other = pool.allocate(4 * MIB)  # in place of 9
            pool.allocate(11 * MIB).free()
        first = pool.plan_stats()["first_departure"]
        assert first["frames"][0].name == "test_the_first_departure_is_told"
        assert (first["kind"], first["step"], first["request"]) == ("train", 3, 1)
        assert (first["size"], first["place_size"]) == (4 * MIB, 9 * MIB)
        del other
