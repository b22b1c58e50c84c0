"""Where the iterations of a recorded run begin, found from the order of births and deaths."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from bfc.errors import TraceError
from bfc.libraries import NDArray, np
from bfc.trace.loops import Loop, loops
from bfc.trace.structure import WINDOWS, Index, Lives, Repeats, windows

if TYPE_CHECKING:
    from bfc.trace.structure import Head, Numbers, Signs
    from bfc.trace.trace import Trace

#: What an iteration is called, and what lies between iterations, such as an evaluation.
TRAIN, OTHER = "train", "other"
#: An iteration has at least so many requests.
LEAST = 8
#: So many different windows for each request of a period come once a period; less is enough where
#: they come three times or more. The layers of a network have far more, at their own distance.
SHARE, SHARE_OF_THREE = 0.04, 0.015
#: An iteration holds so many blocks at once that it frees itself (activations), whatever its
#: length; or so many, if they are such a part of it or if these are not the layers of a network.
HOLDS, HOLDS_PART, HOLDS_LEAST = 16, 0.23, 8
#: At most this part of what an iteration makes lives on when the next one has ended.
OUTLIVES = 0.02
#: Iterations make up this part of the run.
COVERED = 0.4
#: This part of the iterations has so much of a neighbour, in windows of so few requests that one
#: which is left out spoils little; and so nearly its length. The first one differs, and the last
#: one may lack its end.
OFTEN, ALIKE, AS_LONG, FEW = 0.6, 0.6, 0.06, 3
#: What iterations hold is the median of so many.
ENOUGH = 128
#: This part of its first windows makes the beginning of an iteration known.
KNOWN = 0.4
#: A boundary is where the least is held, within this part of a period, and near ties are ties.
FINE, TIE = 14, 0.01
#: What lies between iterations is one of its own if it has this part of the requests of one.
BETWEEN = 0.05


@dataclass(frozen=True)
class Iteration:
    """One iteration of a run.

    Attributes
    ----------
    begin, end : int
        Its first event, and the event behind its last one.
    kind : str
        "train" for what repeats most, "other" for what lies in between, such as an evaluation; or
        the kind that a mark of the recording names.
    agreement : float
        Which part of it, from 0 to 1, is found in another iteration of its kind.
    complete : bool
        Whether the recording has its end.
    """

    begin: int
    end: int
    kind: str
    agreement: float
    complete: bool


@dataclass(frozen=True)
class Iterations(Sequence[Iteration]):
    """The iterations of a run, as `Trace.iterations` finds them.

    Attributes
    ----------
    found : tuple of Iteration
        In the order of the run. Empty if there are none.
    source : str
        What they were found from: "marks" of the recording, "ranges" that the program named, such
        as those of `torch.profiler.record_function`, "stacks", whose lines show the loops of the
        program, or "structure", the order of births and deaths.
    reason : str
        Why there are none; "" if there are some.
    """

    found: tuple[Iteration, ...]
    source: str
    reason: str = ""

    @overload
    def __getitem__(self, index: int) -> Iteration: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Iteration]: ...
    def __getitem__(self, index: int | slice) -> Iteration | Sequence[Iteration]:
        return self.found[index]

    def __len__(self) -> int:
        return len(self.found)

    @property
    def marks(self) -> list[tuple[int, str]]:
        """Where each begins, and its kind, as `Plan.from_trace` takes them.

        What follows the last iteration has the kind "", of which nothing is planned.
        """
        marks = [(one.begin, one.kind) for one in self.found]
        if self.found and self.found[-1].complete:
            marks.append((self.found[-1].end, ""))
        return marks

    def __str__(self) -> str:
        if not self.found:
            return f"no iterations: {self.reason}"
        lines = [f"{'kind':10}{'iterations':>12}{'events each':>18}{'alike':>8}"]
        for kind in dict.fromkeys(one.kind for one in self.found):
            chosen = [one for one in self.found if one.kind == kind]
            lengths = sorted(one.end - one.begin for one in chosen)
            spread = f"{lengths[0]}-{lengths[-1]}" if lengths[0] < lengths[-1] else f"{lengths[0]}"
            alike = float(np.median([one.agreement for one in chosen]))
            lines.append(f"{kind:10}{len(chosen):12}{spread:>18}{alike:8.0%}")
        first, last = self.found[0], self.found[-1]
        lines.append(f"from event {first.begin} to {last.end}, found from their {self.source}")
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Cut:
    """A run, cut into iterations of about so many requests: one way to see it."""

    period: float
    share: float  # windows that come once a period, for each request of it
    begins: Numbers  # requests
    ends: Numbers
    holds: float  # how many blocks are live at once that an iteration frees itself
    outlives: float  # which part of its blocks outlives the next iteration
    live: float  # how many blocks are live where an iteration begins
    signs: Signs  # of the run

    @property
    def covered(self) -> int:
        return int((self.ends - self.begins).sum())

    @functools.cached_property
    def alike(self) -> NDArray[np.float64]:
        """Which part of each is in a neighbour."""
        hashed = windows(self.signs, FEW)
        spans = zip(self.begins, self.ends, strict=True)
        parts = [hashed[begin : max(begin, end - FEW + 1)] for begin, end in spans]
        return np.array([_alike(parts, one) for one in range(len(parts))])


def iterations_of(trace: Trace) -> Iterations:
    """Those that ranges which the program named tell, or the loops that stacks show, or else the
    structure of a trace."""
    lives = Lives.of(trace)
    for source, found in (
        ("ranges", _named_ranges(trace, lives)),
        ("stacks", loops(trace, lives.event)),
    ):
        loop = _of_loops(found, lives, are_ranges=source == "ranges")
        if loop is not None:
            return Iterations(tuple(_found(trace, lives, loop)), source)
    cuts = _cuts(lives)
    good = [cut for cut in cuts if not _fault(cut, lives)]
    if not good:
        return Iterations((), "structure", _reason(cuts, lives))
    chosen = good[0]
    for cut in good[1:]:
        # An iteration ends where nothing is held: parts of one, such as the batches of a step
        # that adds up gradients, end while more is live
        slack = max(2.0, 0.1 * cut.holds)
        if cut.live <= chosen.live + slack and cut.share >= 0.5 * chosen.share:
            chosen = cut
    return Iterations(tuple(_found(trace, lives, chosen)), "structure")


def _of_loops(found: Iterable[Loop], lives: Lives, *, are_ranges: bool) -> Cut | None:
    """The loop of the program whose times are iterations: of those that hold nothing in between,
    the one that comes most often, and of about as many the one that covers most. Of ranges those
    come first whose times are alike: an evaluation goes through some of a training's, too."""
    good: list[Cut] = []
    known = set()
    for loop in found:
        spans = loop.begins.tobytes() + loop.ends.tobytes()
        inside = int((loop.ends - loop.begins).sum())
        least = max(COVERED * (len(lives) - int(loop.begins[0])), LEAST * len(loop.begins))
        if spans in known or inside < least:
            continue
        known.add(spans)
        cut = _cut(lives, loop.begins, 1.0, loop.ends)
        if not _fault_of_memory(cut, lives):
            good.append(cut)
    if not good:
        return None
    # The first makes more; of two whose gradients are added up one begins with nothing held.
    live = [float(np.percentile(lives.live[cut.begins[1:]], 75)) for cut in good]
    empty = [
        cut
        for cut, held in zip(good, live, strict=True)
        if held <= min(live) + max(2.0, 0.1 * cut.holds)
    ]
    often = 0.75 * max(len(cut.begins) for cut in empty)
    chosen = [cut for cut in empty if len(cut.begins) >= often]
    if are_ranges:
        alike = [float((cut.alike[1:] >= ALIKE).mean()) for cut in chosen]  # the first makes more
        pairs = zip(chosen, alike, strict=True)
        chosen = [cut for cut, part in pairs if part >= max(alike) - 0.1]
    return max(chosen, key=lambda cut: cut.covered)


def _named_ranges(trace: Trace, lives: Lives) -> Iterator[Loop]:
    """What ranges that the program named may tell: the times of each, and what lies between two
    beginnings, or ends."""
    for its in _by_name(trace):
        begins, ends = np.searchsorted(lives.event, np.unique(its, axis=0)).T
        apart = np.concatenate([[True], begins[1:] >= ends[:-1]])  # not one inside of another
        begins, ends = begins[apart], ends[apart]
        for first, last in (
            (begins, ends),
            (begins, np.concatenate([begins[1:], [len(lives)]])),
            _ending_at(lives, ends),
        ):
            whole = (last - first >= LEAST) & (first < len(lives))
            if whole.sum() > 1:
                yield Loop(0.0, first[whole], last[whole])


def _ending_at(lives: Lives, ends: Numbers) -> tuple[Numbers, Numbers]:
    """The iterations that end at some requests, and one behind the last of them. Each begins
    where the one before it ends, or, after an evaluation, with what they begin with."""
    gaps = np.diff(ends)
    if len(gaps) < 2 or np.median(gaps) < LEAST:
        return ends[:0], ends[:0]
    typical = int(np.median(gaps))
    usual = int(ends[abs(gaps - typical).argmin()])
    head = Index.of(lives).head(usual, int(np.clip(typical // 8, 12, 400)))
    begins = [int(one) for one in ends[:-1]]
    for number in np.flatnonzero(gaps > (1 + BETWEEN) * typical).tolist():
        soonest = begins[number]
        at, share = head.find(soonest, int(ends[number + 1] - 0.95 * typical))
        begins[number] = at if share >= KNOWN else soonest
    soonest = max(0, int(ends[0] - 2.2 * typical))
    at, share = head.find(soonest, max(soonest + 1, int(ends[0] - 0.95 * typical)))
    if share >= KNOWN:
        begins.insert(0, at)
    found = np.array(begins), ends[-len(begins) :]
    at, share = head.find(int(ends[-1]), max(int(ends[-1]) + 1, len(lives) - LEAST))
    if share < KNOWN:
        return found
    return np.append(found[0], at), np.append(found[1], len(lives))


def _by_name(trace: Trace) -> list[NDArray[np.int64]]:
    """Where the ranges of each name begin and end, in events. The numbers of a profiler's steps do
    not count."""
    ranges = trace.meta.get("ranges") if isinstance(trace.meta, dict) else None
    found: dict[str, list[tuple[int, int]]] = {}
    for row in ranges if isinstance(ranges, list) else ():
        if not isinstance(row, list) or [type(each) for each in row] != [str, int, int]:
            continue
        name, begin, end = row
        if 0 <= begin < end <= len(trace):
            found.setdefault(name.rstrip("0123456789"), []).append((begin, end))
    return [np.array(its, np.int64) for its in found.values()]


def marked(trace: Trace, marks: Iterable[Any]) -> Iterations:
    """Those that marks name."""
    try:
        pairs = checked_steps(marks, len(trace))
    except ValueError as error:
        raise TraceError(f"meta['marks']: {error}") from None
    ends = [*(event for event, _ in pairs[1:]), len(trace)]
    found = [
        Iteration(begin, end, kind.partition(":")[0], 1.0, at < len(pairs) - 1)
        for at, ((begin, kind), end) in enumerate(zip(pairs, ends, strict=True))
        if kind
    ]
    return Iterations(tuple(found), "marks", "" if found else "its marks name none")


def checked_steps(
    marks: Iterable[Any], events: int, kinds: Sequence[str] | None = None
) -> list[tuple[int, str]]:
    """The events and kinds of marks, of a trace of so many events. Raises ValueError."""
    found: list[tuple[int, str]] = []
    try:
        for mark in marks:
            event, kind = mark if isinstance(mark, list | tuple) else (mark, TRAIN)
            found.append((operator.index(event), kind))
    except (TypeError, ValueError):
        raise ValueError(
            "marks are the numbers of events, or pairs of such a number and a kind of iteration"
        ) from None
    if kinds is not None:
        if len(kinds) != len(found):
            raise ValueError(f"there are {len(kinds)} kinds for {len(found)} marks: one each")
        found = [(event, kind) for (event, _), kind in zip(found, kinds, strict=True)]
    if not all(isinstance(kind, str) for _, kind in found):
        raise ValueError("a kind of iteration is a text, such as 'train'")
    at = -1
    for event, _ in found:
        if not at < event <= events:
            raise ValueError(
                f"the mark at event {event}: marks rise, and the trace has {events} events"
            )
        at = event
    return found


def _cuts(lives: Lives) -> list[Cut]:
    """The ways to cut a run into iterations, the longest first."""
    held = lives.held + 0.01 * lives.live / lives.live.max(initial=1)
    index = Index.of(lives)
    found: list[Cut] = []
    for length in WINDOWS:
        if len(lives) < 2 * length:
            continue
        repeats = Repeats.of(windows(lives.signs, length))
        for period, chosen in repeats.periods():
            share = len(chosen) / period
            often = float(np.median(repeats.count[chosen])) >= 3
            known = any(abs(np.log(cut.period / period)) < 0.13 for cut in found)
            if period >= LEAST and share >= (SHARE_OF_THREE if often else SHARE) and not known:
                begins = _begins(repeats, chosen, period, held, index)
                if len(begins) > 1:
                    ends = _ends(begins, _period(begins), held)
                    found.append(_cut(lives, begins, share, ends))
    return sorted(found, key=lambda cut: -cut.period)


def _begins(
    repeats: Repeats, chosen: Numbers, period: float, held: NDArray[np.float64], index: Index
) -> Numbers:
    """Where iterations of a period begin: where computation holds least."""
    total, span = len(held), int(period)
    near = _iterations(repeats, chosen, period)
    offsets = np.array([_least(held, one, span) for one in near if one + 2 * span <= total])
    if not len(offsets):
        return near[:0]
    offsets %= span
    agree = (abs(offsets[:, None] - offsets[None, :]) <= span // 50).sum(axis=1)
    begins = _behind(repeats, chosen, near, int(offsets[int(agree.argmax())]), span)
    begins = begins[(begins >= 0) & (begins < total - LEAST)]
    if len(begins) < 2:
        return begins
    begins = _finest(begins, held, span)
    head = index.head(int(begins[len(begins) // 2]), int(np.clip(span // 8, 12, 400)))
    width = max(4, span // 10)
    known = [head.find(int(one) - width, int(one) + width + 1) for one in begins]
    kept = [at for at, share in known if share >= KNOWN]
    kept = _with_ends(kept, head, total)
    found = np.array(kept, np.int64)
    return _finest(np.unique(found[(found >= 0) & (found < total)]), held, span)


def _least(held: NDArray[np.float64], begin: int, span: int) -> int:
    """How far behind a request computation holds least: of a level stretch, such as the steps of an
    optimizer, the end counts, since what comes then is kept."""
    fullest = int(held[begin : begin + span].argmax())
    around = held[begin + fullest : begin + fullest + span]
    return fullest + int(np.flatnonzero(around <= around.min() + TIE)[-1])


def _behind(repeats: Repeats, chosen: Numbers, near: Numbers, offset: int, span: int) -> Numbers:
    """Where iterations begin that do so a number of requests behind those near them: counted from
    the window that comes soonest behind their beginning, since the distance to others varies."""
    often = 0.7 * float(np.median(repeats.count[chosen]))
    soonest, places, least = 0, near, span
    for window in chosen[repeats.count[chosen] >= often]:
        at = repeats.places(int(window))
        behind = at - near[np.maximum(np.searchsorted(near, at, "right") - 1, 0)]
        distance = int(np.median(behind))
        if (distance - offset) % span < least:
            soonest, places, least = distance, at, (distance - offset) % span
    expected = near + soonest
    missing = [one for one in expected if abs(places - one).min() > span / 4]
    return np.sort(np.concatenate([places, np.array(missing, np.int64)])) - least


def _iterations(repeats: Repeats, chosen: Numbers, period: float) -> Numbers:
    """One request of each iteration, by the votes of the windows that come once in each."""
    base = repeats.places(int(chosen[int(repeats.count[chosen].argmax())]))
    votes = []
    for window in chosen[:: max(1, len(chosen) // 200)]:
        places = repeats.places(int(window))
        before = np.searchsorted(base, places, "right") - 1
        behind = (places - base[np.maximum(before, 0)])[before >= 0]
        if len(behind):
            votes.append(places - int(np.median(behind)))
    ordered = np.sort(np.concatenate(votes))
    groups = np.split(ordered, np.flatnonzero(np.diff(ordered) > period / 4) + 1)
    found = [int(np.median(group)) for group in groups if len(group) >= 0.3 * len(votes)]
    return np.array([one for one in found if one >= 0], np.int64)


def _with_ends(kept: list[int], head: Head, total: int) -> list[int]:
    """The same, with the first iteration, which is longer, and the last; and without what is too
    near the end of the run to be one."""
    while len(kept) > 2 and kept[-1] - kept[-2] < 0.95 * min(np.diff(kept[:-1])):
        kept.pop()
    if len(kept) < 2:
        return kept
    typical = float(np.median(np.diff(kept)))
    at, share = head.find(max(0, int(kept[0] - 2.2 * typical)), int(kept[0] - 0.95 * typical))
    if share >= KNOWN:
        kept.insert(0, at)
    shortest = min(np.diff(kept))
    soonest, latest = int(kept[-1] + 0.98 * shortest), int(kept[-1] + 1.6 * typical)
    ends_within = total - soonest < typical
    at, share = head.find(soonest, min(total, latest), by_order=ends_within)
    if share >= KNOWN:
        kept.append(at)
    return kept


def _finest(begins: Numbers, held: NDArray[np.float64], span: int) -> Numbers:
    """The same, each moved to where the least is held."""
    width = max(2, span // FINE)
    found = begins[:1].tolist()  # hardly anything is held before the first one
    for one in begins[1:].tolist():
        lowest = max(0, one - width)
        around = held[lowest : one + width + 1]
        least = np.flatnonzero(around <= around.min() + TIE) + lowest
        found.append(int(least[abs(least - one).argmin()]))
    return np.unique(np.array(found, np.int64))


def _period(begins: Numbers) -> float:
    gaps = np.diff(begins)
    return float(np.median(gaps[gaps <= 1.5 * np.median(gaps)]))


def _cut(lives: Lives, begins: Numbers, share: float, ends: Numbers) -> Cut:
    period = _period(begins)
    holds, outlives = [], []
    whole = np.flatnonzero(ends - begins >= period / 2)
    for one in whole[:: max(1, len(whole) // ENOUGH)].tolist():
        begin, end = int(begins[one]), int(ends[one])
        death = lives.death[begin:end]
        holds.append(_most_at_once(death - begin, end - begin))
        outlives.append(float((death > end + period).mean()))
    return Cut(
        period,
        share,
        begins,
        ends,
        float(np.median(holds or [0])),
        float(np.median(outlives or [1])),
        float(np.median(lives.live[begins])),
        lives.signs,
    )


def _alike(parts: list[Signs], one: int) -> float:
    """Which part of an iteration is in the one before it, or in the one behind it."""
    around = parts[max(0, one - 1) : one] + parts[one + 1 : one + 2]
    if not len(parts[one]):
        return 0.0
    return max(float(np.isin(parts[one], other).mean()) for other in around)


def _ends(begins: Numbers, period: float, held: NDArray[np.float64]) -> Numbers:
    """Where iterations end: where the next one begins, or, if that is far, where the least is held
    about a period behind their beginning. The first one may be longer: it makes more."""
    total = len(held)
    found = []
    for one, begin in enumerate(begins.tolist()):
        behind = int(begins[one + 1]) if one + 1 < len(begins) else total
        is_next = one + 1 < len(begins) and behind - begin <= (1.6 if one == 0 else 1.25) * period
        width = max(4, int(period) // 10)
        lowest, end = int(begin + period) - width, min(behind, int(begin + period) + width)
        if is_next or lowest >= end or end >= total:
            found.append(behind)
        else:
            around = held[lowest : end + 1]
            found.append(lowest + int(np.flatnonzero(around <= around.min() + TIE)[-1]))
    return np.array(found, np.int64)


def _most_at_once(death: Numbers, length: int) -> int:
    """How many of the blocks that are freed within their iteration are live at once."""
    inside = (death >= 0) & (death <= length)
    change = np.zeros(length + 1, np.int64)
    change[:length] += inside
    np.subtract.at(change, death[inside], 1)
    return int(np.cumsum(change).max(initial=0))


def _fault(cut: Cut, lives: Lives) -> str:
    """Why these are no iterations; "" if they are."""
    return _fault_of_memory(cut, lives) or _fault_of_form(cut)


def _fault_of_memory(cut: Cut, lives: Lives) -> str:
    """Why these are no iterations, by what they hold and how much of the run they are."""
    few = cut.holds < HOLDS and cut.holds < HOLDS_PART * cut.period
    if cut.outlives > OUTLIVES:
        return "much of what each makes lives on when the next one has ended"
    if cut.holds < HOLDS_LEAST or (few and _are_layers(cut, lives)):
        return "they hold little at once, as the layers of a network do"
    if len(cut.begins) == 2 and cut.ends[1] - cut.begins[1] < 0.95 * (
        cut.begins[1] - cut.begins[0]
    ):
        return "the second one lacks its end"
    if cut.covered < COVERED * (len(lives) - int(cut.begins[0])):
        return "they make up little of the run"
    return ""


def _fault_of_form(cut: Cut) -> str:
    """Why these are no iterations, by how they differ."""
    inner = slice(1, -1) if len(cut.begins) > 3 else slice(None)
    if float((cut.alike[inner] >= ALIKE).mean()) < OFTEN:
        return "they differ too much"
    lengths = (cut.ends - cut.begins)[inner]
    if float((abs(lengths - cut.period) <= AS_LONG * cut.period).mean()) < min(
        OFTEN, 0.5 if len(cut.begins) < 4 else 1
    ):
        return "their lengths differ too much"
    return ""


def _are_layers(cut: Cut, lives: Lives) -> bool:
    """Whether nearly all weights come as often as these, in each of their sizes."""
    before = int(cut.begins[0])
    death = lives.death[:before]
    stays = (death < 0) | (death > cut.ends[-1])
    _, times = np.unique(lives.size[:before][stays], return_counts=True)
    return any(
        times[(times >= layers) & (times % layers <= 2)].sum() >= 0.8 * times.sum()
        for layers in range(max(5, len(cut.begins) - 1), len(cut.begins) + 2)
    )


def _reason(cuts: list[Cut], lives: Lives) -> str:
    if not len(lives):
        return "the run asks for no memory"
    if not cuts:
        return "no order of requests comes again regularly over much of the run"
    best = max(cuts, key=lambda cut: cut.holds)
    return (
        f"something comes again every {best.period:.0f} requests, {len(best.begins)} times, but "
        f"{_fault(best, lives)}"
    )


def _found(trace: Trace, lives: Lives, cut: Cut) -> Iterator[Iteration]:
    """The iterations, and what lies between two of them, in events."""
    events = np.concatenate([lives.event, [len(trace)]])
    for one, (begin, end) in enumerate(zip(cut.begins.tolist(), cut.ends.tolist(), strict=True)):
        is_last = one + 1 == len(cut.begins)
        behind = len(lives) if is_last else int(cut.begins[one + 1])
        apart = behind - end >= BETWEEN * cut.period and not is_last
        until = end if apart or is_last else behind
        complete = until < len(lives) or end - begin >= 0.95 * cut.period
        yield Iteration(
            int(events[begin]), int(events[until]), TRAIN, float(cut.alike[one]), complete
        )
        if apart:
            yield Iteration(int(events[until]), int(events[behind]), OTHER, 0.0, True)
