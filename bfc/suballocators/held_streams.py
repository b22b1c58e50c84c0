"""Streams whose work is held back until it is let go: on simulated devices, and in tests."""

from __future__ import annotations

from collections import defaultdict

from bfc.devices import Fence
from bfc.streams import StreamLike, stream_handle


class HeldFence:
    """Done once its stream is let go, and the fence `below` it is, where there is one."""

    def __init__(self, source: HeldStreams, stream: int, below: Fence | None = None) -> None:
        self._source = source
        self._stream = stream
        self._round = source._rounds[stream]
        self._below = below

    def _is_held(self) -> bool:
        return (
            self._stream in self._source._held and self._source._rounds[self._stream] == self._round
        )

    def done(self) -> bool:
        """Whether everything queued before the mark has finished."""
        return not self._is_held() and (self._below is None or self._below.done())

    def wait(self) -> None:
        """Lets the stream finish: nothing else would."""
        if self._is_held():
            self._source.finish(self._stream)
        if self._below is not None:
            self._below.wait()


class HeldStreams:
    """What a sub-allocator has whose streams can be held."""

    def __init__(self) -> None:
        self._held: set[int] = set()
        self._rounds: defaultdict[int, int] = defaultdict(int)

    def hold(self, stream: StreamLike) -> None:
        """Leave what is queued on a stream from now on unfinished, until `finish` or a wait for it.

        Parameters
        ----------
        stream : int or stream object
            Which one.
        """
        self._held.add(stream_handle(stream))

    def finish(self, stream: StreamLike) -> None:
        """Let everything queued on a stream finish, and hold it no longer.

        Parameters
        ----------
        stream : int or stream object
            Which one.
        """
        handle = stream_handle(stream)
        self._held.discard(handle)
        self._rounds[handle] += 1
