"""Steps that differ only in a length: three of them are followed, and say what others allocate.

A step is a list of operators, and each argument that is a number grows by the same from step to
step, or is always the same. What an operator allocates for a length is not interpolated: an
operator whose arguments grow is asked again for each length, once for all that have the same
arguments, since some take other memory at some lengths. When results are freed is a matter of the
program, and the same in all steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from bfc.libraries import np
from bfc.trace.trace import ALLOCATE, FREE
from bfc_tools.predicting.imagined import Event, Imagined
from bfc_tools.predicting.kinds import OTHER, WORKSPACES
from bfc_tools.predicting.memory import Allocation, Events, History
from bfc_tools.predicting.recorder import Recorder

_device = torch.ops.prim.device.default
#: What stands in the form of arguments as it is.
_PLAIN = (
    *(float, bool, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
#: Bytes of a number of a type.
_width = torch._utils._element_size


#: So many steps in a row make a template: what one frees was made by itself or by two before it.
STEPS = 4


class UnlikeError(Exception):
    """Steps differ in more than a length."""


class Call(NamedTuple):
    """A call of an operator: its arguments without their numbers, these, and its events."""

    function: Any
    form: tuple[Any, ...]
    numbers: tuple[int, ...]
    begin: int
    end: int

    @property
    def is_view(self) -> bool:
        """Whether it returns a part of its arguments, and writes nothing."""
        schema = getattr(self.function, "_schema", None)
        if schema is None or schema.is_mutable:
            return False
        return any(one.alias_info for one in schema.returns)


@dataclass
class Step:
    """A step that has run: its length, its calls, and its events in the memory."""

    length: int
    calls: list[Call]
    begin: int
    end: int


class Watching(TorchDispatchMode):  # type: ignore[misc]
    """Notes the calls of operators in `calls`, unless that is None. `count` counts events."""

    supports_higher_order_operators = True

    def __init__(self, count: Callable[[], int]) -> None:
        super().__init__()
        self.calls: list[Call] | None = None
        self.count = count

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.calls is None or func is _device:
            return func(*args, **kwargs)
        return self._note(self.calls, func, args, kwargs)

    def _note(self, calls: list[Call], function: Any, args: Any, kwargs: Any) -> Any:
        (form, numbers), begin = _described(args, kwargs), self.count()
        result = function(*args, **kwargs)
        calls.append(Call(function, form, numbers, begin, self.count()))
        return result

    def whole(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that calls other operators for other lengths, noted as if it was one."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            calls, self.calls = self.calls, None
            try:
                if calls is None:
                    return function(*args, **kwargs)
                return self._note(calls, function, args, kwargs)
            finally:
                self.calls = calls

        return call


def _slopes(first: Step, second: Step, last: Step) -> list[tuple[int, ...]]:
    """By how much each number in the arguments of each call grows from step to step."""
    if not len(first.calls) == len(second.calls) == len(last.calls):
        raise UnlikeError("steps call other operators than the steps before")
    found = []
    for one, two, three in zip(first.calls, second.calls, last.calls, strict=True):
        if not (
            one.function is two.function is three.function and one.form == two.form == three.form
        ):
            raise UnlikeError("steps call other operators than the steps before")
        grown = [np.subtract(b.numbers, a.numbers).tolist() for a, b in ((one, two), (two, three))]
        if grown[0] != grown[1]:
            raise UnlikeError(f"the arguments of {one.function} do not grow evenly")
        found.append(tuple(grown[0]))
    return found


def results_of(imagined: Imagined, calls: list[Call], age: int) -> dict[int, Result]:
    """The results of calls that were imagined in a step, by the number of the allocation."""
    found: dict[int, Result] = {}
    for place, call in enumerate(calls):
        events = imagined.events[call.begin : call.end]
        freed = {one.made.number for one in events if not one.born}
        left = [one.made.number for one in events if one.born and one.made.number not in freed]
        found |= {number: (age, place, turn) for turn, number in enumerate(left)}
    return found


def _described(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """What arguments are without their numbers, and these."""
    leaves, spec = tree_flatten((args, kwargs))
    form, numbers = [spec], []
    for one in leaves:
        if type(one) is int:
            form.append(int)
            numbers.append(one)
        elif isinstance(one, torch.Tensor) and one.layout is torch.strided:
            device = getattr(one, "fake_device", None) or one.device
            form.append((one.dtype, device, one.dim()))
            storage = one.untyped_storage().nbytes()
            numbers += [*one.shape, *one.stride(), one.storage_offset(), storage]
        else:
            form.append(one if isinstance(one, _PLAIN) else repr(type(one)))
    return tuple(form), tuple(map(int, numbers))


def _arguments(form: tuple[Any, ...], numbers: tuple[int, ...]) -> Any:
    """New arguments of such a description."""
    left = iter(numbers)
    leaves: list[Any] = []
    for one in form[1:]:
        if one is int:
            leaves.append(next(left))
        elif isinstance(one, tuple):
            dtype, device, dim = one
            shape, stride = ([next(left) for _ in range(dim)] for _ in range(2))
            offset, nbytes = next(left), next(left)
            whole = torch.empty(nbytes // _width(dtype), dtype=dtype, device=device)
            leaves.append(whole.as_strided(shape, stride, offset))
        elif isinstance(one, _PLAIN):
            leaves.append(one)
        else:
            raise UnlikeError(f"an argument is {one}")
    return tree_unflatten(leaves, form[0])


class Inside(NamedTuple):
    """What a call allocates: of each of its events the place of the allocation among those of the
    call, below 0 where it is freed (-1 is the first); and of each allocation its size and kind."""

    places: tuple[int, ...]
    sizes: tuple[int, ...]
    kinds: tuple[int, ...]

    @property
    def results(self) -> list[int]:
        """The places of what it leaves."""
        freed = {~one for one in self.places if one < 0}
        return [one for one in self.places if one >= 0 and one not in freed]


def _inside(events: list[Event]) -> Inside:
    """The same of what was imagined."""
    numbers = [one.made.number for one in events if one.born]
    places = []
    for one in events:
        if one.made.number not in numbers:
            raise UnlikeError("an operator frees what it has not made")
        place = numbers.index(one.made.number)
        places.append(place if one.born else ~place)
    births = [one for one in events if one.born]
    sizes = tuple(one.made.nbytes for one in births)
    return Inside(tuple(places), sizes, tuple(one.kind for one in births))


#: A result of a step: how many steps ago that was, the call, and which of its results.
Result = tuple[int, int, int]
#: So many steps after the one that has made it a result may be freed.
OLDEST = 2


class Read:
    """The events of a step by its calls. `before` are the steps before it, the last one first; what
    it frees is read if these are so many as count."""

    def __init__(self, history: History, step: Step, *before: Read) -> None:
        self._history, self._before = history, before[:OLDEST]
        self.inside: list[Inside] = []
        self.births: list[list[int]] = []  # of each call, its events that allocate
        self.results: dict[int, Result] = {}
        for place, call in enumerate(step.calls):
            self._read_call(place, call)
        #: Before the first call, and behind each: the events that free, and what.
        self.frees: list[list[tuple[int, Result]]] = []
        if len(self._before) == OLDEST:
            begins = [one.begin for one in step.calls]
            ends = [one.end for one in step.calls]
            gaps = zip([step.begin, *ends], [*begins, step.end], strict=True)
            self.frees = [[*self._gap(begin, end)] for begin, end in gaps]

    def _read_call(self, place: int, call: Call) -> None:
        history = self._history
        births: dict[int, int] = {}  # the events by the number of the allocation
        places = []
        for event in range(call.begin, call.end):
            number = history.id[event]
            if history.op[event] == ALLOCATE:
                births[number] = event
                places.append(len(births) - 1)
            elif history.op[event] == FREE and number in births:
                places.append(~list(births).index(number))
            else:
                raise UnlikeError(f"{call.function} frees what it has not made")
        sizes = tuple(history.size[event] for event in births.values())
        kinds = tuple(history.kinds[number] for number in births)
        inside = Inside(tuple(places), sizes, kinds)
        for turn, one in enumerate(inside.results):
            self.results[list(births)[one]] = (0, place, turn)
        self.inside.append(inside)
        self.births.append(list(births.values()))

    def _gap(self, begin: int, end: int) -> Iterator[tuple[int, Result]]:
        """What is freed between two calls."""
        for event in range(begin, end):
            if self._history.op[event] != FREE:
                raise UnlikeError("memory is taken by no operator")
            for age, step in enumerate((self, *self._before)):
                found = step.results.get(self._history.id[event])
                if found is not None:
                    yield event, (age, *found[1:])
                    break
            else:
                raise UnlikeError("a step frees what none of the last has made")

    @property
    def order(self) -> list[list[Result]]:
        """What is freed before the first call, and behind each."""
        return [[one for _, one in gap] for gap in self.frees]


class _Event(NamedTuple):
    """An event of a step: its call, and its place there, as in `Inside`; of an allocation its slot
    among the sizes of those that grow (below 0: its size is always the same) and its kind; of what
    is freed between calls the result; and the event of the last step that it is like."""

    call: int
    place: int
    slot: int
    kind: int
    result: Result | None
    like: int


class Template:
    """What the steps after some others allocate, and what they free.

    Parameters
    ----------
    recorder : Recorder
        What has recorded these.
    steps : list of Step
        The last `STEPS`, each longer by one than the one before.

    Raises
    ------
    UnlikeError
        If they differ in more than a length.
    """

    def __init__(self, recorder: Recorder, steps: list[Step]) -> None:
        self.memory = memory = recorder.memory
        self._recorder = recorder
        oldest, first, second, last = steps
        self.calls, self.length, self.begin = last.calls, last.length, last.begin
        self._slopes = _slopes(first, second, last)
        reads = [Read(memory.history, oldest)]
        for step in (first, second, last):
            reads.insert(0, Read(memory.history, step, *reads))
        two, one = reads[:OLDEST]
        self.read, self._reads = two, reads[:3]
        freed = sorted(result[1:] for gap in two.order for result in gap)
        if one.order != two.order or freed != sorted(one[1:] for one in two.results.values()):
            raise UnlikeError("steps free other memory than the steps before")
        ages = {result[1:]: result[0] for gap in two.order for result in gap}
        #: What a step leaves to later ones.
        self.lasting = [one for one in two.results.values() if ages[one[1:]]]
        self._ages = [ages[one[1:]] for one in self.lasting]
        self._classes: dict[Any, int] = {}
        self._of_class: list[int] = []  # the first call of each class
        self._class = [self._class_of(place, one, two) for place in range(len(self.calls))]
        self._layouts: dict[Any, _Layout] = {}
        self._insides: dict[int, list[Inside]] = {}

    def _class_of(self, place: int, one: Read, two: Read) -> int:
        """The class of a call whose arguments grow and that allocates; else -1."""
        call, slopes = self.calls[place], self._slopes[place]
        inside = two.inside[place]
        if not any(slopes) or call.is_view:
            if one.inside[place] != inside:
                raise UnlikeError(f"{call.function} does not always allocate the same")
            return -1
        key = call.function, *map(repr, call.form), call.numbers, slopes
        if key not in self._classes:
            self._classes[key] = len(self._of_class)
            self._of_class.append(place)
        found = self.inside_of(place, self.length)
        if found[:2] != inside[:2]:
            raise UnlikeError(f"what {call.function} allocates depends on more than its arguments")
        return self._classes[key]

    def numbers(self, place: int, length: int) -> tuple[int, ...]:
        """The numbers in the arguments of a call at a length."""
        more = length - self.length
        pairs = zip(self.calls[place].numbers, self._slopes[place], strict=True)
        return tuple(number + more * slope for number, slope in pairs)

    def inside_of(self, place: int, length: int) -> Inside:
        """What a call allocates at a length."""
        call = self.calls[place]
        with self._recorder.imagining() as imagined:
            args, kwargs = _arguments(call.form, self.numbers(place, length))
            begin = len(imagined.events)
            result = call.function(*args, **kwargs)
            found = _inside(imagined.events[begin:])
            del result, args, kwargs
        return found

    def fits(self, calls: list[Call], length: int) -> bool:
        """Whether a step of a length makes such calls."""
        return len(calls) == len(self.calls) and all(
            one.function is like.function
            and one.form == like.form
            and one.numbers == self.numbers(place, length)
            for place, (one, like) in enumerate(zip(calls, self.calls, strict=True))
        )

    def reach(self, until: int) -> int:
        """Asks what the calls allocate at each length up to one; returns up to which they say."""
        lines = [self._line(place, until) for place in self._of_class]
        for length in range(self.length + 1, until + 1):
            try:
                self._insides[length] = [
                    self.inside_of(place, length) if line is None else line(length - self.length)
                    for place, line in zip(self._of_class, lines, strict=True)
                ]
            except (UnlikeError, RuntimeError):
                return length - 1
        return until

    def play(self, until: int, lasting: dict[int, Allocation]) -> dict[Result, Allocation]:
        """Plays the steps up to a length. `lasting` is what those before have left, by number.
        Returns what is left."""
        before = [self._left(read) for read in self._reads[:OLDEST]]
        addresses = {number: made.address for number, made in lasting.items()}
        for made in lasting.values():
            made.address = 0
        for length in range(self.length + 1, until + 1):
            before = [self._play(self._insides[length], before, addresses), before[0]]
        found = {}
        for age, (numbers, sizes) in enumerate(before):
            for place, result in enumerate(self.lasting):
                if self._ages[place] > age:
                    number, nbytes = int(numbers[place]), int(sizes[place])
                    made = lasting.get(number) or Allocation(number, nbytes, 0, -1)
                    made.address = addresses[number]
                    found[age, *result[1:]] = made
        return found

    def _line(self, place: int, until: int) -> Callable[[int], Inside] | None:
        """What a call allocates so many lengths behind the last step, if it is an operator that has
        no rule, whose results grow evenly from step to step and up to the longest one; else None.
        """
        last, *others = (read.inside[place] for read in self._reads)
        if not self._recorder.is_plain(self.calls[place].function):
            return None
        last = self.inside_of(place, self.length)
        slopes = np.subtract(last.sizes, others[0].sizes)

        def line(more: int) -> Inside:
            sizes = tuple((np.array(last.sizes) + more * slopes).tolist())
            return Inside(last.places, sizes, last.kinds)

        given = (-2, others[1]), (until - self.length, self.inside_of(place, until))
        even = all(line(more)[:2] == inside[:2] for more, inside in given)
        return line if even else None

    def _left(self, read: Read) -> tuple[Any, Any]:
        """The numbers and sizes of what a step left that was run."""
        numbers = {result: number for number, result in read.results.items()}
        sizes = [
            read.inside[call].sizes[read.inside[call].results[turn]]
            for _, call, turn in self.lasting
        ]
        return np.array([numbers[one] for one in self.lasting]), np.array(sizes)

    def _play(
        self, insides: list[Inside], before: Any, addresses: dict[int, int]
    ) -> tuple[Any, Any]:
        shape = tuple((one.places, one.kinds) for one in insides)
        layout = self._layouts.get(shape)
        if layout is None:
            layout = self._layouts[shape] = _Layout(self, insides)
        flat = np.array([size for one in insides for size in one.sizes] or [0], np.int64)
        sizes = np.where(layout.slots >= 0, flat[layout.slots], layout.sizes)
        numbers = len(self.memory.history.kinds) + np.arange(len(sizes))
        (one, one_sizes), (two, two_sizes) = before
        number = np.concatenate((numbers, one, two))[layout.refs]
        size = np.concatenate((sizes, one_sizes, two_sizes))[layout.refs]
        self.memory.play(Events(layout.op, number, size, layout.places), addresses)
        return numbers[layout.lasting], sizes[layout.lasting]

    def has_left(self, made: Allocation) -> bool:
        """Whether an allocation is of one of the steps that the template begins with."""
        return any(made.number in read.results for read in self._reads[:OLDEST])

    def inside_now(self, call: int, insides: list[Inside]) -> Inside:
        """What a call allocates, if those of each class allocate so much."""
        return self.read.inside[call] if self._class[call] < 0 else insides[self._class[call]]

    def events(self, insides: list[Inside]) -> Iterator[_Event]:
        """The events of a step, in order."""
        begins = np.cumsum([0, *(len(one.sizes) for one in insides)]).tolist()
        last = self.read.births[0][0] if self.read.births[0] else self.begin
        for gap, frees in enumerate(self.read.frees):
            if gap:
                call = gap - 1
                inside, at = self.inside_now(call, insides), self._class[call]
                births = self.read.births[call]
                for one in inside.places:
                    last = births[min(one, len(births) - 1)] if one >= 0 and births else last
                    slot = -1 if at < 0 else begins[at] + one
                    yield _Event(call, one, slot, self._kind(call, inside, one), None, last)
            for event, result in frees:
                yield _Event(-1, -1, -1, 0, result, event)

    def _kind(self, call: int, inside: Inside, one: int) -> int:
        """The kind of an allocation of a call: a result's may have been told afterwards."""
        if one < 0:
            return 0
        recorded = self.read.inside[call]
        if one in inside.results and len(inside.results) == len(recorded.results):
            return recorded.kinds[recorded.results[inside.results.index(one)]]
        plain = [kind for kind in recorded.kinds if kind != WORKSPACES]
        return inside.kinds[one] or (plain or [OTHER])[0]


class _Layout:
    """The events of a step whose calls allocate as these, but for their sizes."""

    def __init__(self, template: Template, insides: list[Inside]) -> None:
        self._template, self._insides = template, insides
        #: By call and place: the number of an allocation among those of the step.
        self._births: dict[tuple[int, int], int] = {}
        op, refs, slots, sizes, kinds, like = [], [], [], [], [], []
        calls = range(len(template.calls))
        self._count = sum(len(template.inside_now(one, insides).sizes) for one in calls)
        for event in template.events(insides):
            born = event.result is None and event.place >= 0
            op.append(ALLOCATE if born else FREE)
            refs.append(self._born(event) if born else self._freed(event))
            like.append(event.like)
            if born:
                slots.append(event.slot)
                kinds.append(event.kind)
                recorded = event.slot < 0
                sizes.append(template.read.inside[event.call].sizes[event.place] * recorded)
        self.op, self.refs = np.array(op, np.uint8), np.array(refs, np.int64)
        self.slots, self.sizes = np.array(slots, np.int64), np.array(sizes, np.int64)
        self.lasting = [self._of_result(one) for one in template.lasting]
        self.places = _columns(template.memory.history, np.array(like), self.op == ALLOCATE, kinds)

    def _born(self, event: _Event) -> int:
        return self._births.setdefault((event.call, event.place), len(self._births))

    def _freed(self, event: _Event) -> int:
        """Where what is freed stands, if the allocations of the step are followed by what the
        step before has left, and the one before that."""
        if event.result is None:
            return self._births[event.call, ~event.place]
        age, lasting = event.result[0], self._template.lasting
        if not age:
            return self._of_result(event.result)
        place = lasting.index((0, *event.result[1:]))
        return self._count + (age - 1) * len(lasting) + place

    def _of_result(self, result: Result) -> int:
        _, call, turn = result
        return self._births[call, self._template.inside_now(call, self._insides).results[turn]]


def _columns(history: History, like: Any, born: Any, kinds: list[int]) -> dict[str, bytes]:
    """Where in the program events stand that are like others, as columns."""
    found = {"kinds": np.array(kinds, np.uint8).tobytes()}
    made_for = [history.made_for[history.id[event]] for event in like[born].tolist()]
    found["made_for"] = np.array(made_for, history.made_for.typecode).tobytes()
    for name in ("stream", "owner", "stack", "phase"):
        column = getattr(history, name)
        values = np.array([column[event] for event in like.tolist()], column.typecode)
        if name != "phase":
            values[~born] = 0
        found[name] = values.tobytes()
    return found
