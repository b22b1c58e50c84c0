"""A slow, obvious model of how a plan is served: it compares all live blocks, and looks at every
slot."""

from __future__ import annotations

from dataclasses import dataclass, field

import bfc
from bfc.plans.parts import BODY, FOREVER, HEAD, LATE, Part

MIB = 1 << 20


@dataclass
class Requests:
    """What one part of a run asks for, in order."""

    size: list[int] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    once: list[bool] = field(default_factory=list)  # whether a block outlives all iterations


class Matcher:
    """Which of a part's requests one is: the matcher's rules, in their order."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.served = [False] * len(sizes)
        self.next = 0
        self.skipped: int | None = None
        self.previous = 0
        self.misses = 0

    def expected(self) -> int:
        while self.next < len(self.sizes) and self.served[self.next]:
            self.next += 1
        return self.next

    def by_size(self, size: int) -> int | None:
        at = self.expected()
        if at < len(self.sizes) and self.sizes[at] == size:
            return at
        skipped = self.skipped
        if skipped is not None and self.sizes[skipped] == size and not self.served[skipped]:
            return skipped
        far = min(self.misses, 8)
        ranked = []
        for slot, its in enumerate(self.sizes):
            away = slot - at
            agrees = slot > 0 and self.sizes[slot - 1] == self.previous
            near = -16 <= away <= 4
            reached = -64 * far <= away <= 256 * far if far else near
            if its == size and not self.served[slot] and reached and (agrees or near):
                ranked.append((0 if agrees else 64, slot, away))
        if not ranked:
            return None
        rank = {s: n + (-2 * away if away < 0 else 2 * away + 1) for n, s, away in ranked}
        return min(rank, key=lambda slot: (rank[slot], slot))

    def serve(self, slot: int) -> int:
        self.served[slot] = True
        self.next = slot + 1
        self.misses = 0
        return slot

    def match(self, size: int, waste: int | None = None) -> int | None:
        """`waste`: a smaller request takes a slot only if less than this is left over."""
        slot = self.by_size(size)
        self.skipped = None
        self.previous = size
        if slot is not None:
            return self.serve(slot)
        at = self.next
        fits = at < len(self.sizes) and size <= self.sizes[at] <= 2 * size
        if fits and (waste is None or self.sizes[at] - size < waste):
            return self.serve(at)
        self.misses += 1
        if at < len(self.sizes):
            self.skipped = at
            self.next += 1
        return None


class SlowPlan:
    """A plan of one stream, and what lives in its span. Its two regions are there from the
    beginning, or else each comes when it is needed first."""

    def __init__(self, plan: bfc.Plan, *, at_once: bool = True) -> None:
        self.plan = plan
        self.regions = [(0, plan.base), (plan.base, plan.span)]
        self.present = list(self.regions) if at_once else []
        self.live: dict[int, int] = {}  # offset: end
        self.places: dict[int, tuple[Requests, int]] = {}  # of those that are no guests: for what
        self.seen: set[str] = set()
        self.kind: str | None = None  # of the step
        self.requests: Requests | None = None
        self.matcher: Matcher | None = None
        #: The first steps of all kinds, and the head (""): the requests, and those of them whose
        #: block was freed, although it should outlive all iterations.
        self.first: dict[str, Requests] = {}
        self.ended: dict[str, set[int]] = {}
        self.first[""] = self._of(next(part for part in plan.parts if part.role == HEAD))
        for body in (part for part in plan.parts if part.role == BODY):
            late = [p for p in plan.parts if p.role == LATE and p.kind == body.kind]
            self.first[body.kind] = self._of(body, *late)
        self.head = Matcher(self.first[""].size)
        self.requests, self.matcher = self.first[""], self.head

    def _of(self, part: Part, late: Part | None = None) -> Requests:
        made = Requests()
        extra = list(range(len(late))) if late is not None else []
        shift = []  # how many requests come before each of the body's
        for slot in range(len(part) + 1):
            while late is not None and extra and late.end[extra[0]] <= slot:
                number = extra.pop(0)
                made.size.append(int(late.size[number]))
                made.offset.append(int(late.offset[number]))
                made.end.append(1 << 30)
                made.once.append(True)
            shift.append(len(made.size))
            if slot < len(part):
                made.size.append(int(part.size[slot]))
                made.offset.append(int(part.offset[slot]))
                made.end.append(-1 - int(part.end[slot]))
                made.once.append(int(part.over[slot]) == FOREVER)
        made.end = [
            min(shift[-1 - end] if end < 0 else len(made.size), len(made.size)) for end in made.end
        ]
        return made

    def begin(self, requests: Requests | None) -> None:
        self.requests = requests
        self.matcher = Matcher(requests.size) if requests is not None else None

    def step(self, kind: str | None) -> None:
        parts = self.plan.parts
        self.kind = kind
        body = next((p for p in parts if p.role == BODY and p.kind == kind), None)
        if body is None:
            self.begin(None)
            return
        assert kind is not None
        if kind in self.seen and kind not in self.ended:
            self.begin(self._of(body))
            return
        self.seen.add(kind)
        self.ended.pop(kind, None)
        self.begin(self.first[kind])
        assert self.matcher is not None
        for slot, once in enumerate(self.first[kind].once):
            self.matcher.served[slot] = once and self.is_taken(self.first[kind], slot)

    def is_taken(self, requests: Requests, slot: int) -> bool:
        low, high = requests.offset[slot], requests.offset[slot] + requests.size[slot]
        return any(at < high and low < self.live[at] for at in self.places)

    def resume(self, size: int) -> None:
        """Outside of steps: what was freed of the head is asked for again, in its order."""
        if self.kind is not None or "" not in self.ended:
            return
        once = self.first[""].once
        begin, end = min(self.ended[""]), max(self.ended[""]) + 1
        wanted = {begin}  # what tells that a model was not finished, and is made anew
        while begin > 0 and min(self.ended[""]) - begin < 16 and not once[begin - 1]:
            begin -= 1
            wanted.add(begin)
        while end < len(once) and end - max(self.ended[""]) <= 16 and not once[end]:
            end += 1
        if self.live and self.requests is not None and self.head.expected() < len(once):
            known = self.head.by_size(size) is not None
            if known or all(self.head.sizes[slot] != size for slot in wanted):
                return
        if not self.live:
            begin, end = 0, len(once)
        del self.ended[""]
        for slot in range(begin, end):
            self.head.served[slot] = self.is_taken(self.first[""], slot)
        self.head.next = min(self.head.next, begin)
        self.head.skipped, self.head.previous, self.head.misses = None, 0, 0
        self.requests, self.matcher = self.first[""], self.head

    def absent_in_step(self, kind: str) -> tuple[int, int] | None:
        """The region that comes when a step of a kind begins: that of the bodies."""
        is_known = any(part.role == BODY and part.kind == kind for part in self.plan.parts)
        absent = is_known and self.plan.body and self.regions[1] not in self.present
        return self.regions[1] if absent else None

    def absent_for(self, size: int) -> tuple[int, int] | None:
        """The region that comes for a request, since the place that it is looked up for lies
        there."""
        slot = None if self.matcher is None else self.matcher.by_size(size)
        if slot is None or self.requests is None:
            return None
        region = self.regions[self.requests.offset[slot] >= self.plan.base]
        return None if region in self.present else region

    def is_expected(self, size: int) -> bool:
        """Whether a request gets the place that its size is looked up for."""
        if self.matcher is None or self.requests is None:
            return False
        slot = self.matcher.by_size(size)
        if slot is None:
            return False
        at = self.requests.offset[slot]
        return self.is_free(at, at + self.requests.size[slot])

    def is_free(self, begin: int, end: int) -> bool:
        is_there = any(low <= begin and end <= high for low, high in self.present)
        return is_there and all(end <= low or high <= begin for low, high in self.live.items())

    def allocate(self, size: int, large: bool) -> int | None:
        """The offset of a request; None: it is served beside the plan."""
        if not self.is_expected(size):
            self.resume(size)
        horizon, spared, found = 0, None, None
        if self.matcher is not None and self.requests is not None:
            before = self.matcher.expected()
            found = self.matcher.match(size)
            if found is not None:
                at = self.requests.offset[found]
                if self.is_free(at, at + self.requests.size[found]):
                    self.live[at] = at + self.requests.size[found]
                    self.places[at] = self.requests, found
                    return at
                horizon = self.requests.end[found]
            elif before < len(self.requests.size):
                spared, horizon = before, self.requests.end[before]
            else:
                horizon = len(self.requests.size)
        if not large:
            return None
        wanted = dict(self.live)
        room = self._gap(list(wanted.items()) + self._needed(horizon, spared), size)
        if room is None:
            room = self._gap(list(wanted.items()), size)
        if room is not None:
            self.live[room] = room + size
        return room

    def place_of(self, size: int, waste: int) -> tuple[int, int] | None:
        """Offset and size of the place that a request is for, whatever lives there."""
        found = None
        if self.matcher is not None and self.requests is not None:
            found = self.matcher.match(size, waste)
        if found is None or self.requests is None:
            return None
        return self.requests.offset[found], self.requests.size[found]

    def _needed(self, horizon: int, spared: int | None) -> list[tuple[int, int]]:
        if self.requests is None or self.matcher is None:
            return []
        first = max(0, self.matcher.next - 512)
        return [
            (offset, offset + size)
            for slot, (size, offset) in enumerate(
                zip(self.requests.size, self.requests.offset, strict=True)
            )
            if first <= slot < min(horizon, first + 16384)
            and slot != spared
            and not self.matcher.served[slot]
        ]

    def _gap(self, used: list[tuple[int, int]], size: int) -> int | None:
        """The smallest gap, and of those of one size the lowest. None lies across the border."""
        best = None
        for low, high in sorted(self.present):
            at = low
            for begin, end in [*sorted(used), (high, high)]:
                if begin < low or begin > high or (begin == high and end > high):
                    continue
                if begin - at >= size and (best is None or begin - at < best[0]):
                    best = begin - at, at
                at = max(at, end)
        return None if best is None else best[1]

    def free(self, offset: int) -> None:
        del self.live[offset]
        requests, slot = self.places.pop(offset, (None, 0))
        for kind, first in self.first.items():
            if first is requests and first.once[slot]:
                self.ended.setdefault(kind, set()).add(slot)
