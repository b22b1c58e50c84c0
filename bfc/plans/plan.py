"""A plan: places for the blocks of a run that repeats, found from a recording."""

from __future__ import annotations

import functools
import itertools
import json
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bfc.errors import PlanError, SettingsError
from bfc.files import named_in_errors, read_arrays, replacing
from bfc.libraries import NDArray, np
from bfc.plans._planning import as_torch_rounds
from bfc.plans.consensus import (
    AGREES,
    consensus,
    is_lasting,
    lives_at,
    matched,
    of_lengths,
    places,
    with_clear_keys,
)
from bfc.plans.layout import planned
from bfc.plans.lengths import MOST_BYTES, MOST_KEYS, Key, Lengths
from bfc.plans.lives import Lives
from bfc.plans.parts import (
    BODY,
    FOREVER,
    HEAD,
    LATE,
    MOST_KINDS,
    MOST_SLOTS,
    MOST_STREAMS,
    Part,
    Requests,
    Rounding,
    Stretch,
    lives_of,
    stretches,
)
from bfc.plans.serving import Served, served
from bfc.plans.trying import Fallback, Trial
from bfc.pytorch.rules import NEWEST, VERSIONS
from bfc.pytorch.settings import CachingSettings
from bfc.trace.iterations import checked_steps
from bfc.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from bfc.trace import Trace

#: The policies that serve what has no place in a plan, and the unit of their sizes.
UNITS = {"caching": 512, "bfc": 256}
#: The columns of a file, with a number for each slot.
COLUMNS = {
    "size": "uint64",
    "offset": "uint64",
    "end": "uint32",
    "over": "uint32",
    "stream": "uint16",
}
FORMAT, VERSION = "bfc plan", 5
#: The most bytes of a file's description.
MOST_TEXT = 1 << 20
#: How many iterations of a kind become one.
ITERATIONS = 3
#: A plan whose sizes follow from several lengths serves iterations that are longer than all before,
#: too: it is taken if it needs no more than so many times what it would without.
ROOM = 1.05
#: What lives when a length is told lies in the region of what is never freed, where the places take
#: no more than so many times what they would otherwise.
APART = 1.01
#: What nothing has shown of a plan yet.
UNTRIED = {"planned": 0, "worst": 0, "unmarked": 0}
#: A plan is served if the policy reserves less than this part of what it reserves without one.
GATE = 0.95


class Plan:
    """Places for the blocks of a run that repeats, so that it needs little more than its live peak.

    Make one with `Plan.from_trace`, or read one with `Plan.load`.

    Attributes
    ----------
    fallback : str
        The policy whose sizes the plan has: "caching" or "bfc".
    settings : str
        The settings of that policy, as in PYTORCH_CUDA_ALLOC_CONF.
    parts : tuple of Part
        The head, then for each kind of iteration a body and perhaps a late part.
    base : int
        The bytes of the region for what is never freed.
    body : int
        The bytes of the region for everything else: that of the largest body.
    span : int
        Both together.
    bound : int
        The most planned bytes that live at once, if blocks of different streams share none. No plan
        for these iterations takes less.
    peak : int
        The most rounded bytes that were live at once in the recording.
    online : int
        What the fallback policy reserved when it replayed the recording, in bytes.
    planned : int
        What it reserved when it replayed the recording with a plan, in bytes: the most of this
        plan, and where iterations differ, of plans that were made without one of them. 0 if no
        iteration comes again, so that nothing shows how well a plan fits.
    worst : int
        The same, if it took as much in proportion to what the policy does alone as with the
        iterations in the least good of some other orders.
    unmarked : int
        The same as `worst`, with steps that begin by themselves.

    Raises
    ------
    TypeError
        If the class is called: `from_trace` makes a plan, and `load` reads one.

    Notes
    -----
    `BFCAllocator` and `CachingAllocator` serve a plan: give it as `plan=`, or call `use_plan`, and
    put each iteration into `with allocator.step("train"):`.

    Under PyTorch's policy each stream has places of its own, since memory does not pass from one
    stream to another there.

    Examples
    --------
    >>> import bfc
    >>> ops, ids = [0, 0, 1, 1] * 3, [0, 1, 0, 1] * 3
    >>> sizes = [3 << 20, 1 << 20, 0, 0] * 3
    >>> trace = bfc.Trace(ops, ids, sizes)
    >>> plan = bfc.Plan.from_trace(trace, marks=[0, 4, 8])
    >>> plan.span >> 20, plan.online >> 20
    (4, 22)
    >>> str(plan).split("; ")[0]
    'head 0 slots, train 2 (2 of 2 agree), span 4.00 MiB = 1.0000 of the peak'
    """

    fallback: str
    settings: str
    parts: tuple[Part, ...]
    base: int
    body: int
    span: int
    bound: int
    peak: int
    online: int
    planned: int
    worst: int
    unmarked: int

    def __init__(self) -> None:
        raise TypeError("a plan is made by bfc.Plan.from_trace, or read by bfc.Plan.load")

    @classmethod
    def _of(cls, parts: Iterable[Part], **facts: Any) -> Plan:
        plan: Plan = cls.__new__(cls)
        plan.parts = tuple(parts)
        for name, value in facts.items():
            setattr(plan, name, value)
        plan.span = plan.base + plan.body
        return plan

    @classmethod
    def from_trace(
        cls,
        trace: Trace,
        *,
        marks: Iterable[int | tuple[int, str]] | str | None = None,
        kinds: Sequence[str] | None = None,
        fallback: str = "caching",
        settings: str | None = None,
    ) -> Plan:
        """Plan the places of a recorded run.

        Parameters
        ----------
        trace : Trace
            The recording: what comes before the iterations, and at least two iterations of each
            kind, better four. What is still allocated when it ends counts as never freed, so that
            of several iterations the last is not used.
        marks : iterable of int or of (int, str), or "auto", optional
            The events at which iterations begin, and their kinds, such as "train". The kind
            "step:1024" is "step"; after a mark of the kind "" nothing is planned until the next.
            "auto" takes those that `Trace.iterations` finds, without the marks of the recording.
            None takes `trace.meta["marks"]`; without any, the whole run is the head.
        kinds : sequence of str, optional
            A kind for each of the marks.
        fallback : {"caching", "bfc"}, optional
            The policy that serves the rest: PyTorch's, or TensorFlow's with growing regions.
        settings : str, optional
            The settings of PyTorch's policy. None takes those that were recorded, or else the
            defaults.

        Returns
        -------
        Plan
            The same trace and arguments give the same plan.

        Raises
        ------
        PlanError
            If the marks are not rising numbers of events, or the run has no request, has more than
            2**24 of them, or takes 2 TiB or more (1 TiB under "bfc").
        ValueError
            If `fallback` or `marks` is another text.
        SettingsError
            If PyTorch's policy does not take the settings.

        Notes
        -----
        What is allocated from private pools, such as that of a captured graph, is left out of all
        figures: a pool keeps its memory to itself.

        If iterations of three lengths or more differ in their lengths alone, all sizes follow from
        the first that varies, or from several of them: as polynomials of the second degree. Of
        others, up to three of a kind become one: a slot stays if two of them have it. If they do
        not repeat (fewer than 95 % of the requests are found in another one), the iteration with
        the highest peak stands for all.

        Cost: one to three microseconds for each request, more where the quickest layout leaves
        gaps; and two replays. Where iterations differ, up to three more plans are made, and tried;
        twice as many where sizes follow from several lengths. Where they follow from any, each
        replay finds places anew as its iterations grow longer.
        """
        if fallback not in UNITS:
            raise ValueError(f"fallback is 'caching' or 'bfc', not {fallback!r}")
        text = settings if settings is not None else trace.beginning.settings
        version = trace.torch or NEWEST
        rules = CachingSettings().apply(text or "" if fallback == "caching" else "", torch=version)
        requests = Requests.of(trace, _rounding(fallback, rules))
        if not len(requests.size):
            raise PlanError("the run asks for no memory: there is nothing to plan")
        is_guess = isinstance(marks, str)
        if isinstance(marks, str):
            if marks != "auto":
                raise ValueError(f"marks are numbers of events, or 'auto', not {marks!r}")
            marks = trace._iterations().marks
        marked = _marks_of(trace, marks, kinds)
        found = stretches(requests, marked, len(trace))
        whole = requests.part(HEAD, "", 0, len(requests.size), len(requests.size))
        peak = lives_of([whole]).most(whole.size.astype("int64"))
        policy = Fallback(fallback, text or "", version, peak)
        facts: dict[str, Any] = {"fallback": fallback, "settings": text or "", "peak": peak}
        facts["online"] = policy.reserves(trace._without_pools())

        def made(parts: list[Part]) -> Plan:
            laid_out = _laid_out(parts, UNITS[fallback], apart=fallback == "caching")
            return cls._of(laid_out.pop("parts"), **laid_out, **facts, **UNTRIED)

        def tried(most_keys: int) -> Plan:
            plan = made(_parts(requests, found, most_keys))
            clear = _with_clear_keys(plan.parts, requests.rounded)
            if is_apart := clear is not None and (apart := made(clear)).span <= APART * plan.span:
                plan = apart
            if _comes_again(found):
                plans = [plan]
                if not _are_alike(requests, found, plan):
                    others = [_parts(requests, found, most_keys, i) for i in range(ITERATIONS)]
                    if is_apart:
                        others = [
                            _with_clear_keys(parts, requests.rounded) or parts for parts in others
                        ]
                    plans += [made(parts) for parts in others]
                plan._note(Trial.of(run, plans, policy))
            return plan

        told = dict(trace.meta) if isinstance(trace.meta, dict) else {}
        run = trace._with_meta(told | {"marks": [list(mark) for mark in marked]})._without_pools()
        plan = tried(MOST_KEYS)
        if any(part.lengths is not None and len(part.lengths.keys) > 1 for part in plan.parts):
            largest = tried(1)
            plan = plan if plan.planned <= ROOM * largest.planned else largest
        if is_guess and plan.span < peak:  # the peak is in none of them
            return made([whole])
        return plan

    def _note(self, trial: Trial) -> None:
        """Writes down what a trial has shown."""
        self.planned = trial.planned
        self.worst = int(trial.worst * self.online)
        self.unmarked = int(trial.unmarked * self.online)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of iterations that it has a body for."""
        return tuple(part.kind for part in self.parts if part.role == BODY)

    @property
    def _varies(self) -> bool:
        """Whether some of its iterations ask for more than others do, of the same kind."""
        bodies = [part for part in self.parts if part.role == BODY]
        return any(part.lengths is not None or part.agreement < AGREES for part in bodies)

    @property
    def budget(self) -> int:
        """The bytes that it saves where the run repeats: `online` - `span`.

        Negative where the fallback policy reserved less. Of a plan that leaves out blocks of the
        peak the `peak` counts, and not the `span`: they need memory beside it.
        """
        return self.online - max(self.span, self.peak)

    @property
    def declined(self) -> str | None:
        """Why an allocator would not serve it, as far as its recording shows; or None."""
        return self._declined(GATE)

    def _declined(self, gate: float, *, by_itself: bool = False) -> str | None:
        """Why it is not served, if it has to stay below this part of what the policy reserves.
        `by_itself`: with steps that begin by themselves."""
        if not self.planned:
            return (
                "no iteration comes again in the recording of the plan, so that nothing shows how "
                "well it fits a run"
            )
        most = self.unmarked if by_itself else self.worst
        if max(self.planned, most) < gate * self.online:
            return None
        when = f"when {self.fallback} replayed its recording"
        if self.planned < gate * self.online:
            when += " with its iterations in another order"
            when += ", or with steps that began by themselves" if by_itself else ""
            told = f"it reserved {most / self.online:.0%} of what it did without one"
        else:
            told = (
                f"it reserved {format_bytes(self.planned)} with a plan, "
                f"{format_bytes(self.online)} without one"
            )
        return (
            f"the plan would not have paid: {when}, {told}, and a plan has to stay below "
            f"{gate:.0%} of that"
        )

    def _served(self, policy: str, alignment: int, in_pages: bool = False) -> Served:
        """What an allocator needs of it. Raises PlanError if it cannot serve the plan. In pages no
        two streams share memory."""
        if policy != self.fallback:
            raise PlanError(
                f"the plan is for the policy {self.fallback!r}, and this allocator has {policy!r}: "
                f"make it with fallback={policy!r}"
            )
        apart = in_pages or self.fallback == "caching"
        found = served(self.parts, self.base, self.span, apart=apart)
        places = np.concatenate([found.offset, found.size, [self.base]])
        if (places.astype(np.uint64) % np.uint64(alignment)).any():
            raise PlanError(
                f"the plan has places that are not multiples of {alignment} bytes, as this device "
                f"needs them: record the run on it"
            )
        return found

    def stretched(self, kind: str, size: int | str) -> Plan:
        """The plan with room for longer iterations of a kind whose lengths vary.

        Parameters
        ----------
        kind : str
            The kind of iteration.
        size : int or str
            What the longest iteration will ask for first, of all whose size varies: bytes, or a
            string such as "1 MiB".

        Returns
        -------
        Plan
            The plan with other places in the region of the bodies. Its `peak`, `online`,
            `planned`, `worst` and `unmarked` are those of this plan, scaled as the `span` is.

        Raises
        ------
        PlanError
            If the plan has no lengths for this kind, or a size is not a length, or too long.

        Notes
        -----
        An allocator does that by itself where a step is longer than all before, if nothing lives in
        the region of the bodies. It has the room that was added to a plan from the beginning.

        Cost: that of the places, a microsecond or so for each slot.

        Examples
        --------
        >>> import bfc
        >>> ops, ids, sizes = [], [], []
        >>> for number, length in enumerate([100, 300, 200, 100]):
        ...     ops += [0, 0, 1, 1]
        ...     ids += [2 * number, 2 * number + 1] * 2
        ...     sizes += [length * 4096, length * length * 512, 0, 0]
        >>> plan = bfc.Plan.from_trace(bfc.Trace(ops, ids, sizes), marks=[0, 4, 8, 12])
        >>> plan.span == 300 * 4096 + 300 * 300 * 512
        True
        >>> plan.stretched("train", 400 * 4096).span == 400 * 4096 + 400 * 400 * 512
        True
        """
        told = parse_bytes(size) if isinstance(size, str) else size
        return self._stretched(kind.split(":")[0], {0: told})

    def _stretched(self, kind: str, told: Mapping[int, int], spare: bool = False) -> Plan:
        """The same for some lengths of a kind, by number, with the bytes that tell them. `spare`:
        at least a quarter more than there is room for, up to what was recorded."""
        parts = list(self.parts)
        at = [i for i, part in enumerate(parts) if part.role == BODY and part.kind == kind]
        lengths = parts[at[0]].lengths if at else None
        if lengths is None:
            raise PlanError(f"the plan has no lengths for steps of the kind {kind!r}")
        wanted = {}
        for number, nbytes in told.items():
            unit = lengths.keys[number].unit
            wanted[number], rest = divmod(nbytes, unit)
            if rest or wanted[number] <= 0:
                raise PlanError(
                    f"{nbytes} bytes tell no length: a length of the kind {kind!r} is a multiple "
                    f"of {unit} bytes"
                )
        if spare:
            for number, x in wanted.items():
                key = lengths.keys[number]
                wanted[number] = max(x, min(key.recorded, key.longest * 5 // 4))
        lengths = lengths.with_room(wanted)
        most = lengths.most(lengths.longest)
        if most >= MOST_BYTES:
            raise PlanError(f"a request of {format_bytes(most)} cannot be planned")
        parts[at[0]] = self._sized(parts[at[0]], lengths)
        return self._with_parts(parts)

    def _shortest(self) -> Plan:
        """The plan as it begins: without room for lengths that its requests can make room for. All
        iterations must be foretold: what has no place needs the room of the longest ones."""
        bodies = [part for part in self.parts if part.role == BODY]
        if any(part.agreement < AGREES or part.recorded == 1 for part in bodies):
            return self
        parts = list(self.parts)
        for i, part in enumerate(parts):
            lengths = part.lengths
            keys = enumerate(lengths.keys if lengths is not None else ())
            short = {number: 1 for number, key in keys if self._may_be_short(part, key)}
            if lengths is not None and short:
                begun = self._sized(part, lengths.with_keys(short))
                # A request may be smaller where the length is larger: it has room for that one.
                parts[i] = replace(begun, size=np.minimum(begun.size, part.size))
        return self if all(map(operator.is_, parts, self.parts)) else self._with_parts(parts)

    def _may_be_short(self, part: Part, key: Key) -> bool:
        """Whether room for a length that was recorded can be made when its request comes: nothing
        lives in the region of the bodies then."""
        if not key.clear or key.longest != key.recorded:
            return False
        for other in self.parts:
            lives = lives_at(other, key.request) if other is part else other.over > key.request
            if (lives & (other.offset >= self.base)).any():
                return False
        return True

    def _sized(self, part: Part, lengths: Lengths) -> Part:
        """A part with room for these lengths. The region of what is never freed stays as it is."""
        sized = _rounding_of(self.fallback, self.settings)(lengths.sizes(lengths.longest))
        sized = np.where(is_lasting(part), part.size, sized)
        return replace(part, size=sized, lengths=lengths)

    def _with_parts(self, parts: list[Part]) -> Plan:
        """The plan with other sizes, and figures that are scaled as the `span` is."""
        laid_out = _laid_out(parts, UNITS[self.fallback], apart=self.fallback == "caching")
        facts = {name: getattr(self, name) for name in ("fallback", "settings", *FIGURES)}
        span = laid_out["base"] + laid_out["body"]
        for name in ("peak", "online", "planned", "worst", "unmarked"):
            facts[name] = facts[name] * span // self.span
        return Plan._of(laid_out.pop("parts"), **facts | laid_out)

    def __repr__(self) -> str:
        slots = sum(map(len, self.parts))
        return f"<bfc.Plan, {slots} slots, {format_bytes(self.span)}>"

    def __str__(self) -> str:
        named = [f"head {len(self.parts[0])} slots"]
        for part in self.parts[1:]:
            if part.role == BODY:
                agreed = f"{part.agreeing} of {part.recorded} agree"
                if part.lengths is not None:
                    agreed += ", lengths vary"
                named.append(f"{part.kind} {len(part)} ({agreed})")
        ratio = self.span / self.peak
        named.append(f"span {format_bytes(self.span)} = {ratio:.4f} of the peak")
        reserved = f"{self.fallback} reserved {format_bytes(self.online)}"
        sign = "-" if self.budget < 0 else ""
        return f"{', '.join(named)}; {reserved}; budget {sign}{format_bytes(abs(self.budget))}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as a compressed `.npz` file, which `load` and NumPy read.

        Parameters
        ----------
        path : str or os.PathLike
            The file, with no ending added. One that exists is replaced once the new one is
            complete.

        Raises
        ------
        OSError
            If it cannot be written. A file that existed is unchanged then.

        Notes
        -----
        26 bytes for each slot before compression, 54 where lengths vary. The file names no path,
        program or person.
        """
        described: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        described |= {name: getattr(self, name) for name in ("fallback", "settings", *FIGURES)}
        described["parts"] = [
            {"slots": len(part)}
            | {name: getattr(part, name) for name in PART_FACTS}
            | {"follower": part.follower, "lengths": _told(part.lengths)}
            for part in self.parts
        ]
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in self.parts]) for name in COLUMNS
        }
        lengths = [part.lengths for part in self.parts if part.lengths is not None]
        growths = [np.zeros((0, 3), np.int64), *(each.growth for each in lengths)]
        arrays["growth"] = np.concatenate(growths).reshape(-1)
        arrays["follows"] = np.concatenate(
            [np.zeros(0, np.uint32), *(each.follows for each in lengths)]
        )
        with replacing(path) as file:
            np.savez_compressed(file, plan=np.array(json.dumps(described)), **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a file.

        Parameters
        ----------
        path : str or os.PathLike
            A file that `save` has written.

        Returns
        -------
        Plan
            The plan, whose layout is checked: no two blocks that may live at once overlap.

        Raises
        ------
        PlanError
            If it is not such a file, or not a possible plan; the text names the file and the fault
            in one line. Also if it is not a regular file (a FIFO, a device), or would unpack to
            more than 2**24 slots, which is found out before anything is unpacked.
        OSError
            If it cannot be opened or read.

        Notes
        -----
        Nothing in the file is executed. Cost: O(n log n).

        Examples
        --------
        >>> import pathlib, tempfile, bfc
        >>> trace = bfc.Trace([0, 0, 1], [0, 1, 0], [1000, 300, 0])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "plan.npz")
        ...     bfc.Plan.from_trace(trace).save(path)
        ...     bfc.Plan.load(path).span
        1536
        """
        most = {name: MOST_SLOTS * np.dtype(kind).itemsize for name, kind in COLUMNS.items()}
        with named_in_errors(path, PlanError):
            arrays = read_arrays(
                path,
                most | {"plan": MOST_TEXT, "growth": 24 * MOST_SLOTS, "follows": 4 * MOST_SLOTS},
                ("plan", "growth", *COLUMNS),
                3 * MOST_SLOTS,
                sum(most.values()) + 28 * MOST_SLOTS + MOST_TEXT,
            )
            return _checked(_described(arrays.pop("plan")), arrays)


#: The numbers of a plan and of its parts that a file has beside the slots.
FIGURES = ("base", "body", "bound", "peak", "online", "planned", "worst", "unmarked")
PART_FACTS = ("role", "kind", "recorded", "agreeing", "agreement", "left_out")
OF_A_KEY = ("request", "unit", "recorded", "longest", "like", "above", "slope", "clear")


def _marks_of(
    trace: Trace, marks: Iterable[Any] | None, kinds: Sequence[str] | None
) -> list[tuple[int, str]]:
    """Events and kinds, checked: of the arguments, or of the `meta` of the trace."""
    if marks is None:
        marks = trace.meta.get("marks", ()) if isinstance(trace.meta, dict) else ()
    try:
        return checked_steps(marks, len(trace), kinds)
    except ValueError as error:
        raise PlanError(str(error)) from None


def marked(trace: Trace) -> Trace:
    """The trace, with marks where its iterations begin: its own, or else those that `from_trace`
    finds with marks="auto"."""
    told = dict(trace.meta) if isinstance(trace.meta, dict) else {}
    if "marks" in told:
        return trace
    return trace._with_meta(told | {"marks": [list(mark) for mark in trace.iterations().marks]})


def _rounding(fallback: str, settings: CachingSettings) -> Rounding:
    return functools.partial(_rounded, fallback=fallback, settings=settings)


def _rounding_of(fallback: str, settings: str) -> Rounding:
    """How sizes are rounded under the settings of a plan, which one of the versions takes."""
    for version in VERSIONS:
        try:
            rules = CachingSettings().apply(
                settings if fallback == "caching" else "", torch=version
            )
        except SettingsError:
            continue
        return _rounding(fallback, rules)
    raise PlanError(f"the plan has settings that PyTorch does not take: {settings!r}")


def _rounded(
    sizes: NDArray[np.uint64], fallback: str, settings: CachingSettings
) -> NDArray[np.uint64]:
    """The sizes as the policy rounds them, in whole units."""
    unit = np.uint64(UNITS[fallback])
    rounded = np.ascontiguousarray(sizes)
    if fallback == "caching":
        divisions = settings.roundup_power2_divisions
        bits = np.array([max(0, count.bit_length() - 1) for count in divisions], np.uint8)
        rounded = np.empty_like(sizes)
        as_torch_rounds(sizes, rounded, bits)
    if len(rounded) and int(rounded.max()) >= 1 << 60:
        raise PlanError("a request of 2**60 bytes or more cannot be planned")
    return (rounded + unit - np.uint64(1)) // unit * unit


def _parts(
    requests: Requests, found: list[Stretch], most_keys: int, left_out: int | None = None
) -> list[Part]:
    """The head, and for each kind its body and what its first iteration allocates for good. The
    sizes of an iteration may follow from so many lengths. Of each kind the iteration of the number
    `left_out` does not count."""
    total = len(requests.size)
    if not found:
        return [requests.part(HEAD, "", 0, total, total)]
    parts = [requests.part(HEAD, "", 0, found[0].begin, found[0].end)]
    kinds = _by_kind(found)
    if len(kinds) > MOST_KINDS:
        raise PlanError(
            f"the marks name {len(kinds)} kinds of iterations, and a plan has at most "
            f"{MOST_KINDS}: iterations that ask for the same are of one kind"
        )
    for kind, its in kinds.items():
        varying = _with_lengths(requests, its, most_keys, left_out)
        body, *late = _body_of(requests, its, _known(requests, its, left_out), varying)
        parts += [replace(body, follower=_follower(found, kind)), *late]
    return parts


def _follower(found: list[Stretch], kind: str) -> str:
    """The kind that always comes after another, or ""."""
    after = {other.kind for one, other in itertools.pairwise(found) if one.kind == kind}
    return after.pop() if len(after) == 1 else ""


def _with_clear_keys(parts: Sequence[Part], rounded: Rounding) -> list[Part] | None:
    """The same parts, with room to be made at more keys; None if nothing changes."""
    changed = [with_clear_keys(part, rounded) for part in parts]
    if not any(part is not None for part in changed):
        return None
    return [old if new is None else new for old, new in zip(parts, changed, strict=True)]


def _by_kind(found: list[Stretch]) -> dict[str, list[Stretch]]:
    kinds: dict[str, list[Stretch]] = {}
    for stretch in found:
        kinds.setdefault(stretch.kind, []).append(stretch)
    return kinds


def _comes_again(found: list[Stretch]) -> bool:
    return any(len(its) > 1 for its in _by_kind(found).values())


def _known(requests: Requests, its: list[Stretch], left_out: int | None = None) -> list[Stretch]:
    """Those of one kind that a body is made of."""
    known = _ended(requests, its)
    if left_out is None or len(known) == 1:
        return known[-ITERATIONS:]
    return _without(known[-ITERATIONS - 1 :], left_out)


def _without(known: list[Stretch], left_out: int) -> list[Stretch]:
    """All but one of them, counted from the last."""
    number = len(known) - 1 - left_out % len(known)
    return known[:number] + known[number + 1 :]


def _ended(requests: Requests, its: list[Stretch]) -> list[Stretch]:
    # What the last stretch of a run leaves live may be freed in the next one: nothing says so
    return [stretch for stretch in its if stretch.end < len(requests.size)] or its


def _are_alike(requests: Requests, found: list[Stretch], plan: Plan) -> bool:
    """Whether the iterations that bodies are made of differ in nothing but one length, so that a
    plan without one of them would be the same."""
    lengths = {part.kind: part.lengths for part in plan.parts if part.role == BODY}
    for kind, its in _by_kind(found).items():
        told = lengths[kind]
        if told is not None and len(told.keys) == 1:
            continue
        if told is not None:
            return False
        made = [_body_part(requests, stretch) for stretch in _known(requests, its)]
        if not all(made[0].is_like(part) for part in made[1:]):
            return False
    return True


def _body_part(requests: Requests, stretch: Stretch) -> Part:
    part = requests.part(BODY, stretch.kind, stretch.begin, stretch.end, stretch.after)
    return part.taken(part.over != FOREVER)


def _with_lengths(
    requests: Requests, its: list[Stretch], most_keys: int, left_out: int | None = None
) -> Part | None:
    """The body of a kind whose iterations differ in their lengths."""
    made, raw = [], []
    known = _ended(requests, its)
    for stretch in known if left_out is None else _without(known, left_out):
        part = requests.part(BODY, stretch.kind, stretch.begin, stretch.end, stretch.after)
        ending = part.over != FOREVER
        made.append(part.taken(ending))
        raw.append(requests.raw[stretch.begin : stretch.end][ending])
    return of_lengths(made, raw, requests.rounded, most_keys) if made else None


def _body_of(
    requests: Requests, its: list[Stretch], known: list[Stretch], varying: Part | None
) -> list[Part]:
    """The body of one kind, and what the first iteration allocates for good, if it does. `varying`:
    the body of iterations that differ in their lengths."""
    first = its[0]
    freed = requests.freed[first.begin : first.end]
    never = freed == -1
    if len(its) > 1:  # a program may free its optimizer's state when all is done
        never |= freed >= len(requests.size)
    whole = requests.part(BODY, first.kind, first.begin, first.end, first.after)
    ending = [_body_part(requests, stretch) for stretch in known]
    lasting = int(never.sum())
    last = known[-1].end - known[-1].begin
    left_out = last - len(ending[-1]) - (lasting if known[-1] == first else 0)
    body = replace(varying or consensus(ending), left_out=left_out)
    return [body, _late_of(whole, never, body)] if lasting else [body]


def _late_of(whole: Part, never: NDArray[np.bool_], body: Part) -> Part:
    """What the first iteration allocates for good, and where in the body it does."""
    others = whole.taken(~never)
    slots = matched(body, others)
    if body.lengths is not None and len(others) == len(
        body
    ):  # the sizes are those of another length
        slots = np.arange(len(body))
    expected = places(slots, len(body))
    before = np.cumsum(~never)[never]
    late = whole.taken(never)
    return replace(late, role=LATE, end=expected[before].astype(np.uint32))


def _laid_out(parts: list[Part], unit: int, apart: bool) -> dict[str, Any]:
    """The parts with offsets, and the bytes of the regions."""
    size = np.concatenate([part.size for part in parts]).astype(np.int64) // unit
    stream = np.concatenate([part.stream for part in parts])
    repeats = any(part.role == BODY for part in parts)
    is_base = np.concatenate([is_lasting(part) & repeats for part in parts])
    lives = lives_of(parts)
    offset = np.zeros(len(size), np.int64)
    base, body, bound = int(size[is_base].sum()), 0, 0
    stacked = 0
    for number in np.unique(stream) if apart else [None]:
        chosen = np.flatnonzero(stream == number) if apart else np.arange(len(size))
        own = int(size[chosen][is_base[chosen]].sum())
        fixed = np.where(is_base[chosen], np.cumsum(size[chosen] * is_base[chosen]), 0)
        fixed = np.where(is_base[chosen], fixed - size[chosen], -1)
        found = planned(
            size[chosen],
            _of_blocks(lives, chosen),
            fixed=fixed if own else None,
            wall=own if own else None,
        )
        low = found.offsets < own
        offset[chosen] = found.offsets + np.where(low, stacked, base + body - own)
        stacked += own
        body += max(found.span - own, 0)
        bound += found.bound
    ends = np.cumsum([len(part) for part in parts])[:-1]
    places = np.split((offset * unit).astype(np.uint64), ends)
    made = [replace(part, offset=place) for part, place in zip(parts, places, strict=True)]
    return {"parts": made, "base": base * unit, "body": body * unit, "bound": bound * unit}


def _of_blocks(lives: Lives, chosen: NDArray[np.intp]) -> Lives:
    """The lives of some blocks, which are numbered anew."""
    kept = np.isin(lives.block, chosen)
    number = np.searchsorted(chosen, lives.block[kept])
    return Lives(number, lives.birth[kept], lives.death[kept])


def _described(text: NDArray[Any]) -> dict[str, Any]:
    """The description in a file, of which every type is checked."""
    try:
        said = json.loads(str(text.item()))
    except ValueError as error:
        raise PlanError(f"its description is not JSON ({error})") from None
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise PlanError("it is not a plan of bfc")
    if type(said.get("version")) is not int or said["version"] != VERSION:
        raise PlanError(
            f"it is a plan of version {said.get('version')!r}, and this bfc reads version "
            f"{VERSION}: make it anew from the recording"
        )
    parts = said.get("parts")
    right = isinstance(parts, list) and all(isinstance(part, dict) for part in parts)
    if not right or said.get("fallback") not in UNITS or type(said.get("settings")) is not str:
        raise PlanError("its description lacks the parts, the fallback or the settings")
    if len(said["parts"]) > 2 * MOST_KINDS + 1:
        raise PlanError(
            f"it has {len(said['parts'])} parts, and a plan has at most {MOST_KINDS} kinds"
        )
    numbers = [said.get(name) for name in FIGURES]
    for part in said["parts"]:
        numbers += [part.get(name) for name in ("slots", "recorded", "agreeing", "left_out")]
        if type(part.get("kind")) is not str or type(part.get("agreement")) is not float:
            raise PlanError("a part of it lacks its kind or its agreement")
        if part.get("follower") not in ("", *(other.get("kind") for other in said["parts"])):
            raise PlanError("a part of it names no kind that follows it")
        lengths = part.get("lengths")
        if lengths is not None:
            if not isinstance(lengths, list) or not 0 < len(lengths) <= MOST_KEYS:
                raise PlanError(f"the lengths of a part are not a list of up to {MOST_KEYS}")
            for key in lengths:
                if not isinstance(key, list) or len(key) != len(OF_A_KEY):
                    raise PlanError(f"a length of a part is not {len(OF_A_KEY)} numbers")
                numbers += key
    if not all(type(number) is int and 0 <= number < 1 << 60 for number in numbers):
        raise PlanError("its description holds numbers that are not whole, or not below 2**60")
    if said["peak"] == 0:
        raise PlanError("its description says that nothing was ever live")
    return said


def _checked(said: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Plan:
    """The plan of a file. Raises PlanError for one that is not possible."""
    counts = [part["slots"] for part in said["parts"]]
    for name, kind in COLUMNS.items():
        if arrays[name].dtype != kind or arrays[name].shape != (sum(counts),):
            raise PlanError(f"{name} is not an array of {sum(counts)} numbers of type {kind}")
    ends = np.cumsum(counts)[:-1]
    columns: dict[str, Any] = {name: np.split(arrays[name], ends) for name in COLUMNS}
    lengths = _lengths_of(said["parts"], arrays["growth"], arrays.get("follows"))
    parts = [
        Part(
            **{name: values[i] for name, values in columns.items()},
            **{name: described[name] for name in PART_FACTS},
            follower=described["follower"],
            lengths=lengths[i],
        )
        for i, described in enumerate(said["parts"])
    ]
    _check_roles(parts)
    plan = Plan._of(parts, **{name: said[name] for name in ("fallback", "settings", *FIGURES)})
    _check_slots(plan)
    return plan


def _told(lengths: Lengths | None) -> list[list[int]] | None:
    if lengths is None:
        return None
    return [[getattr(key, name) for name in OF_A_KEY] for key in lengths.keys]


def _lengths_of(
    parts: list[dict[str, Any]], growth: NDArray[Any], follows: NDArray[Any] | None
) -> list[Lengths | None]:
    """The lengths of each part of a file. Raises PlanError for those that cannot be."""
    slots = [part["slots"] if part.get("lengths") else 0 for part in parts]
    if growth.dtype != np.int64 or growth.shape != (3 * sum(slots),):
        raise PlanError(f"growth is not an array of {3 * sum(slots)} numbers of type int64")
    if follows is None or follows.dtype != np.uint32 or follows.shape != (sum(slots),):
        raise PlanError(f"follows is not an array of {sum(slots)} numbers of type uint32")
    ends = np.cumsum(slots)[:-1]
    rows = zip(np.split(growth.reshape(-1, 3), ends), np.split(follows, ends), strict=True)
    return [
        _lengths_of_part(part, *its) if part.get("lengths") else None
        for part, its in zip(parts, rows, strict=True)
    ]


def _lengths_of_part(part: dict[str, Any], growth: NDArray[Any], follows: NDArray[Any]) -> Lengths:
    keys = tuple(Key(*numbers) for numbers in part["lengths"])
    requests = [key.request for key in keys]
    right = part["role"] == BODY and requests == sorted(set(requests))
    right = right and requests[-1] < len(growth) and bool((follows < len(keys)).all())
    for number, key in enumerate(keys):
        most = max(key.recorded, key.longest)
        right = right and key.unit > 0 and key.longest > 0 and most < MOST_BYTES
        right = right and key.like <= number and int(follows[key.request]) == number
        right = right and key.clear <= 1 + (number == 0)
        right = right and growth[key.request].tolist() == [0, key.unit, 0]
    if not right:
        raise PlanError("the lengths of a part have no requests that tell them")
    found = Lengths(keys, follows, growth)
    longest = [max(key.recorded, key.longest) for key in keys]
    powers = np.array(longest, np.float64)[follows][:, None] ** np.arange(3)
    if not (np.abs(growth * powers) < MOST_BYTES).all():
        raise PlanError(f"a size that follows from a length is {MOST_BYTES} bytes or more")
    return found


def _check_roles(parts: list[Part]) -> None:
    roles = [(part.role, part.kind) for part in parts]
    bodies = [kind for role, kind in roles if role == BODY]
    wanted = [(HEAD, "")]
    for kind in dict.fromkeys(kind for _, kind in roles[1:]):
        wanted += [(BODY, kind)] + ([(LATE, kind)] if (LATE, kind) in roles else [])
    if roles != wanted or not all(bodies):
        raise PlanError("its parts are not a head, and bodies of different kinds")


def _check_slots(plan: Plan) -> None:
    """Raises PlanError for slots that cannot be, or that overlap."""
    unit = UNITS[plan.fallback]
    repeats = len(plan.parts) > 1
    streams = np.unique(np.concatenate([part.stream for part in plan.parts]))
    if len(streams) > MOST_STREAMS:
        raise PlanError(f"it has {len(streams)} streams, and a plan has at most {MOST_STREAMS}")
    bodies = {part.kind: len(part) for part in plan.parts if part.role == BODY}
    for part in plan.parts:
        born = np.arange(len(part))
        until = part.end
        if part.role == LATE:  # where in the body it comes
            until, born = part.end + np.uint32(1), np.zeros(len(part), np.int64)
            length = bodies[part.kind] + 1
            rises = bool((np.diff(part.end.astype(np.int64)) >= 0).all())
        else:
            length, rises = len(part), True
        if not (rises and ((until > born) & (until <= length)).all()):
            raise PlanError(f"a slot of the {part.role} ends before it begins, or behind the part")
        if part.role != LATE and not ((part.over == 0) | (part.end == len(part))).all():
            raise PlanError(f"a slot of the {part.role} outlives it, and ends in it")
        forever = part.over == FOREVER
        if (part.role == BODY and forever.any()) or (part.role == LATE and not forever.all()):
            raise PlanError("a slot is in the wrong part: it is never freed, or it is not late")
        high = part.offset + part.size
        if not ((part.size > 0) & (part.size < 1 << 60) & (part.offset < 1 << 60)).all():
            raise PlanError("a slot is empty, or 2**60 bytes or more")
        if (part.size % unit).any() or (part.offset % unit).any():
            raise PlanError(f"sizes and offsets are not multiples of {unit}")
        if not (high <= plan.span).all() or ((part.offset < plan.base) & (high > plan.base)).any():
            raise PlanError("a slot lies outside of the regions, or in both")
        if repeats and ((part.offset >= plan.base) & forever).any():
            raise PlanError("a slot that is never freed lies in the region of the bodies")
    sizes, offsets = (
        np.concatenate([getattr(part, name) for part in plan.parts]) for name in ("size", "offset")
    )
    met = lives_of(plan.parts).overlap(offsets, sizes)
    if met is not None:
        raise PlanError(f"its slots {met[0]} and {met[1]} overlap while both live")
