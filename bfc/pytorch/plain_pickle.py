"""Reads a pickle of plain values without Python's unpickler: nothing in it can be executed.

What is understood are the operations that build None, bool, int, float, str, list, tuple and dict
with text keys, in protocols 2 to 5. Each other one is an error. There is no recursion, a length is
compared with what the file holds before memory is taken for it, and lists, tuples and dicts may
stand no closer than one in 8 bytes: so the values of a hostile file take at most some 30 times its
own size, and 16 MiB. Values may share parts, and stand for far more than the file holds: who walks
through them has to count.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from bfc.errors import TraceError

#: The most lists, tuples and dicts that a file may make, and the most values in all of them.
MOST_CONTAINERS = 1 << 24
#: And the most for its size: one for so many bytes, beside the first ones.
BYTES_A_CONTAINER = 8
FIRST_CONTAINERS = 1 << 12
MOST_VALUES = 1 << 27
#: The most values that may wait to be put into one.
MOST_WAITING = 1 << 20
#: How many operations are read between two looks at what waits.
TURN = 1 << 14

_FOUR, _FLOAT, _EIGHT = struct.Struct("<I"), struct.Struct(">d"), struct.Struct("<Q")
_SIGNED = struct.Struct("<i")

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
    """A short text of one line for a value of a file, however it was meant."""
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__}"
    if type(value) is int and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = ascii(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def loads(data: bytes) -> Any:
    """The value of a pickle. TraceError says what is wrong, and at which byte. Time: O(n)."""
    if data[:2] == b"\x1f\x8b":
        raise TraceError("it is compressed (gzip): unpack it first")
    if data[:2] == b"PK":
        raise TraceError("it is a zip archive, and no pickle")
    if len(data) < 2 or data[0] != 0x80 or not 2 <= data[1] <= 5:
        raise TraceError("it is not a pickle of protocol 2 to 5")
    return _Machine(data).run()


class _Machine:
    """The stack, the marks and the memo of a pickle that is being read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.containers = self.values = 0
        self.most_containers = min(
            FIRST_CONTAINERS + len(data) // BYTES_A_CONTAINER, MOST_CONTAINERS
        )
        self.done = False
        self.at = 0
        self.rare: list[Callable[[int], int] | None] = [None] * 256
        for code, action in self._rare_operations().items():
            self.rare[code] = action

    def run(self) -> Any:
        at = 2
        try:
            while not self.done:
                at = self._turn(at)
                self._look()
        except (IndexError, struct.error):
            if self.at >= len(self.data) - 9:
                raise TraceError(f"it ends in the middle, after {len(self.data)} bytes") from None
            raise TraceError(f"byte {self.at}: it takes a value that is not there") from None
        except UnicodeDecodeError:
            raise TraceError(f"byte {self.at}: its text is not UTF-8") from None
        if len(self.stack) != 1:
            raise TraceError(f"it ends with {len(self.stack)} values, where one is expected")
        return self.stack[0]

    def _turn(self, at: int) -> int:
        """Reads some operations; those that fill a snapshot stand here, the others in the table."""
        data, memo, stack, rare = self.data, self.memo, self.stack, self.rare
        push, keep, get_four = stack.append, memo.append, _FOUR.unpack_from
        for _ in range(TURN):
            self.at = at
            code = data[at]
            at += 1
            if code == 0x68:  # BINGET
                push(memo[data[at]])
                at += 1
            elif code == 0x94:  # MEMOIZE
                keep(stack[-1])
            elif code == 0x6A:  # LONG_BINGET
                push(memo[get_four(data, at)[0]])
                at += 4
            elif code == 0x8A:  # LONG1
                end = at + 1 + data[at]
                if end > len(data):
                    raise IndexError
                push(int.from_bytes(data[at + 1 : end], "little", signed=True))
                at = end
            elif code == 0x4B:  # BININT1
                push(data[at])
                at += 1
            elif code == 0x4D:  # BININT2
                push(data[at] | data[at + 1] << 8)
                at += 2
            elif code == 0x4A:  # BININT
                push(_SIGNED.unpack_from(data, at)[0])
                at += 4
            elif code == 0x28:  # MARK
                self.marks.append(len(stack))
            else:
                action = rare[code]
                if action is None:
                    raise TraceError(f"byte {self.at}: {self._refusal(code)}")
                at = action(at)
                if self.done:
                    break
        return at

    def _look(self) -> None:
        if self.containers > self.most_containers or max(self.values, len(self.memo)) > MOST_VALUES:
            raise TraceError(f"byte {self.at}: it makes more values than are read")
        if max(len(self.stack), len(self.marks)) > MOST_WAITING:
            raise TraceError(f"byte {self.at}: too many values wait to be put somewhere")

    def _rare_operations(self) -> dict[int, Callable[[int], int]]:
        return {
            0x2E: self._stop,
            0x80: self._protocol,
            0x95: lambda at: at + 8,  # FRAME: a hint for readers of streams
            0x4E: lambda at: self._push(None, at),
            0x88: lambda at: self._push(True, at),
            0x89: lambda at: self._push(False, at),
            0x47: lambda at: self._push(_FLOAT.unpack_from(self.data, at)[0], at + 8),
            0x8C: lambda at: self._text(at + 1, self.data[at]),
            0x58: lambda at: self._text(at + 4, _FOUR.unpack_from(self.data, at)[0]),
            0x5D: lambda at: self._container([], at),
            0x7D: lambda at: self._container({}, at),
            0x29: lambda at: self._container((), at),
            0x85: lambda at: self._tuple(1, at),
            0x86: lambda at: self._tuple(2, at),
            0x87: lambda at: self._tuple(3, at),
            0x74: lambda at: self._container(tuple(self._above_mark()), at),
            0x6C: lambda at: self._container(self._above_mark(), at),
            0x64: lambda at: self._fill({}, self._above_mark(), at),
            0x61: lambda at: self._extend([self.stack.pop()], at),
            0x65: lambda at: self._extend(self._above_mark(), at),
            0x73: lambda at: self._set_items(self._top(2), at),
            0x75: lambda at: self._set_items(self._above_mark(), at),
            0x71: lambda at: self._put(self.data[at], at + 1),
            0x72: lambda at: self._put(_FOUR.unpack_from(self.data, at)[0], at + 4),
        }

    def _stop(self, at: int) -> int:
        self.done = True
        return at

    def _protocol(self, at: int) -> int:
        raise TraceError(f"byte {self.at}: a second pickle begins inside the first")

    def _push(self, value: object, at: int) -> int:
        self.stack.append(value)
        return at

    def _container(self, made: list[Any] | tuple[Any, ...] | dict[str, Any], at: int) -> int:
        self.containers += 1
        self.stack.append(made)
        return at

    def _text(self, start: int, length: int) -> int:
        end = start + length
        if end > len(self.data):
            raise IndexError
        self.stack.append(str(self.data[start:end], "utf-8", "surrogatepass"))
        return end

    def _top(self, count: int) -> list[Any]:
        """The last values of the stack, taken off it."""
        if len(self.stack) < count:
            raise IndexError
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    def _above_mark(self) -> list[Any]:
        mark = self.marks.pop()
        taken = self.stack[mark:]
        del self.stack[mark:]
        self.values += len(taken)
        return taken

    def _tuple(self, count: int, at: int) -> int:
        self.values += count
        return self._container(tuple(self._top(count)), at)

    def _extend(self, taken: list[Any], at: int) -> int:
        if type(self.stack[-1]) is not list:
            raise TraceError(f"byte {self.at}: it appends to something that is not a list")
        self.values += 1
        self.stack[-1].extend(taken)
        return at

    def _set_items(self, taken: list[Any], at: int) -> int:
        if type(self.stack[-1]) is not dict:
            raise TraceError(f"byte {self.at}: it sets an item of something that is not a dict")
        return self._fill(self.stack.pop(), taken, at)

    def _fill(self, target: dict[str, Any], taken: list[Any], at: int) -> int:
        if len(taken) % 2:
            raise IndexError
        keys = taken[::2]
        for key in keys:
            if type(key) is not str:  # others could be made to collide, or be nested without end
                raise TraceError(f"byte {self.at}: a dict has the key {shown(key)}, no text")
        self.values += 1
        target.update(zip(keys, taken[1::2], strict=True))
        if self.data[self.at] == 0x64:
            self.containers += 1
        return self._push(target, at)

    def _put(self, number: int, at: int) -> int:
        """Remembers the last value under a number; writers count them, and so must the file."""
        if number < len(self.memo):
            self.memo[number] = self.stack[-1]
        elif number == len(self.memo):
            self.memo.append(self.stack[-1])
        else:
            raise TraceError(f"byte {self.at}: it remembers a value out of turn, as {number}")
        return at

    def _refusal(self, code: int) -> str:
        if code in b"ci":  # GLOBAL and INST: two lines
            names = self.data[self.at + 1 : self.at + 513].split(b"\n")[:2]
            return self._names(*(name.decode("ascii", "backslashreplace") for name in names))
        if code == 0x93:  # STACK_GLOBAL
            return self._names(*self.stack[-2:])
        return f"it {_REFUSED.get(code, f'holds an unknown operation ({code:#04x})')}"

    def _names(self, *names: object) -> str:
        named = ascii(".".join(name[:200] for name in names if isinstance(name, str)))[1:-1]
        return (
            f"it names {named[:200] or 'an object'}, which may run code: only plain values are "
            "read (numbers, texts, lists, dicts)"
        )
