"""Plans beside the policy alone, on runs of kinds that no rule was made for."""

from __future__ import annotations

import ctypes
import os
import random
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import bfc
from bench.lengths import Run
from bench.plans import beside_alone, first_iterations, without_marks
from bench.repeated import caching, growing_bfc
from bench.varied import heavy_tailed, mixed, recursive, sampled, shrinking
from bfc.plans.trying import in_other_order

MIB = 1 << 20
MAKES = {"caching": caching, "bfc": growing_bfc}
SEED = int(os.environ.get("BFC_SEED", "1"))


RUNS: list[Callable[[int], bfc.Trace]] = [heavy_tailed, shrinking, sampled]
#: Those of which the odd plan takes more.
WILD: list[Callable[[int], bfc.Trace]] = [*RUNS, mixed, recursive]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", MAKES)
@pytest.mark.parametrize("made", RUNS)
@pytest.mark.parametrize("seed", [1, 3])
def test_a_plan_takes_no_more_than_the_policy_alone(
    made: Callable[[int], bfc.Trace], policy: str, seed: int
):
    """But for 3 %: with steps that are marked, and with those that begin by themselves, made of the
    first iterations of a run of which most come later."""
    for part in parts_of_the_policy_alone(made, policy, seed):
        assert part <= 1.03, (made.__name__, seed)


def parts_of_the_policy_alone(
    made: Callable[[int], bfc.Trace], policy: str, seed: int
) -> Iterator[float]:
    """What a plan of the first iterations of a run reserves for the run, and for its iterations in
    another order, divided by what the policy does alone."""
    trace, dice = made(seed), random.Random(seed)
    plan = bfc.Plan.from_trace(first_iterations(trace, dice.choice([3, 4, 6, 10])), fallback=policy)
    later = list(range(1, len(trace.meta["marks"])))
    dice.shuffle(later)
    for run in (trace, in_other_order(trace, [0, *later])):
        with MAKES[policy](bfc.SimulatedSubAllocator("1 TiB")) as pool:
            alone = run.replay(pool).peak_bytes_reserved
        for steps, played in ((None, run), ("auto", without_marks(run))):
            source = bfc.SimulatedSubAllocator("1 TiB")
            with MAKES[policy](source) as pool, warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # it may be declined, or end
                pool.use_plan(plan, steps=steps)
                yield played.replay(pool).peak_bytes_reserved / alone


@pytest.mark.parametrize("policy", MAKES)
def test_a_program_of_shorter_lengths_takes_no_more_than_the_policy_alone(policy: str):
    """It took thirty times as much: what the plan had recorded for its longest."""
    for what, way, part, _ in beside_alone("heavy tails", 5152, policy, in_pages=False):
        assert part <= 1.03, (what, way)


def check_plans_of_random_runs(runs: int, seed: int) -> None:
    """Hardly any takes more than the policy alone, and those that do not half as much again."""
    print(f"repeat with BFC_SEED={seed} pytest {__file__}")
    dice, parts = random.Random(seed), list[float]()
    for _ in range(runs):
        made, policy, one = dice.choice(WILD), dice.choice(list(MAKES)), dice.randrange(1 << 20)
        found = list(parts_of_the_policy_alone(made, policy, one))
        parts += found
        assert max(found) < 1.5, (made.__name__, policy, one, found)
    above = sum(part > 1.03 for part in parts)
    assert above <= 2 + len(parts) // 20, (above, len(parts))


def test_plans_of_random_runs_take_hardly_ever_more_than_the_policy_alone():
    check_plans_of_random_runs(6, SEED)


@pytest.mark.long
def test_plans_of_many_random_runs_take_hardly_ever_more_than_the_policy_alone():
    check_plans_of_random_runs(150, SEED)


SIZES = (8, 9, 11)


def small_plan(policy: str, weights: int = 0) -> bfc.Plan:
    """Of iterations in which one block lives at a time; the policies need more than the largest.
    So many weights of 12 MiB are their head."""
    run = Run(0)
    for _ in range(weights):
        run.ask(12 * MIB)
    for _ in range(4):
        run.begin()
        for size in SIZES:
            run.free(run.ask(size * MIB))
    return bfc.Plan.from_trace(run.trace(), fallback=policy)


@pytest.mark.parametrize("policy", MAKES)
def test_what_a_plan_that_has_ended_leaves_is_used_before_more_is_asked_for(policy: str):
    with MAKES[policy](bfc.HostSubAllocator()) as pool:
        pool.use_plan(small_plan(policy))
        kept = pool.allocate(2 * MIB)  # a guest in the region, which stays for it
        ctypes.memset(kept.ptr, 77, kept.nbytes)
        pool._end_plan("for the test")
        assert pool.plan_stats()["state"] == "switched off"
        other = pool.allocate(5 * MIB)
        ctypes.memset(other.ptr, 88, other.nbytes)
        assert pool.stats().pool_bytes == max(SIZES) * MIB
        assert pool.check() is None
        assert ctypes.string_at(kept.ptr, kept.nbytes) == bytes([77]) * kept.nbytes
        pool.allocate(20 * MIB).free()  # too large for the gap
        assert ctypes.string_at(other.ptr, other.nbytes) == bytes([88]) * other.nbytes
        for block in (kept, other):
            block.free()
        pool.allocate(24 * MIB).free()
        assert pool.stats().pool_bytes < (20 + 24 + 11) * MIB
        pool.release_free_regions()
        assert pool.stats().pool_bytes == 0
        assert pool.check() is None


@pytest.mark.parametrize("policy", MAKES)
def test_nothing_is_held_beside_what_the_policy_alone_needs_after_a_plan(policy: str):
    """Alone it would hold all of these regions, none of which serves the next request."""
    plan = small_plan(policy)
    with MAKES[policy](bfc.SimulatedSubAllocator("1 GiB")) as pool:
        pool.use_plan(plan)
        pool._end_plan("for the test")
        for size in range(12, 90, 14):
            pool.allocate(size * MIB).free()
            assert pool.stats().pool_bytes <= max(plan.online, 1.02 * size * MIB)
        pool.use_plan(None)  # from now on nothing bounds that
        pool.allocate(100 * MIB).free()
        assert pool.stats().pool_bytes > 110 * MIB


@pytest.mark.parametrize("kind", ["train", "evaluate"])
@pytest.mark.parametrize("policy", MAKES)
def test_an_idle_region_goes_back_in_a_step_that_needs_other_memory(policy: str, kind: str):
    with MAKES[policy](bfc.SimulatedSubAllocator("1 GiB")) as pool:
        pool.use_plan(small_plan(policy))
        with pool.step(kind):
            block = pool.allocate(64 * MIB)
        assert pool.stats().peak_pool_bytes == 64 * MIB
        block.free()
        with pool.step("train"):  # as planned
            for size in SIZES:
                pool.allocate(size * MIB).free()
        assert pool.plan_stats()["hits"] >= len(SIZES)
        assert pool.check() is None


def test_a_child_is_bound_by_a_plan_that_has_ended():
    plan = small_plan("caching")
    with caching(bfc.SimulatedSubAllocator("1 GiB")) as pool:
        pool.use_plan(plan)
        pool._end_plan("for the test")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for size in range(12, 60, 13):
                    pool.allocate(size * MIB).free()
                code = int(pool.stats().pool_bytes > max(plan.online, 60 * MIB))
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0


def test_threads_share_what_a_plan_has_left():
    with caching(bfc.HostSubAllocator()) as pool:
        pool.use_plan(small_plan("caching"))
        kept = pool.allocate(2 * MIB)
        pool._end_plan("for the test")

        def work(number: int) -> bool:
            for _ in range(20):
                block = pool.allocate((2 + number) * MIB)
                ctypes.memset(block.ptr, number, block.nbytes)
                whole = ctypes.string_at(block.ptr, block.nbytes)
                block.free()
                if whole.count(number) != len(whole):
                    return False
            return True

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(work, range(1, 5)))
        kept.free()
        assert pool.check() is None


def test_iterations_in_another_order_are_the_same_iterations():
    trace = sampled(2)
    order = list(range(len(trace.meta["marks"])))
    same = in_other_order(trace, order)
    assert (same.op == trace.op).all()
    assert (same.size == trace.size).all()
    assert same.meta["marks"] == trace.meta["marks"]
    turned = in_other_order(trace, [0, *reversed(order[1:])])
    assert sorted(turned.size) == sorted(trace.size)
    begins = [event for event, _ in turned.meta["marks"]]
    old = [event for event, _ in trace.meta["marks"]]
    count = old[2] - old[1]
    assert (turned.size[begins[-1] : begins[-1] + count] == trace.size[old[1] : old[2]]).all()


def test_what_would_not_pay_by_itself_is_declined_there():
    """No request of these steps tells where one begins: with marks the plan pays."""
    trace = sampled(2)
    plan = bfc.Plan.from_trace(first_iterations(trace, 6), fallback="bfc")
    assert plan.unmarked >= plan.worst >= plan.planned * 0.999
    gate = plan.worst / plan.online + 0.001
    if plan.unmarked > plan.worst:
        assert plan._declined(gate) is None
        why = plan._declined(gate, by_itself=True)
        assert why is not None
        assert "steps that began by themselves" in why


@pytest.mark.parametrize("policy", MAKES)
def test_a_region_is_taken_when_the_first_request_for_it_comes(policy: str):
    plan = small_plan(policy, weights=2)
    with MAKES[policy](bfc.SimulatedSubAllocator("1 GiB")) as pool:
        pool.use_plan(plan)
        assert pool.stats().pool_bytes == 0
        weights = [pool.allocate(12 * MIB) for _ in range(2)]
        assert pool.stats().pool_bytes == plan.base == 24 * MIB
        for _ in range(2):
            with pool.step("train"):
                for size in SIZES:
                    pool.allocate(size * MIB).free()
        assert pool.plan_stats()["agreement"] == 1.0
        assert pool.stats().peak_pool_bytes == plan.span
        assert pool.check() is None
        del weights


@pytest.mark.parametrize("steps", [None, "auto"])
@pytest.mark.parametrize("policy", MAKES)
def test_another_program_has_its_memory_for_itself(policy: str, steps: str | None):
    """It asks for other weights, and so for no place of the plan before its first step: the policy
    takes at each request what it takes without a plan, and gives no more back."""
    reserved: list[list[int]] = []
    for plan in (None, small_plan(policy, weights=2)):
        taken = []
        with MAKES[policy](bfc.SimulatedSubAllocator("1 GiB")) as pool:
            pool.use_plan(plan, steps=steps)
            live = []
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                for mebibytes in (3, 3, 70, 3):
                    live.append(pool.allocate(mebibytes * MIB))
                    taken.append(pool.stats().pool_bytes)
                live.pop().free()
                for _ in range(3):
                    with pool.step("train"):
                        for size in (SIZES[0], 37, *SIZES[1:]):
                            block = pool.allocate(size * MIB)
                            taken.append(pool.stats().pool_bytes)
                            block.free()
            reserved.append(taken)
            assert len(found) == (plan is not None)
            assert pool.check() is None
            del live
    assert "the plan is for another program" in str(found[0].message)
    assert reserved[1] == reserved[0]


@pytest.mark.parametrize("policy", MAKES)
def test_no_step_begins_by_itself_before_a_head(policy: str):
    """A program's first weight may look like the first request of the plan's iterations."""
    with MAKES[policy](bfc.SimulatedSubAllocator("1 GiB")) as pool:
        pool.use_plan(small_plan(policy, weights=2), steps="auto")
        weight = pool.allocate(SIZES[0] * MIB)
        assert pool.plan_stats()["state"] == "between steps"
        alone = pool.stats().pool_bytes
        pool.use_plan(None)
        assert pool.stats().pool_bytes == alone
        assert pool.check() is None
        del weight


@pytest.mark.parametrize("between", ["a guest", "a capture"])
@pytest.mark.parametrize("policy", MAKES)
def test_a_program_is_the_plans_whatever_comes_between(policy: str, between: str):
    """A thread's block lies in a place of the head, or the head has none in a capture."""
    with MAKES[policy](bfc.SimulatedSubAllocator("1 GiB")) as pool:
        pool.use_plan(small_plan(policy, weights=2))
        live = [pool.allocate(12 * MIB)]
        if between == "a guest":
            live.append(pool.allocate(9 * MIB))
        else:
            pool.mark_capture_begin()
        live.append(pool.allocate(12 * MIB))
        if between == "a capture":
            pool.mark_capture_end()
        with pool.step("train"):
            for size in SIZES:
                pool.allocate(size * MIB).free()
        assert pool.plan_stats()["state"] == "between steps"
        assert pool.check() is None
        del live


@pytest.mark.parametrize("policy", MAKES)
def test_a_plan_whose_region_is_refused_ends(policy: str):
    source = bfc.SimulatedSubAllocator("64 MiB")
    with MAKES[policy](source) as pool:
        pool.use_plan(small_plan(policy, weights=2), gate=2)
        other, _ = source.alloc(256, 44 * MIB)
        with pytest.warns(RuntimeWarning, match="has no room for them: the policy serves all"):
            weight = pool.allocate(12 * MIB)
        assert pool.plan_stats()["state"] == "switched off"
        assert pool.check() is None
        source.free(other, 44 * MIB)
        del weight
