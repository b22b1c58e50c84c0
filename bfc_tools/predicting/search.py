"""The largest value of a script's argument that fits, or of one argument for each value of another:
first how the script takes it is found out, then the value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from bfc.units import printable
from bfc_tools.predicting.asked import Asked
from bfc_tools.predicting.axes import Axis, Form
from bfc_tools.predicting.failures import FINDERS
from bfc_tools.predicting.largest import Largest, as_text, learn, settle, table, wanted
from bfc_tools.predicting.tries import Question, Runs, Tried

Key = TypeVar("Key")
#: The most values of a second argument that are looked at.
MOST_ROWS = 9


class _Once:
    """Asks each question once, and knows the answer from then on."""

    def __init__(self, tries: Runs) -> None:
        self._tries, self.width = tries, tries.width
        self._known: dict[Question, Tried] = {}

    def outcomes(self, questions: Mapping[Key, Question]) -> Iterator[tuple[Key, Tried]]:
        """As others have them."""
        new = {key: asked for key, asked in questions.items() if asked not in self._known}
        for key, asked in questions.items():
            if key not in new:
                yield key, self._known[asked]
        for key, tried in self._tries.outcomes(new):
            self._known[new[key]] = tried
            yield key, tried


class Search:
    """The search for the largest value of one argument of a script, or of one for each value of a
    second. What has been found so far can be read at any time. `told` is called with each try: its
    values by name, and what it came to."""

    def __init__(
        self, asked: Asked, axes: Sequence[Axis], told: Callable[[dict[str, int], Tried], object]
    ) -> None:
        if len(axes) > 2:
            raise ValueError("--largest varies one argument, or two; give the others values")
        if len({axis.name for axis in axes}) < len(axes):
            raise ValueError(f"--largest {axes[0].name} is there twice: name another argument")
        self.asked, self.axes, self.told = asked, list(axes), told
        self.forms: list[Form] = []
        #: By the value of the second argument, or, without one, by 0.
        self.found: dict[int, Largest] = {}
        text = asked.text()
        self.finders = [word for word in FINDERS if word in text and not asked.oom]

    @property
    def hints(self) -> list[str]:
        """What else has to be said."""
        if not self.finders:
            return sorted({hint for one in self.found.values() for hint in one.hints})
        hint = (
            f"The program names {self.finders[0]}, and finds its batch size itself: with --oom, "
            "and without --largest, one prediction says which it takes."
        )
        return [hint]

    def run(self, tries: Runs) -> None:
        """Searches.

        Raises ValueError if the script takes an argument in none of the usual forms, or if it
        changes nothing.
        """
        tries = _Once(tries)
        first, *rest = self.axes
        form, known = self._form(tries, first, self.asked)
        self.forms, values = [form], [0]
        self.found.clear()
        if rest:
            other, _ = self._form(tries, rest[0], form.give(self.asked, first.values[0]))
            self.forms.append(other)
            values = _some(rest[0].values)
        for value in values:
            self.found[value] = self._new(first, form) if rest else known
        settle(tries, self.found, self._question, self._learned)

    def _new(self, axis: Axis, form: Form) -> Largest:
        return Largest(axis.name, axis.values, str(form))

    def _question(self, other: int, value: int) -> Asked:
        asked = self.forms[0].give(self.asked, value)
        return self.forms[1].give(asked, other) if len(self.forms) > 1 else asked

    def _learned(self, other: int, value: int, tried: Tried) -> None:
        values = {self.axes[0].name: value}
        if len(self.axes) > 1:
            values[self.axes[1].name] = other
        self.told(values, tried)

    def _form(self, tries: Runs, axis: Axis, asked: Asked) -> tuple[Form, Largest]:
        """The form in which the script takes an argument, and what the first two tries have shown:
        the memory of these must differ."""
        rejected: dict[str, Tried] = {}
        ignored: list[str] = []
        for form in axis.forms(asked):
            search, tried = self._new(axis, form), []
            questions = {
                at: form.give(asked, axis.values[at]) for at in wanted(search, tries.width)
            }
            if not self.forms:  # should the search end here, these are told
                self.found = {0: search}
            for at, one in tries.outcomes(questions):
                learn(search, at, one)
                tried.append(one)
                self.told({axis.name: axis.values[at]}, one)
            if all(one.was_rejected for one in tried):
                rejected[str(form)] = tried[0]
            elif _is_ignored(tried):
                ignored.append(str(form))
            else:
                return form, search
        self.found.clear()  # of an argument that is not taken no try tells anything
        raise ValueError(_not_taken(asked.called, axis, rejected, ignored))

    # -- what is said ---------------------------------------------------------------------------

    @property
    def fits(self) -> bool:
        """Whether there is an answer."""
        return any(one.fits for one in self.found.values())

    @property
    def is_known(self) -> bool:
        """Whether anything is known of any value."""
        return any(row.fits is not None for one in self.found.values() for row in one.tries)

    @property
    def failure(self) -> str:
        """What is said if nothing is known."""
        return "\n".join(map(str, self.found.values()))

    @property
    def answer(self) -> str:
        """The first line."""
        if not self.found:
            return "Nothing was found."
        if len(self.axes) == 1:
            return self.found[0].answer
        name, other = self.axes[0].name, self.axes[1].name
        pairs = [f"{one.value} x {value}" for value, one in self.found.items() if one.fits]
        on = next((one.device for one in self.found.values() if one.device), "the device")
        if not pairs:
            return f"No {name} fits on {on}, whatever the {other}."
        return f"The largest {name} x {other} that fit on {on}: {', '.join(pairs)}."

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        if len(self.axes) == 1 and self.found:
            return self.found[0].to_dict() | {"hints": self.hints}
        return {
            "fits": self.fits,
            "answer": self.answer,
            "other": self.axes[-1].name,
            "hints": self.hints,
            "frontier": [one.to_dict() | {"other": value} for value, one in self.found.items()],
        }

    def __str__(self) -> str:
        if len(self.axes) == 1 and self.found:
            return as_text(self.found[0], self.hints)
        name, other = self.axes[0].name, self.axes[-1].name
        lines = [self.answer]
        if self.forms:
            lines.append(f"The script takes them as {' '.join(map(str, self.forms))}.")
        lines += [*self.hints, "", f"{other:>12}  largest {name}"]
        for value, one in self.found.items():
            lines.append(f"{value:>12}  {one.value if one.fits else '-'}")
        for value, one in self.found.items():
            lines += ["", f"{other} {value}: {one.answer}", *table(one)]
        return "\n".join(map(printable, lines))


def _is_ignored(tried: Sequence[Tried]) -> bool:
    """Whether an argument changes nothing in the memory of two tries."""
    known = [one.use for one in tried if not one.is_mistake]
    return len(known) > 1 and len(set(known)) == 1


def _some(values: Sequence[int]) -> list[int]:
    """These values, or if they are many, some of them: each about so many times the last."""
    if len(values) <= MOST_ROWS:
        return list(values)
    first, last = max(1, values[0]), values[-1]
    wanted = [first * (last / first) ** (n / (MOST_ROWS - 1)) for n in range(MOST_ROWS)]
    return sorted({min(values, key=lambda value: abs(value - one)) for one in wanted} | {last})


def _not_taken(script: str, axis: Axis, rejected: dict[str, Tried], ignored: list[str]) -> str:
    """What is said of an argument that the script does not have, or does not use."""
    lines = []
    if ignored:
        lines.append(
            f"{axis.name} changes nothing in what {script} does on the GPU, given as "
            f"{' or as '.join(ignored)}: its memory is the same with {axis.values[0]} and with "
            "more. Is that its name?"
        )
    if rejected:
        lines.append(f"{script} ended before it used the GPU when it was given any of these:")
        lines.append(f"  {', '.join(rejected)}")
        last = next(iter(rejected.values()))
        lines += [f"  {line}" for line in (last.output or last.error).splitlines()]
    if not axis.is_variable:
        lines.append(
            f"An argument in the midst of others is written {{{axis.name}}} where it belongs; "
            f"a variable of the environment is env:{axis.name}=1..512"
        )
    return "\n".join(lines)
