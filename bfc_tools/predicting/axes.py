"""What is varied from try to try: an argument of a script, or a variable of its environment."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bfc_tools.predicting.asked import Asked

RANGE = re.compile(r"(\d+)\.\.(\d+)(?::(\d+))?")
HOW = "write a range, as batch-size=1..512 or batch-size=8..512:8, or values, as batch-size=8,16,32"
#: How a variable of the environment is named.
VARIABLE = "env:"


@dataclass(frozen=True)
class Form:
    """How a script is given the value of an argument."""

    shown: str  # with {} for the value; as many words as it has
    at: int | None = None  # which of the script's words stands there already
    kind: str = "words"  # or "variable", or "inside" of a word

    def give(self, asked: Asked, value: int) -> Asked:
        """The same with a value."""
        text = self.shown.replace("{}", str(value))
        if self.kind == "variable":
            name, _, given = text.partition("=")
            return replace(asked, environment=(*asked.environment, (name, given)))
        words, new = list(asked.arguments), text.split(" ", 1)
        if self.kind == "inside":
            words[self.at or 0] = text
        elif self.at is None:
            words += new
        else:
            words[self.at : self.at + len(new)] = new
        return replace(asked, arguments=tuple(words))

    def __str__(self) -> str:
        return self.shown.replace("{}", "N")


@dataclass(frozen=True)
class Axis:
    """A name, and the values that it may have, which rise."""

    name: str
    values: Sequence[int]
    is_variable: bool = False

    @classmethod
    def parse(cls, text: str) -> Axis:
        """An axis as an option has it, such as "batch-size=1..512" or "env:BATCH=8,16".

        Raises ValueError with what is wrong.
        """
        name, equals, given = text.removeprefix(VARIABLE).partition("=")
        if not equals or not name or name != name.strip():
            raise ValueError(f"--largest {text}: {HOW}")
        return cls(name, values_of(given, f"--largest {text}"), text.startswith(VARIABLE))

    def forms(self, asked: Asked) -> list[Form]:
        """How the script may take it, the likely ones first: as it stands among its arguments, or
        else in all ways that are usual."""
        if self.is_variable:
            return [Form(f"{self.name}={{}}", kind="variable")]
        standing = self._standing(asked.arguments)
        if standing is not None:
            return [standing]
        bare = self.name.lstrip("-")
        names = dict.fromkeys((bare, bare.replace("-", "_"), bare.replace("_", "-")))
        if self.name.startswith("-"):
            return [Form(f"{self.name} {{}}"), Form(f"{self.name}={{}}")]
        short = [Form(f"-{bare} {{}}")] if len(bare) == 1 else []
        ways = ("--{} {{}}", "--{}={{}}", "{}={{}}")
        return short + [Form(way.format(name)) for name in names for way in ways]

    def _standing(self, words: Sequence[str]) -> Form | None:
        """How it stands among the arguments, if it does: the last one, which counts."""
        place, found = "{" + self.name + "}", None
        bare = self.name.lstrip("-")
        options = (self.name,) if self.name.startswith("-") else (f"--{bare}", f"-{bare}")
        for at, word in enumerate(words):
            name, equals, _ = word.partition("=")
            if place in word:
                return Form(word.replace(place, "{}"), at, "inside")
            if word in options and at + 1 < len(words):
                found = Form(f"{word} {{}}", at)
            elif equals and name in (*options, bare):
                found = Form(f"{name}={{}}", at)
        return found


def values_of(text: str, given: str = "") -> Sequence[int]:
    """The values that a text such as "1..512", "8..512:8" or "8,16,32" names, from the smallest.

    Raises ValueError with what is wrong; `given` is what the user wrote.

    >>> list(values_of("8..32:8")), values_of("16,8")
    ([8, 16, 24, 32], [8, 16])
    """
    ranged = RANGE.fullmatch(text)
    if ranged is None:
        if not re.fullmatch(r"\d+(,\d+)*", text):
            raise ValueError(f"{given}: {HOW}")
        return sorted(set(map(int, text.split(","))))
    first, last, step = int(ranged[1]), int(ranged[2]), int(ranged[3] or 1)
    if step < 1:
        raise ValueError(f"{given}: the step is 1 or more, not {step}")
    if last < first:
        raise ValueError(f"{given}: the range is empty. The smallest comes first: {last}..{first}")
    return range(first, last + 1, step)
