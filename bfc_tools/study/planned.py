"""What a recorded run would reserve with a plan: a row of the advice."""

from __future__ import annotations

from bfc.errors import PlanError
from bfc.plans.plan import Plan, marked
from bfc.policies._caching import CachingAllocator
from bfc.pytorch.rules import NEWEST
from bfc.trace import Trace
from bfc.trace.beginning import AS_PLACED
from bfc_tools.study.advice import AdviceRow
from bfc_tools.study.candidates import PLANNED
from bfc_tools.study.counting import CountedPages, device_for


def row_of_plan(trace: Trace, device: int) -> AdviceRow | str:
    """The row of a plan on a device of so many bytes, or why there is none. The iterations of the
    run are those that are marked, or that `bfc plan` would find.

    What is reserved is the most of the replays on the device and of those that tried the plan
    (`Plan.planned`), in which no iteration was served by a plan that knew it, if they differ. Cost:
    that of `Plan.from_trace`, and a replay.
    """
    run = marked(trace)
    if not run.meta["marks"]:
        return "no iterations were found that come again (`bfc plan` takes marks)"
    torch = trace.torch or NEWEST
    try:
        plan = Plan.from_trace(run, settings="")
    except PlanError as error:
        return str(error)
    if plan.declined is not None:
        return plan.declined
    source = device_for(trace, lambda: CountedPages(device))()
    with CachingAllocator(source, torch=torch) as allocator:
        try:
            allocator.use_plan(plan, strict=True, gate=None)
        except PlanError:  # the device is too small for it: the policy alone
            pass
        replay = run.replay(allocator, beginning=AS_PLACED)
        calls = sum(source.calls_by_kind.values())
    reserved = max(replay.peak_bytes_reserved, 0 if replay.failed else plan.planned)
    fits = not replay.failed and reserved <= device
    smallest = reserved if fits else plan.planned
    return AdviceRow(
        PLANNED,
        "",
        fits,
        replay.failed,
        reserved,
        calls,
        smallest,
        beginning=replay.beginning,
    )
