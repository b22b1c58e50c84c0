"""Numbers on the command line; and sizes of devices, where a wrong unit costs a wrong answer."""

from __future__ import annotations

import argparse
import re

from bfc.units import format_bytes, parse_bytes
from bfc_tools.cli.streams import tell

#: No device is smaller. A smaller number without a unit lacks one.
LEAST = 1 << 20
_DECIMAL = re.compile(r"[\d.\s]+[kmgt]b\s*", re.IGNORECASE)


def device_bytes(text: str, given: str) -> int:
    """The bytes of a device, or of a part of one. `given` is the option as the user wrote it.

    A number without a unit is refused if it is too small to be one of bytes. What GB and the like
    are taken for is said on stderr: powers of 1000, where many mean powers of 1024. With the
    smaller of the two no run is said to fit that does not.
    """
    nbytes = parse_bytes(text)
    number = text.strip()
    if number.isdecimal() and 0 < nbytes < LEAST:
        unit = "GiB" if nbytes < 1024 else "MiB"
        raise ValueError(f"{given}: {number} bytes? Write {number}{unit}, or {number}B")
    if _DECIMAL.fullmatch(text):
        binary = f"{number[:-1]}iB"
        tell(
            f"bfc: {given}: {number} is {nbytes} bytes, which is {format_bytes(nbytes)}. "
            f"If you mean powers of 1024, write {binary}"
        )
    return nbytes


def positive(text: str) -> int:
    """A count of something."""
    return _number(text, least=1)


def whole(text: str) -> int:
    """A number from 0 on."""
    return _number(text, least=0)


def _number(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return value
