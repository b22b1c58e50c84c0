"""Captures of a simulated device: which streams capture, and the graph of what they were given."""

from __future__ import annotations


class SimulatedCaptures:
    """The captures of a `SimulatedSubAllocator`, which a test steers.

    A stream that captures puts its work into a graph, as a stream of CUDA does. A node of the graph
    is a number, and depends on earlier nodes.

    Examples
    --------
    >>> import bfc
    >>> captures = bfc.SimulatedSubAllocator("1 GiB").captures
    >>> captures.begin(7)
    1
    >>> first = captures.work(7)
    >>> captures.wait(8, on=7)
    >>> captures.dependencies(captures.work(8)) == (first,)
    True
    >>> captures.end(7)
    >>> captures.id_of(8)
    0
    """

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}
        self._terminals: dict[int, tuple[int, ...]] = {}
        self._parents: dict[int, tuple[int, ...]] = {}
        self._begun = 0

    def begin(self, stream: int) -> int:
        """Let a stream capture. Returns the capture's number."""
        if stream in self._ids:
            raise RuntimeError(f"stream {stream} captures already")
        self._begun += 1
        self._ids[stream], self._terminals[stream] = self._begun, ()
        return self._begun

    def end(self, stream: int) -> None:
        """End the capture of a stream, and of all that have joined it."""
        ended = self._ids[stream]
        for other in [other for other, number in self._ids.items() if number == ended]:
            del self._ids[other], self._terminals[other]

    def work(self, stream: int) -> int:
        """Give a capturing stream something to do. Returns the node."""
        node = len(self._parents) + 1
        self._parents[node] = self._terminals[stream]
        self._terminals[stream] = (node,)
        return node

    def wait(self, stream: int, on: int) -> None:
        """Let a stream wait for another one, and join its capture."""
        if self._ids.setdefault(stream, self._ids[on]) != self._ids[on]:
            raise RuntimeError(f"stream {stream} belongs to another capture than stream {on}")
        both = (*self._terminals.get(stream, ()), *self._terminals[on])
        self._terminals[stream] = tuple(dict.fromkeys(both))

    def id_of(self, stream: int) -> int:
        """The number of a stream's capture; 0 if it does not capture."""
        return self._ids.get(stream, 0)

    def terminals(self, stream: int) -> tuple[int, ...]:
        """The nodes that the next one of a capturing stream depends on."""
        return self._terminals.get(stream, ())

    def dependencies(self, node: int) -> tuple[int, ...]:
        """The nodes that a node depends on."""
        return self._parents[node]
