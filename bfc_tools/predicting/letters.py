"""What one process of several sends to others, and gets from them: objects, and small tensors of
known whole numbers, which decide what a program does. Other tensors are only shapes.

Ranks are predicted one after another. What one has sent is a letter to those that run later. Where
a letter is missing, since its sender runs later, it may be guessed: whoever has all letters sees
whether that was right.
"""

from __future__ import annotations

import base64
import collections
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: The receiver of what goes to all others of a group.
ALL = -1
#: Sender, receiver, what it is ("objects", or "numbers", perhaps among some ranks), and the how
#: many-th of these it is.
Key = tuple[int, int, str, int]


@dataclass
class Letters:
    """Those of one process: what it gets is there before it runs."""

    received: Mapping[Key, bytes] = field(default_factory=dict)
    world: int = 0  # how many processes there are; 0 if nobody has said
    sent: dict[Key, bytes] = field(default_factory=dict)
    guessed: dict[Key, bytes] = field(default_factory=dict)
    meshes: list[tuple[int, ...]] = field(default_factory=list)  # the shapes of those it has made
    _numbers: collections.Counter[tuple[int, int, str]] = field(default_factory=collections.Counter)

    def send(self, rank: int, to: int, what: str, text: bytes | None) -> None:
        """Writes a letter; None is one that holds nothing which is known."""
        key = self._next(rank, to, what)
        if text is not None:
            self.sent[key] = text

    def receive(
        self, rank: int, sender: int, what: str, guess: Callable[[], bytes | None]
    ) -> bytes | None:
        """Reads the next letter; what is guessed if it is not there, and None if nothing is."""
        key = self._next(sender, rank, what)
        text = self.received.get(key)
        if text is None:
            text = guess()
            if text is not None:
                self.guessed[key] = text
        return text

    def last_to(self, rank: int, to: int, what: str) -> bytes | None:
        """The last letter that this process has written to another one."""
        return self.sent.get((rank, to, what, self._numbers[rank, to, what] - 1))

    def _next(self, sender: int, receiver: int, what: str) -> Key:
        number = self._numbers[sender, receiver, what]
        self._numbers[sender, receiver, what] += 1
        return sender, receiver, what, number


def packed(letters: Mapping[Key, bytes]) -> list[list[Any]]:
    """Letters as JSON holds them."""
    return [[*key, base64.b64encode(text).decode()] for key, text in letters.items()]


def unpacked(rows: list[list[Any]]) -> dict[Key, bytes]:
    """The reverse of `packed`."""
    return {(row[0], row[1], row[2], row[3]): base64.b64decode(row[4]) for row in rows}


#: Those of the process that is predicted. `--nproc` gives it what others have sent.
here = Letters()


def begin(received: Mapping[Key, bytes], world: int) -> Letters:
    """Letters of a process that is about to run, one of so many."""
    global here
    here = Letters(received, world)
    return here
