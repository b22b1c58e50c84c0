"""Memory that a program only seems to take, while a part of it is tried whose time has not come.

What would be allocated and freed is noted, and the memory itself stays as it is. Afterwards the
events can be made to happen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from bfc_tools.predicting.kinds import OTHER
from bfc_tools.predicting.memory import Allocation, Memory


class Event(NamedTuple):
    """An allocation, or that it is freed."""

    born: bool
    made: Allocation
    kind: int = OTHER
    operator: str = ""


class Imagined:
    """Stands in for a `Memory`. Its allocations have numbers below 0.

    Attributes
    ----------
    memory : Memory
        What it stands in for.
    events : list of Event
        What has happened since `begin`.
    freed : dict of int to Allocation
        Allocations of the memory that would have been freed, by their numbers.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.kept = dict(memory.kept)
        self.events: list[Event] = []
        self.freed: dict[int, Allocation] = {}
        self._made = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def begin(self) -> None:
        """Forgets the events, not what they have made."""
        self.events = []

    def allocate(self, nbytes: int, operator: str, kind: int = OTHER) -> Allocation:
        """As `Memory.allocate`."""
        self._made += 1
        made = Allocation(-self._made, nbytes, 1, len(self.events))
        self.events.append(Event(True, made, kind, operator))
        return made

    def free(self, made: Allocation) -> None:
        """As `Memory.free`."""
        if not made.address:
            return
        if made.number < 0:
            made.address = 0
        else:
            self.freed[made.number] = made
        self.events.append(Event(False, made))

    def doubt(self, what: object, made: Allocation | None) -> None:
        """Does nothing."""

    def know(self, made: Allocation, kind: int, owner: int) -> None:
        """Does nothing."""

    def happen(self) -> None:
        """Lets the events happen in the memory."""
        for born, made, kind, operator in self.events:
            if born:
                become(made, self.memory.allocate(made.nbytes, operator, kind))
            else:
                self.memory.free(made)
        self.begin()


def become(made: Allocation, real: Allocation) -> None:
    """Lets an allocation that was imagined be one of the memory."""
    made.number, made.nbytes = real.number, real.nbytes
    made.address, made.event = real.address, real.event
