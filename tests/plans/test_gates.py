"""Plans that do not pay: which are declined, and which are ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from repeated_runs import Block, Run, trace_of

import bfc

MIB = 1 << 20


def steps(*sizes: tuple[int, ...]) -> Run:
    """In each step blocks of these sizes in MiB, all of which live to its end."""
    blocks, borders = [], []
    for asked in sizes:
        borders.append((len(blocks), "train"))
        end = len(blocks) + len(asked)
        blocks += [Block(size * MIB, len(blocks) + i, end) for i, size in enumerate(asked)]
    return trace_of(blocks, borders)


def plan_of(run: Run, **options: str) -> bfc.Plan:
    return bfc.Plan.from_trace(run.trace, marks=run.marks, **options)


@pytest.mark.parametrize("fallback", ["caching", "bfc"])
def test_a_plan_that_saves_nothing_is_declined(fallback: str):
    """One block of 32 MiB a step: the policy alone reserves no more than the plan."""
    plan = plan_of(steps(*[(32,)] * 4), fallback=fallback)
    assert plan.planned == plan.online == plan.span == 32 * MIB
    assert plan.declined is not None
    assert "reserved 32.00 MiB with a plan, 32.00 MiB without one" in plan.declined
    source = bfc.SimulatedSubAllocator("1 GiB")
    with pytest.warns(RuntimeWarning, match="would not have paid.*the policy serves all"):
        pool = (
            bfc.CachingAllocator(source, plan=plan)
            if fallback == "caching"
            else bfc.BFCAllocator(source, allow_growth=True, plan=plan)
        )
    with pool:
        assert pool.plan_stats() == {"state": "declined", "why": plan.declined}
        assert pool.stats().pool_bytes == 0
        with pool.step("train"):
            pool.allocate(32 * MIB).free()
        with pytest.raises(bfc.PlanError, match="would not have paid"):
            pool.use_plan(plan, strict=True)
        assert pool.plan_stats()["state"] == "declined"
        with pytest.raises(bfc.PlanError, match="below 20% of that"):
            pool.use_plan(
                plan_of(steps(*[(9, 9, 9)] * 4), fallback=fallback), strict=True, gate=0.2
            )
        pool.use_plan(plan, strict=True, gate=None)
        assert pool.plan_stats()["state"] == "between steps"
        pool.use_plan(plan, strict=True, gate=1.01)


def test_an_iteration_that_is_left_out_shows_what_a_plan_is_worth():
    """Each step needs other sizes. A plan of all three has seen them, and so takes less than it
    would in a fourth."""
    sizes = [(20, 30, 41), (33, 25, 47), (12, 39, 54), (20, 30, 41)]
    differing = plan_of(steps(*sizes))
    assert differing.planned > differing.span
    alike = plan_of(steps(*[sizes[2]] * 4))
    assert alike.planned == alike.span == sum(sizes[2]) * MIB


def test_without_a_second_iteration_nothing_shows_that_a_run_repeats():
    for run in (steps((20, 30)), Run(steps((20, 30)).trace, [])):
        plan = plan_of(run)
        assert plan.planned == 0
        assert plan.declined is not None
        assert plan.declined.startswith("no iteration comes again")


def test_a_gate_is_above_0():
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")) as pool:
        for wrong in (0, -1, float("nan")):
            with pytest.raises(ValueError, match="gate is a part"):
                pool.use_plan(None, gate=wrong)


def test_a_file_keeps_what_was_tried(tmp_path: Path):
    plan = plan_of(steps(*[(20, 30)] * 3))
    plan.save(tmp_path / "plan.npz")
    assert bfc.Plan.load(tmp_path / "plan.npz").planned == plan.planned > 0
