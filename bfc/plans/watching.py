"""Whether a plan in use still pays, and what comes after it."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bfc.allocators import _plans
from bfc.allocators._allocator import Allocator
from bfc.allocators._plan_use import body_is_idle, home_stream, keeps_history, last_step
from bfc.plans.plan import GATE, Plan
from bfc.plans.recording import marks_reached, policy_of, records_of, trace_of
from bfc.plans.trying import Fallback
from bfc.snapshots.columns import RECORD
from bfc.units import format_bytes

if TYPE_CHECKING:
    from bfc.trace import Trace

#: A step agrees with the plan if this part of its requests got a place.
AGREES = 0.95
#: After so many steps in a row that do not, or that need more beside the plan than it saves, the
#: next steps are looked at.
DIFFERING, COSTLY = 3, 2
#: How many steps of a kind are looked at; one more is recorded.
ITERATIONS = 3
#: The most allocations and frees of them: 64 bytes each.
MOST_ENTRIES = 1 << 20
#: An answer is dropped if so many steps in a row have followed the present plan meanwhile. If
#: something lived in the old region when so many steps began, a new plan has to pay beside it.
FOLLOWING, BUSY = 3, 16
#: If so many steps in a row do not follow a new plan before it has been followed, the program has
#: changed back, and the earlier plan serves again.
RETURNING = 2
#: How many steps pass before the next look, if nothing changes. It doubles each time.
FIRST_REST, LONGEST_REST = 16, 4096


class Watch:
    """Looks at the steps of an allocator. Where they do not follow the plan, the next ones are
    recorded. A thread then replays them: with the plan, with a new plan, and without one. What
    reserves least serves the steps that follow."""

    def __init__(self, plan: Plan, gate: float) -> None:
        self.replanned = 0  # how often a new plan came into use
        self._plan, self._gate = plan, gate
        self._differing = self._costly = self._following = self._busy = 0
        self._was_followed = False
        self._earlier: Plan | None = None  # until the present plan has been followed
        self._rest, self._next_rest = 0, FIRST_REST
        self._marks: list[tuple[int, str]] | None = None  # while steps are recorded
        self._look: Look | None = None
        self.is_overdrawn = False  # there was more than the policy alone needs, as far as is known
        self.overdrawn = 0  # how often

    def step_ended(self, allocator: Allocator) -> None:
        """Notes how a step has followed the plan."""
        agreement = last_step(allocator)
        is_costly, self.is_overdrawn = self.is_overdrawn, False
        self._rest = max(self._rest - 1, 0)
        if agreement is None:
            return
        self._differing = self._differing + 1 if agreement < AGREES else 0
        self._costly = self._costly + 1 if is_costly else 0
        self._following = 0 if self._differing or self._costly else self._following + 1
        if self._following >= FOLLOWING:
            self._was_followed = True
            self._earlier = None

    def step_begins(self, allocator: Allocator, kind: str) -> None:
        """Begins or ends a recording, or changes the plan."""
        if self._look is not None:
            if not self._look.is_alive():
                self._follow(allocator, self._look.answer)
        elif self._marks is not None:
            self._record(allocator, kind)
        elif self._has_changed_back():
            self._return(allocator)
        elif self._is_due() and not keeps_history(allocator):
            allocator.record_history(context=None, max_entries=MOST_ENTRIES)
            self._marks = [(0, kind)]

    def _is_due(self) -> bool:
        return not self._rest and (self._differing >= DIFFERING or self._costly >= COSTLY)

    def _has_changed_back(self) -> bool:
        return self._earlier is not None and self._differing >= RETURNING

    def _return(self, allocator: Allocator) -> None:
        """Serves the plan that was followed before, once nothing lives in the region."""
        if self._earlier is not None and body_is_idle(allocator):
            earlier, self._earlier = self._earlier, None
            self._serve(allocator, earlier)

    def _serve(self, allocator: Allocator, plan: Plan) -> None:
        self._plan = plan
        self.replanned += 1
        self._differing = self._costly = self._following = 0
        self._was_followed = False
        allocator._resume_plan(plan, self)

    def _record(self, allocator: Allocator, kind: str) -> None:
        assert self._marks is not None
        records = records_of(allocator)
        self._marks.append((len(records) // RECORD.size, kind))
        if len(records) // RECORD.size >= MOST_ENTRIES:  # the oldest are lost
            self.stop(allocator)
        elif marks_reached(self._marks, ITERATIONS):
            marks, next_rest = self._marks, self._next_rest
            self.stop(allocator)
            self._next_rest = next_rest  # the rest comes after the answer
            policy = policy_of(allocator, allocator.stats().peak_pool_bytes)
            home = home_stream(allocator)
            self._look = Look(records, marks, policy, home, self._plan, self._gate)
            try:
                self._look.start()
            except (RuntimeError, MemoryError):  # there is no thread any more
                self._look = None

    def wait(self) -> None:
        """Waits until it is known what comes after the steps that were recorded."""
        if self._look is not None and self._look.is_alive():
            self._look.join()

    def lost(self) -> None:
        """Another history has begun, or will: nothing is recorded any more."""
        if self._marks is not None:
            self._marks = None
            self._put_off()

    def stop(self, allocator: Allocator) -> None:
        """Ends the history, if steps are recorded."""
        if self._marks is not None:
            self.lost()
            if not allocator.closed:
                allocator.record_history(None)

    def _put_off(self) -> None:
        self._differing = self._costly = 0
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)

    def _follow(self, allocator: Allocator, answer: Answer) -> None:
        """Serves a new plan, or none, or goes on."""
        if self._following >= FOLLOWING:
            answer = Answer()  # it was for other steps
        if answer.plan is not None and not body_is_idle(allocator):
            self._busy += 1
            if self._busy < BUSY:
                return  # both bodies would be held: at another step
            if not answer.pays_beside:
                answer = Answer()
        self._look = None
        self._busy = 0
        self._put_off()
        if answer.plan is not None:
            self._earlier = self._plan if self._was_followed else None
            self._serve(allocator, answer.plan)
        elif answer.why is not None:
            allocator._end_plan(answer.why)
            warnings.warn(
                f"{answer.why}: the policy serves all requests", RuntimeWarning, stacklevel=3
            )


@dataclass(frozen=True)
class Answer:
    """What should serve the steps that follow: the present plan, if there is neither a plan nor a
    reason here."""

    plan: Plan | None = None  # a new one
    pays_beside: bool = False  # even while the region of the present plan's bodies is held, too
    why: str | None = None  # why no plan should be served


class Look(threading.Thread):
    """What a thread makes of recorded steps. It holds no allocator."""

    def __init__(
        self,
        records: bytes,
        marks: list[tuple[int, str]],
        policy: Fallback,
        home: int,
        plan: Plan,
        gate: float,
    ) -> None:
        super().__init__(name="bfc plan", daemon=True)
        self.answer = Answer()
        self._work = records, marks, policy, home, plan, gate

    def run(self) -> None:
        records, marks, policy, home, plan, gate = self._work
        del self._work
        try:
            trace = trace_of(records, marks, policy, home)
            self.answer = what_follows(trace, policy, plan, gate)
        except Exception:  # no memory, or steps that cannot be planned: the plan stays
            self.answer = Answer()


def what_follows(trace: Trace, policy: Fallback, plan: Plan, gate: float) -> Answer:
    """What should serve the steps that follow those of a trace, which has marks and at least two
    steps of a kind. A new plan has to reserve 5 % less than the present one, and has to pass the
    `gate` of `Allocator.use_plan`."""
    now = policy.reserves(trace, plan, resumed=True)
    new = Plan.from_trace(trace, fallback=policy.name, settings=policy.settings)
    if new._declined(gate) is None and new.planned < GATE * now:
        return Answer(new, new.planned + plan.body < GATE * now)
    alone = new.online
    if plan._varies:  # these steps may be short ones: the plan has room for the longest
        alone = max(alone, plan.online - plan.base)
    if now <= alone:
        return Answer()
    why = (
        f"the plan does not pay any more: for the last steps {policy.name} reserved "
        f"{format_bytes(now)} with it, and would have {format_bytes(new.online)} without one"
    )
    return Answer(why=why)


def _made(plan: Any, gate: float) -> Watch:
    return Watch(plan, gate)


_plans.set_watch(_made)
