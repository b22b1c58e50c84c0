"""What sleeping memory held: a copy on the host, in pieces of bounded size."""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from bfc.suballocators.base import SubAllocator
from bfc.suballocators.cuda import CUDASubAllocator
from bfc.suballocators.host import ask_for_huge_pages
from bfc.units import format_bytes

#: The most bytes of one piece.
PIECE = 32 << 20


class SavedAllocation(NamedTuple):
    """One allocation whose contents are kept."""

    ptr: int
    nbytes: int
    handle: int
    allocation_id: int


class Piece(Protocol):
    """Some memory of the host."""

    address: int

    def close(self) -> None:
        """Give it back."""


class HostPiece:
    """Ordinary memory, of this process alone: a forked child has a copy."""

    def __init__(self, nbytes: int) -> None:
        try:
            self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            if error.errno not in (errno.ENOMEM, errno.EAGAIN):
                raise
            raise MemoryError(
                f"the host has no {format_bytes(nbytes)} to keep contents in"
            ) from error
        ask_for_huge_pages(self._memory)  # all of it is written at once
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def close(self) -> None:
        self._memory.close()


class PinnedPiece:
    """Pinned memory of a CUDA driver."""

    def __init__(self, source: CUDASubAllocator, nbytes: int) -> None:
        self._source = source
        block = source.alloc(256, nbytes)
        if block is None:
            raise MemoryError(
                f"there is no {format_bytes(nbytes)} of pinned memory to keep contents in"
            )
        self.address, self._nbytes = block

    def close(self) -> None:
        if self.address:
            address, self.address = self.address, 0
            self._source.free_idle(address, self._nbytes)

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self.close()


class GivenPiece:
    """Memory that the user's callable gave."""

    def __init__(self, give: Callable[[int], Any], nbytes: int) -> None:
        with memoryview(give(nbytes)) as given:
            if given.readonly or not given.c_contiguous or given.nbytes < nbytes:
                raise ValueError(
                    f"keep must return a contiguous writable buffer of {nbytes} bytes, and "
                    f"returned one of {given.nbytes} bytes"
                )
            self._held = given.cast("B")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._held))

    def close(self) -> None:
        self._held.release()


class Reuse:
    """Makes pieces that stay for the next time, instead of going back: pinned memory takes long to
    come. As many stay as were used at once."""

    def __init__(self, way: str, source: SubAllocator) -> None:
        self.keeps = True  # what is asked when a piece is closed
        self._make = maker(way, source)
        self._spare: list[Piece] = []
        self._sizes: dict[int, int] = {}  # by address

    def __call__(self, nbytes: int) -> Piece:
        for piece in self._spare:
            if self._sizes[piece.address] >= nbytes:
                self._spare.remove(piece)
                return ReusedPiece(piece, self)
        if self._spare:
            self._let_go(self._spare.pop())  # a larger one takes its place
        piece = self._make(nbytes)
        self._sizes[piece.address] = nbytes
        return ReusedPiece(piece, self)

    def take_back(self, piece: Piece) -> None:
        """Keep a piece, or give all back that is not in use."""
        self._spare.append(piece)
        while self._spare and not self.keeps:
            self._let_go(self._spare.pop())

    def _let_go(self, piece: Piece) -> None:
        self._sizes.pop(piece.address, None)
        piece.close()


class ReusedPiece:
    """One of those."""

    def __init__(self, piece: Piece, owner: Reuse) -> None:
        self.address = piece.address
        self._piece: Piece | None = piece
        self._owner = owner

    def close(self) -> None:
        piece, self._piece = self._piece, None
        if piece is not None:
            self._owner.take_back(piece)


def maker(way: Any, source: SubAllocator) -> Callable[[int], Piece]:
    """What makes pieces in the way that a user has named."""
    if isinstance(way, Reuse):
        return way
    if callable(way):
        return lambda nbytes: GivenPiece(way, nbytes)
    if way == "pinned" and isinstance(source, CUDASubAllocator):
        pinned = CUDASubAllocator(source.device.ordinal, kind="pinned")
        return lambda nbytes: PinnedPiece(pinned, nbytes)
    return HostPiece


def _stream_of(source: SubAllocator) -> int:
    """The stream to copy on: whoever uses the memory was waited for, and nobody does meanwhile."""
    return source._copy_stream() if isinstance(source, CUDASubAllocator) else 0


class HostCopy:
    """A copy of the contents of some allocations of `source`, in pieces that `make` makes: it takes
    a number of bytes."""

    def __init__(
        self, make: Callable[[int], Piece], source: SubAllocator, allocations: list[SavedAllocation]
    ) -> None:
        self.allocations = allocations
        self.nbytes = sum(allocation.nbytes for allocation in allocations)
        self._source = source
        self._reading = threading.RLock()  # another thread may wake meanwhile what one reads
        self._pieces: list[Piece] = []
        try:
            for start in range(0, self.nbytes, PIECE):
                self._pieces.append(make(min(PIECE, self.nbytes - start)))
            stream = _stream_of(source)
            for allocation, address, start, nbytes in self._spans(None):
                source.copy(address, allocation.ptr + start, nbytes, stream)
        except BaseException:
            self.close()
            raise

    def _spans(
        self, live: Iterable[bool] | None
    ) -> Iterator[tuple[SavedAllocation, int, int, int]]:
        """Each part of an allocation that lies in one piece: the allocation, where in the piece,
        where in the allocation, and how many bytes. `live`: which allocations, None for all."""
        offset = 0
        chosen = [True] * len(self.allocations) if live is None else live
        for allocation, wanted in zip(self.allocations, chosen, strict=True):
            start = 0
            while wanted and start < allocation.nbytes:
                number, begin = divmod(offset + start, PIECE)
                nbytes = min(PIECE - begin, allocation.nbytes - start)
                yield allocation, self._pieces[number].address + begin, start, nbytes
                start += nbytes
            offset += allocation.nbytes

    def bring_back(self, live: Iterable[bool]) -> None:
        """Copy the contents back, of those that are live still."""
        stream = _stream_of(self._source)
        for allocation, address, start, nbytes in self._spans(live):
            self._source.copy(allocation.ptr + start, address, nbytes, stream)

    def read(self, ptr: int, nbytes: int) -> bytearray | None:
        """A copy of what is kept of these addresses; None if they lie in no allocation."""
        out = bytearray(nbytes)
        done = 0
        with self._reading:
            if not self._pieces:
                return None
            for allocation, address, start, length in self._spans(None):
                first = max(ptr, allocation.ptr + start)
                last = min(ptr + nbytes, allocation.ptr + start + length)
                if first < last:
                    there = address + first - allocation.ptr - start
                    out[first - ptr : last - ptr] = ctypes.string_at(there, last - first)
                    done += last - first
        return out if done == nbytes else None

    def close(self) -> None:
        """Give the host's memory back, once nobody reads it."""
        with self._reading:
            while self._pieces:
                self._pieces.pop().close()


def fill_with(source: SubAllocator, allocations: list[SavedAllocation], byte: int) -> None:
    """Fills allocations of `source` with one byte: on a CUDA device, where they are."""
    if isinstance(source, CUDASubAllocator) and source.kind == "device":
        for allocation in allocations:
            if allocation.nbytes:
                source._fill(allocation.ptr, allocation.nbytes, byte)
        return
    length = min(PIECE, max((allocation.nbytes for allocation in allocations), default=0))
    if not length:
        return
    piece = HostPiece(length)
    try:
        ctypes.memset(piece.address, byte, length)
        for allocation in allocations:
            for start in range(0, allocation.nbytes, length):
                nbytes = min(length, allocation.nbytes - start)
                source.copy(allocation.ptr + start, piece.address, nbytes, 0)
    finally:
        piece.close()
