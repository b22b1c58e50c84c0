"""One figure of a case: the text that was published, and the number that is measured here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_UNITS = {"": 1, "B": 1, "bytes": 1}
_UNITS |= {name: 1024**power for power, name in enumerate(("KiB", "MiB", "GiB", "TiB"), 1)}
_UNITS |= {name: 1000**power for power, name in enumerate(("KB", "MB", "GB", "TB"), 1)}
_NUMBER = re.compile(r"(-?[\d,]+(?:\.(\d+))?) ?([A-Za-z]*)")


@dataclass(frozen=True)
class Figure:
    """What was measured, as text and as number.

    `text` is "2,980 MiB", "0.27 GiB", "33" or a word such as "refused". KiB, MiB and GiB are powers
    of 1024, and KB, MB and GB powers of 1000: a case says so where a thread calls the former MB.
    """

    what: str
    text: str
    measured: float | str
    #: "used": published, and the case was built with it; "published": published, and not used;
    #: "cured": measured here, after the cure; "cured, published": the same, and published there.
    role: str

    @property
    def shown(self) -> str:
        """The measured figure, as the text is written: with its unit and its decimals."""
        if isinstance(self.measured, str):
            return self.measured
        _, decimals, unit = self._parts()
        number = f"{self._scaled():,.{decimals}f}"
        return f"{number} {unit}" if unit else number

    @property
    def exact(self) -> bool:
        """Whether the measured figure is the text to its last digit, rounded or cut off there."""
        if isinstance(self.measured, str):
            return self.measured == self.text
        number, decimals, _ = self._parts()
        scaled, step = self._scaled(), 10.0**decimals
        nearest = {math.floor(scaled * step + 1e-9), round(scaled * step), _half_up(scaled * step)}
        return round(number * step) in nearest

    @property
    def error(self) -> float:
        """How far the measured figure is from the text, as a part of the text; 0 if it is exact,
        and infinite for another word."""
        if self.exact:
            return 0.0
        if isinstance(self.measured, str):
            return math.inf
        number = self._parts()[0]
        return abs(self._scaled() - number) / abs(number) if number else math.inf

    def _scaled(self) -> float:
        assert not isinstance(self.measured, str)
        return self.measured / _UNITS[self._parts()[2]]

    def _parts(self) -> tuple[float, int, str]:
        """The number in the text, its decimals, and its unit."""
        match = _NUMBER.fullmatch(self.text)
        if match is None or match[3] not in _UNITS:
            raise ValueError(
                f"{self.text!r} is not a figure such as '2,980 MiB', '0.27 GiB' or '33'"
            )
        return float(match[1].replace(",", "")), len(match[2] or ""), match[3]


def _half_up(number: float) -> int:
    return math.floor(number + 0.5)
