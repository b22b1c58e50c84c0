"""What a policy reserves for a recording, with and without a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bfc.allocators._allocator import Allocator
from bfc.policies._bfc import BFCAllocator
from bfc.policies._caching import CachingAllocator
from bfc.suballocators import SimulatedSubAllocator
from bfc.trace.beginning import AS_PLACED

if TYPE_CHECKING:
    from bfc.plans.plan import Plan
    from bfc.trace import Trace


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

    def reserves(self, trace: Trace, plan: Plan | None = None, *, resumed: bool = False) -> int:
        """The most that it reserves for a trace, in bytes. With a plan, steps begin where the trace
        has marks, and what was live when the recording began is placed anew. `resumed`: what the
        head of the plan allocates is there already, and does not count."""
        with self.allocator() as allocator:
            if plan is None:
                return trace.replay(allocator).peak_bytes_reserved
            if resumed:
                allocator._resume_plan(plan, None)
            else:
                allocator.use_plan(plan, gate=None)
            return trace.replay(allocator, beginning=AS_PLACED).peak_bytes_reserved
