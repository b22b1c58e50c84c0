"""Sizes as people write them: "4 GiB" is 4294967296; and columns, and texts of strangers."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from typing import SupportsIndex

MAX_BYTES = 2**63 - 1

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {name[:end]: _UNITS[name] for name in ("kib", "mib", "gib", "tib") for end in (1, 2)}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_MOST_DIGITS = 100


def parse_bytes(size: SupportsIndex | str) -> int:
    """A number of bytes from an int or a string.

    Parameters
    ----------
    size : int or str
        KiB, MiB, GiB and TiB are powers of 1024, and so are K, M, G and T, and Ki, Mi, Gi and Ti.
        KB, MB, GB and TB are powers of 1000. Upper and lower case are the same.

    Returns
    -------
    int
        From 0 to 2**63 - 1.

    Raises
    ------
    TypeError
        If `size` is neither an int nor a string.
    ValueError
        If `size` is malformed, negative or above 2**63 - 1.

    Examples
    --------
    >>> parse_bytes("3 MiB"), parse_bytes("3M"), parse_bytes(700), parse_bytes("1.5 GB")
    (3145728, 3145728, 700, 1500000000)
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(
                f"{size!r} is not a size: write a number and B, KiB, MiB, GiB or TiB, "
                "such as '4 GiB'"
            )
        if len(match[1]) > _MOST_DIGITS:
            raise ValueError(
                f"a size lies between 0 and 2**63 - 1 bytes: this one has {len(match[1])} digits"
            )
        scale = _UNITS[match[2].lower()]
        value = int(match[1]) * scale if match[1].isdigit() else round(float(match[1]) * scale)
    else:
        try:
            value = as_int(size)
        except TypeError:
            raise TypeError(
                f"a size is an int or a text such as '4 GiB', not {type(size).__name__}"
            ) from None
    if not 0 <= value <= MAX_BYTES:
        raise ValueError(f"a size lies between 0 and 2**63 - 1 bytes, not {value}")
    return value


def as_int(value: SupportsIndex) -> int:
    """`operator.index`, which refuses a bool: as a size, a stream or an address it is a mistake.
    Raises TypeError."""
    if isinstance(value, bool):
        raise TypeError("a bool is not a number here")
    return operator.index(value)


def format_bytes(nbytes: int) -> str:
    """A number of bytes for people, as TensorFlow writes it.

    Parameters
    ----------
    nbytes : int
        The number.

    Returns
    -------
    str
        With one decimal in KiB, and with two in MiB and larger units.

    Examples
    --------
    >>> format_bytes(700), format_bytes(1 << 20), format_bytes(3 << 29)
    ('700 B', '1.00 MiB', '1.50 GiB')
    """
    if abs(nbytes) < 1 << 10:
        return f"{nbytes} B"
    if abs(nbytes) < 1 << 20:
        return f"{nbytes / (1 << 10):.1f} KiB"
    for unit, shift in (("MiB", 20), ("GiB", 30), ("TiB", 40)):
        if abs(nbytes) < 1 << (shift + 10):
            return f"{nbytes / (1 << shift):.2f} {unit}"
    return f"{nbytes / (1 << 50):.2f} PiB"


def printable(text: str) -> str:
    """A stranger's text as it is shown: it must not move the terminal's cursor.

    Parameters
    ----------
    text : str
        Such as the name of a module, or of a file.

    Returns
    -------
    str
        The same, or its `ascii` if it has anything that cannot be printed.

    Examples
    --------
    >>> print(printable("layers.0"), printable("layers.0" + chr(27)))
    layers.0 'layers.0\\x1b'
    """
    return text if text.isprintable() else ascii(text)


def in_columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table for people. Texts of the first column stand to the left, and figures in
    all others to the right. A cell that cannot be printed as it is stands as its `ascii`.

    >>> list(in_columns([("run", "bytes"), ("unet", "7 B")]))
    ['run   bytes', 'unet    7 B']
    """
    shown = [list(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for first, *others in shown:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *cells]).rstrip()
