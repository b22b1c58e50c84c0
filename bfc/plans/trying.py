"""What a policy reserves for a recording, with and without a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bfc.allocators._allocator import Allocator
from bfc.libraries import np
from bfc.policies._bfc import BFCAllocator
from bfc.policies._caching import CachingAllocator
from bfc.suballocators import SimulatedSubAllocator
from bfc.trace import Trace
from bfc.trace.beginning import AS_PLACED

if TYPE_CHECKING:
    from bfc.plans.plan import Plan


#: In how many other orders the iterations of a run are tried.
ORDERS = 3


@dataclass(frozen=True)
class Fallback:
    """The policy beside a plan: "caching" with its settings and its version of PyTorch, or "bfc",
    which grows. `peak` is the most that is live, in bytes: its device has room for four times that.
    """

    name: str
    settings: str
    torch: str
    peak: int

    def allocator(self) -> Allocator:
        """A new one, on a simulated device."""
        source = SimulatedSubAllocator(4 * self.peak + (1 << 30))
        if self.name == "bfc":
            return BFCAllocator(source, allow_growth=True)
        return CachingAllocator(source, settings=self.settings, torch=self.torch)

    def reserves(
        self,
        trace: Trace,
        plan: Plan | None = None,
        *,
        resumed: bool = False,
        by_itself: bool = False,
    ) -> int:
        """The most that it reserves for a trace, in bytes. With a plan, steps begin where the trace
        has marks, or `by_itself`, and what was live when the recording began is placed anew.
        `resumed`: what the head of the plan allocates is there already, and does not count."""
        with self.allocator() as allocator:
            if plan is None:
                return trace.replay(allocator).peak_bytes_reserved
            if resumed:
                allocator._resume_plan(plan, None)
            else:
                allocator.use_plan(plan, gate=None, steps="auto" if by_itself else None)
            return trace.replay(allocator, beginning=AS_PLACED).peak_bytes_reserved


def in_other_order(trace: Trace, order: Sequence[int]) -> Trace:
    """A trace with marks, with its iterations in another order. What one of them leaves to others
    is freed by those that come as many iterations later now."""
    marks = trace._steps(None)
    begins = np.array([0, *(event for event, _ in marks), len(trace)])
    event = np.arange(len(trace))
    part = np.searchsorted(begins[1:-1], event, "right")  # 0 is what comes before the first one
    within = (event - begins[part]) / np.maximum(np.diff(begins), 1)[part]
    position = np.zeros(len(marks) + 2)
    position[1 + np.array(order)] = np.arange(1, len(order) + 1)
    freed = trace._frees()
    made = np.flatnonzero((trace.op == 0) & (freed >= 0))
    born = np.full(len(trace), -1)
    born[freed[made]] = made
    kept = (trace.op == 0) | (born >= 0)
    moment = position[part] + within
    carried = np.flatnonzero(
        (trace.op != 0) & (born >= 0) & (part != part[born]) & (part[born] > 0)
    )
    behind = part[carried] - part[born[carried]]
    moment[carried] = position[part[born[carried]]] + behind + within[carried]
    kept[carried] &= moment[carried] < len(order) + 1
    at = event[kept][np.argsort(moment[kept], kind="stable")]
    number = np.where(trace.op == 0, event, born)
    kinds = [marks[one][1] for one in order]
    found = np.searchsorted(moment[at], np.arange(1, len(order) + 1))
    meta = {"marks": [[int(one), kind] for one, kind in zip(found, kinds, strict=True)]}
    return Trace(trace.op[at], number[at], trace.size[at], trace.stream[at], meta=meta)


@dataclass(frozen=True)
class Trial:
    """What a policy reserves for a run with plans, the most of all of them."""

    planned: int  # bytes
    worst: float  # divided by what it does alone, in the least good of some orders of iterations
    unmarked: float  # the same, with steps that begin by themselves

    @classmethod
    def of(cls, run: Trace, plans: Sequence[Plan], policy: Fallback) -> Trial:
        """That of a run with marks. One whose iterations are alike needs no other order."""
        runs, count = [run], len(run._steps(None))
        dice = np.random.default_rng(0)
        for _ in range(ORDERS if len(plans) > 1 else 0):
            runs.append(in_other_order(run, [0, *(1 + dice.permutation(count - 1)).tolist()]))
        alone = [policy.reserves(each) for each in runs]
        taken = [max(policy.reserves(each, plan) for plan in plans) for each in runs]
        worst = max(there / online for there, online in zip(taken, alone, strict=True))
        unmarked = run._with_meta({})
        by_itself = max(policy.reserves(unmarked, plan, by_itself=True) for plan in plans)
        return cls(taken[0], worst, max(worst, by_itself / alone[0]))
