"""Reads a pickle of plain values without Python's unpickler: nothing in it can be executed.

It understands the operations that build None, bool, int, float, str, list, tuple and dict with
string keys, in protocols 2 to 5. Every other operation is an error. There is no recursion, a length
is compared with what the file holds before memory is allocated for it, and there may be at most one
list, tuple or dict for every 8 bytes. So the values of a hostile file take at most about 30 times
its size, plus 16 MiB. Values may share parts, and so stand for far more than the file holds: code
that walks through them has to count.
"""

from __future__ import annotations

from typing import Any

from bfc.errors import TraceError
from bfc.pytorch._pickle import Machine
from bfc.pytorch._recording import Packer

#: The most lists, tuples and dicts that a file may make, and the most values in all of them.
MOST_CONTAINERS = 1 << 24
#: And the most for a file's size: one for so many bytes, in addition to FIRST_CONTAINERS.
BYTES_A_CONTAINER = 8
FIRST_CONTAINERS = 1 << 12
MOST_VALUES = 1 << 27
#: The most values that may wait on the stack to be put into a container.
MOST_WAITING = 1 << 20
#: How many operations are read between two checks of the stack and of these limits.
TURN = 1 << 14

#: What the refused operations would do.
_REFUSED = {
    **dict.fromkeys(b"PQ", "asks for an object outside the file (a persistent id)"),
    **dict.fromkeys(b"Rob\x81\x92", "asks to build an object"),
    **dict.fromkeys(b"\x82\x83\x84", "names a class by an extension number"),
    **dict.fromkeys(b"BC\x8e\x96", "holds bytes"),
    **dict.fromkeys(b"\x8f\x90\x91", "holds a set"),
    **dict.fromkeys(b"\x97\x98", "asks for a buffer outside the file"),
    **dict.fromkeys(b"\x8b\x8d", "holds a number or a text of an absurd length"),
    **dict.fromkeys(b"FILSTUVgp", "is of protocol 0 or 1, which are not read"),
    **dict.fromkeys(b"012", "uses an operation that no snapshot needs"),
}


def shown(value: object) -> str:
    """A short text of one line for any value of a file."""
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__}"
    if type(value) is int and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = ascii(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def loads(data: bytes, packer: Packer | None = None) -> Any:
    """The value of a pickle, with what `packer` makes of its entries and lists of frames in their
    places. Raises TraceError, with the fault and its byte. Time: O(n)."""
    if data[:2] == b"\x1f\x8b":
        raise TraceError("it is compressed (gzip): unpack it first")
    if data[:2] == b"PK":
        raise TraceError("it is a zip archive, and no pickle")
    if len(data) < 2 or data[0] != 0x80 or not 2 <= data[1] <= 5:
        raise TraceError("it is not a pickle of protocol 2 to 5")
    most_containers = min(FIRST_CONTAINERS + len(data) // BYTES_A_CONTAINER, MOST_CONTAINERS)
    limits = most_containers, MOST_VALUES, MOST_WAITING, TURN
    return Machine(data, *limits, _refusal, shown, packer).run()


def _refusal(data: bytes, at: int, stack: list[Any]) -> str:
    """Why the operation at a place is refused."""
    code = data[at]
    if code in b"ci":  # GLOBAL and INST: two lines
        names = data[at + 1 : at + 513].split(b"\n")[:2]
        return _names(*(name.decode("ascii", "backslashreplace") for name in names))
    if code == 0x93:  # STACK_GLOBAL
        return _names(*stack[-2:])
    return f"it {_REFUSED.get(code, f'holds an unknown operation ({code:#04x})')}"


def _names(*names: object) -> str:
    named = ascii(".".join(name[:200] for name in names if isinstance(name, str)))[1:-1]
    return (
        f"it names {named[:200] or 'an object'}, which may run code: only plain values are "
        "read (numbers, texts, lists, dicts)"
    )
