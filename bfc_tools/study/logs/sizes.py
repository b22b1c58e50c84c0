"""Sizes as other programs print them: rounded, in units of their own."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: A size in a log, to be put into other patterns: it has two groups, the number and the unit.
SIZE = r"(\d{1,20}(?:\.\d{1,4})?) ?(bytes|[KMGTPE]i?B|B|[KMGT]\b)"

_SHIFTS = {"K": 10, "M": 20, "G": 30, "T": 40, "P": 50, "E": 60}
#: No device has as much: such a figure is a counter that fell below 0, as PyTorch prints under WSL.
_TOO_MUCH = 1 << 50
_SIZE = re.compile(SIZE)


@dataclass(frozen=True)
class Printed:
    """A size that was printed: `nbytes`, from which the true size differs by at most `off`."""

    nbytes: int
    off: int = 0

    def may_be(self, nbytes: int) -> bool:
        """Whether the true size may be this one."""
        return abs(self.nbytes - nbytes) <= self.off


def printed(number: str, unit: str = "B") -> Printed | None:
    """What a number and its unit say; None for a size that no device has.

    >>> printed("1.5", "GiB"), printed("1234")
    (Printed(nbytes=1610612736, off=107374183), Printed(nbytes=1234, off=0))
    """
    whole, _, decimals = number.partition(".")
    scale = 1 << _SHIFTS.get(unit[0], 0)
    tens = 10 ** len(decimals)
    nbytes = int(whole + decimals) * scale // tens
    if nbytes >= _TOO_MUCH:
        return None
    # Upstream's formats truncate in one place and round in another.
    return Printed(nbytes, scale // tens + 1 if scale > 1 else 0)


def size_in(text: str) -> Printed | None:
    """The first size in a text, or None.

    >>> size_in("of which 62.12 MiB is free")
    Printed(nbytes=65137541, off=10486)
    """
    found = _SIZE.search(text)
    return None if found is None else printed(found[1], found[2])
