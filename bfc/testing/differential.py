"""An allocator beside its model, and what must hold of any allocator at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bfc.allocators._allocator import Allocator
from bfc.errors import InvalidPointerError, OutOfMemoryError
from bfc.snapshots.snapshot import Stats
from bfc.suballocators.base import SubAllocator
from bfc.trace import Trace
from bfc_slow_models.model_runner import Beside, model_for
from bfc_slow_models.recorded_source import Differs, Tape, Unfollowable
from bfc_slow_models.tensorflow_model import GRANULE

Errors = tuple[type[BaseException], ...]


class Twins:
    """An allocator beside its slow model, if it has one: both take every step.

    Parameters
    ----------
    allocator : object
        Any object with `allocate_raw(nbytes)` and `deallocate_raw(ptr)`, which raises MemoryError
        if there is no room.
    model : bool, optional
        Compare with the slow model of TensorFlow or PyTorch, if `allocator` is a fresh
        `BFCAllocator` or `CachingAllocator` and no subclass. The models do not know how a
        `BFCAllocator` treats other streams: pass False for that.
    alignment : int, optional
        What addresses must be multiples of, in bytes. None is 256 for bfc's allocators, and 1 for
        others.
    expects : tuple of exception types, optional
        Errors that the sub-allocator may raise. A step that raises one has not happened, and the
        comparison with the model ends.

    Attributes
    ----------
    allocator : object
        As given.
    live : list of int
        The addresses of the live blocks, oldest first.
    sizes : dict of int to int
        The bytes of each live block, by address.

    Notes
    -----
    Every allocator is held to this: addresses are multiples of `alignment`, blocks do not overlap
    and lie in memory that the sub-allocator gave, and after `close` the sub-allocator has all of it
    back. An allocator of bfc is also held to its own `check()`, and to what it says of each block,
    its statistics and its snapshot; one with a model places, refuses, counts and calls its
    sub-allocator exactly as the model. A violation is an AssertionError.

    Examples
    --------
    >>> import bfc
    >>> twins = Twins(bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), allow_growth=True))
    >>> hex(twins.allocate(1000))
    '0x10000000000'
    >>> twins.free(0)
    >>> twins.check()
    >>> twins.close()
    """

    def __init__(
        self,
        allocator: Any,
        *,
        model: bool = True,
        alignment: int | None = None,
        expects: Errors = (),
    ) -> None:
        self.allocator = allocator
        self.is_ours = isinstance(allocator, Allocator)
        self.alignment = alignment or (GRANULE if self.is_ours else 1)
        self.expects = expects
        source = getattr(allocator, "sub_allocator", None)
        self.source: SubAllocator | None = source if isinstance(source, SubAllocator) else None
        self.tape = Tape(self.source) if self.source is not None else None
        self.beside: Beside | None = None
        if model and self.tape is not None and is_fresh(allocator):
            self.beside = model_for(allocator, self.tape)
        if self.beside is None:
            self.leave_model()
        self.live: list[int] = []
        self.sizes: dict[int, int] = {}
        self.frees = 0
        self.has_failed = False
        self._events: list[tuple[int, int, int, int]] = []
        self._allocated = 0
        self._ids: dict[int, int] = {}
        self._streams: dict[int, int] = {0: 0}

    # -- steps ------------------------------------------------------------------------------------

    @contextmanager
    def _step(self) -> Iterator[None]:
        """One step of both. If the source raises an error that is expected, the model is
        dropped."""
        try:
            yield
            if self.tape is not None and self.beside is not None:
                self.tape.check_empty()
        except self.expects:
            self.leave_model()
        except BaseException:
            self.has_failed = True
            raise

    def _tell(self, do: Callable[[Beside], Any]) -> Any:
        """What the model answers; None if there is no model, or not any more."""
        if self.beside is None:
            return None
        try:
            return do(self.beside)
        except Unfollowable:
            self.leave_model()
        return None

    def leave_model(self) -> None:
        """From here on, check only what holds of every allocator."""
        self.beside = None
        if self.tape is not None:
            self.tape.forget()

    def allocate(self, nbytes: int, stream: int = 0, freed_before: int = 0) -> int | None:
        """Allocate from both.

        Parameters
        ----------
        nbytes : int
            The size in bytes.
        stream : int, optional
            The stream.
        freed_before : int, optional
            As in `Allocator.allocate_raw`.

        Returns
        -------
        int or None
            The address; 0 for 0 bytes, None if it was refused.

        Raises
        ------
        ValueError
            If the model does not know other streams than 0.
        AssertionError
            If something does not hold.
        """
        ptr: int | None = None
        with self._step():
            number = self._write(0, nbytes, stream)
            ptr = self._ask(nbytes, stream, freed_before)
            self._ask_model(ptr, nbytes, stream, freed_before)
            if ptr:
                self._check_block(ptr, nbytes)
                self.live.append(ptr)
                self.sizes[ptr] = nbytes
                self._ids[ptr] = number
        return ptr

    def _ask(self, nbytes: int, stream: int, freed_before: int) -> int | None:
        before = {"freed_before": freed_before} if freed_before else {}
        on = (stream,) if stream else ()
        try:
            answer: int = self.allocator.allocate_raw(nbytes, *on, **before)
        except OutOfMemoryError as error:
            check_figures(error, nbytes, self.allocator.stats())
            return None
        except MemoryError:
            return None
        return answer

    def _ask_model(self, ptr: int | None, nbytes: int, stream: int, freed_before: int) -> None:
        if self.beside is not None and stream and not self.beside.knows_streams:
            raise ValueError("this model knows no other streams than 0: pass model=False")
        expected = self._tell(lambda model: model.allocate(nbytes, stream, freed_before))
        if self.beside is None:
            return
        if expected is None and not self.beside.outlives_refusals:
            self.leave_model()
        elif ptr != expected:
            places = [None if place is None else hex(place) for place in (ptr, expected)]
            raise Differs(f"allocate({nbytes}): the allocator {places[0]}, the model {places[1]}")

    def free(self, index: int) -> None:
        """Free a live block.

        Parameters
        ----------
        index : int
            Which one, counted from the oldest; indices wrap around.
        """
        ptr = self.live[index % len(self.live)]
        with self._step():
            self.allocator.deallocate_raw(ptr)
            self._tell(lambda model: model.free(ptr))
            self.live.remove(ptr)
            self._write(1, 0, 0, self._ids.pop(ptr))
            del self.sizes[ptr]
            self.frees += 1

    def free_wrongly(self, index: int) -> None:
        """Free addresses where no block starts, which must raise. For bfc's allocators.

        Parameters
        ----------
        index : int
            The live block near which two of the addresses are.

        Raises
        ------
        AssertionError
            If one was accepted.
        """
        ptr = self.live[index % len(self.live)]
        for wrong in (ptr + 1, ptr + self.alignment // 2, 12345):
            try:
                self.allocator.deallocate_raw(wrong)
            except InvalidPointerError:
                continue
            self.has_failed = True
            raise AssertionError(f"deallocate_raw({wrong:#x}), where no block starts, was accepted")

    def record_stream(self, index: int, stream: int) -> None:
        """Use a live block on another stream too.

        Parameters
        ----------
        index : int
            Which one, as in `free`.
        stream : int
            The stream.
        """
        ptr = self.live[index % len(self.live)]
        with self._step():
            self.allocator.record_stream(ptr, stream)
            self._tell(lambda model: model.record_stream(ptr, stream))

    def hold(self, stream: int) -> None:
        """Leave what is queued on a stream unfinished, if the sub-allocator can do that.

        Parameters
        ----------
        stream : int
            The stream.
        """
        self._steer("hold", stream)

    def finish(self, stream: int) -> None:
        """Let everything on a stream finish, if the sub-allocator can do that.

        Parameters
        ----------
        stream : int
            The stream.
        """
        self._steer("finish", stream)

    def fail_at(self, number: int) -> None:
        """Let the sub-allocator refuse one of its next calls, if it can do that.

        Parameters
        ----------
        number : int
            Which one: 1 is the next.
        """
        self._steer("fail_at", number)

    def _steer(self, name: str, argument: int) -> None:
        if hasattr(self.source, name):
            getattr(self.source, name)(argument)

    def release_free_regions(self) -> None:
        """Give what is cached back to the sub-allocator.

        Raises
        ------
        AssertionError
            If the number of bytes that it returns is wrong.
        """
        with self._step():
            before = self.held_bytes
            released = self.allocator.release_free_regions()
            self._tell(lambda model: model.release_free_regions())
            if self.tape is not None and before - self.held_bytes != released:
                raise AssertionError(
                    f"release_free_regions() says {released}, and {before - self.held_bytes} "
                    f"bytes went back"
                )

    def clear_stats(self) -> None:
        """Restart the counts. For bfc's allocators."""
        with self._step():
            self._tell(lambda model: model.clear_stats())
            if hasattr(self.allocator, "clear_stats"):
                self.allocator.clear_stats()

    @property
    def limit(self) -> int:
        """The most bytes that the allocator may take, if it says so; otherwise 64 MiB."""
        limit = getattr(self.allocator, "memory_limit", None)
        return limit if isinstance(limit, int) else 64 << 20

    # -- what must hold ---------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """The bytes that the sub-allocator has given, and does not have back."""
        return 0 if self.tape is None else sum(self.tape.live.values())

    def _check_block(self, ptr: int, nbytes: int) -> None:
        if ptr in self.sizes:
            raise AssertionError(f"{ptr:#x} was handed out twice: the first overlaps the second")
        if ptr % self.alignment:
            raise AssertionError(f"{ptr:#x} is not a multiple of {self.alignment}")
        if self.is_ours:
            said = self.allocator.requested_size(ptr), self.allocator.allocated_size(ptr)
            if said[0] != nbytes or said[1] < nbytes:
                raise AssertionError(
                    f"{nbytes} bytes were requested at {ptr:#x}, and the allocator says {said}"
                )

    def check(self) -> None:
        """Check everything that can be looked at between two steps.

        Raises
        ------
        AssertionError
            If something does not hold.
        """
        with self._step():
            check_apart(self.sizes)
            if self.tape is not None:
                check_inside(self.sizes, self.tape.live)
            if hasattr(self.allocator, "check"):
                self.allocator.check()
            self._tell(lambda model: model.compare())
            if self.is_ours and self.beside is None:  # a model knows all of this, and more
                self._check_books()

    def _check_books(self) -> None:
        stats, snapshot = self.allocator.stats(), self.allocator.snapshot()
        chunks = [chunk for chunk in snapshot.chunks() if chunk.state == "in use"]
        said = {chunk.ptr: chunk.requested_size for chunk in chunks}
        if said != self.sizes:
            raise AssertionError(f"the snapshot has {said} in use, and {self.sizes} are")
        waiting = sum(c.size for c in snapshot.chunks() if c.state == "waiting")
        in_use = sum(chunk.size for chunk in chunks) + waiting
        if stats.bytes_in_use != in_use or stats.peak_bytes_in_use < in_use:
            raise AssertionError(f"{in_use} bytes are in use, and the statistics say {stats}")
        if self.tape is not None and stats.pool_bytes != self.held_bytes:
            raise AssertionError(
                f"{self.held_bytes} bytes are held, and the statistics say {stats}"
            )

    def close(self) -> None:
        """Free everything, one by one, and close. The sub-allocator must have all its memory back.

        Raises
        ------
        AssertionError
            If something does not hold.
        """
        while self.live:
            self.free(-1)
        self.check()
        with self._step():
            if hasattr(self.allocator, "close"):
                self.allocator.close()
                self._tell(lambda model: model.close())
                if self.held_bytes:
                    raise AssertionError(f"{self.held_bytes} bytes are lost: the source lacks them")
        self.stop()

    def stop(self) -> None:
        """Stop watching the sub-allocator."""
        self.leave_model()
        if self.tape is not None:
            self.tape.stop()

    # -- the history ------------------------------------------------------------------------------

    def _write(self, op: int, nbytes: int, stream: int, number: int | None = None) -> int:
        if number is None:
            number, self._allocated = self._allocated, self._allocated + 1
        ordinal = self._streams.setdefault(stream, len(self._streams))
        self._events.append((op, number, nbytes, ordinal))
        return number

    def trace(self) -> Trace:
        """What was allocated and freed until now, refused requests included.

        Returns
        -------
        bfc.Trace
            For `replay` and `save`. What streams and the device were told to do is not in it.
        """
        op, number, size, stream = zip(*self._events, strict=True) if self._events else ((),) * 4
        return Trace(op, number, size, stream)


def is_fresh(allocator: Any) -> bool:
    """Whether nothing was allocated yet."""
    stats: Stats | None = allocator.stats() if isinstance(allocator, Allocator) else None
    return stats is not None and not stats.num_allocs and not stats.pool_bytes


def check_figures(error: OutOfMemoryError, nbytes: int, stats: Stats) -> None:
    """The figures of an OutOfMemoryError must be those of the statistics."""
    said = error.requested, error.limit, error.in_use, error.reserved, error.largest_free
    true = (
        nbytes,
        stats.bytes_limit,
        stats.bytes_in_use,
        stats.pool_bytes,
        stats.largest_free_block_bytes,
    )
    if said != true:
        raise AssertionError(f"{error!r} says {said}, and the statistics {true}")


def check_apart(sizes: dict[int, int]) -> None:
    """No two blocks may overlap."""
    end, before = 0, 0
    for ptr in sorted(sizes):
        if ptr < end:
            raise AssertionError(f"{before:#x} and {ptr:#x} overlap by {end - ptr} bytes")
        end, before = ptr + sizes[ptr], ptr


def check_inside(sizes: dict[int, int], given: dict[int, int]) -> None:
    """Every block must lie in what the source gave, or in a run of that which lies end to end."""
    runs: list[tuple[int, int]] = []
    for start in sorted(given):
        if runs and runs[-1][1] == start:
            runs[-1] = runs[-1][0], start + given[start]
        else:
            runs.append((start, start + given[start]))
    for ptr, nbytes in sizes.items():
        if not any(start <= ptr and ptr + nbytes <= end for start, end in runs):
            raise AssertionError(f"{ptr:#x}, {nbytes} bytes, is not the source's memory")
