"""A Hypothesis state machine over any allocator."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bfc.policies._caching import CachingAllocator
from bfc.testing.differential import Errors, Twins
from bfc.testing.strategies import Finish, Hold, Use, sizes, stream_events

#: A strategy that is an attribute of the machine.
_sizes = st.runner().flatmap(lambda machine: machine.sizes)
_streams = st.runner().flatmap(lambda machine: st.sampled_from(list(machine.streams)))
_stream_events = st.runner().flatmap(lambda machine: stream_events(machine.streams))


def _has_live(machine: Any) -> bool:
    return bool(machine.twins.live)


def _has_streams(machine: Any) -> bool:
    return len(machine.streams) > 1


class AllocatorMachine(RuleBasedStateMachine):
    """A Hypothesis state machine that fuzzes an allocator. Everything is checked after each step.

    A subclass defines `make`. The attributes below can be set in it, and more rules can be added,
    which take their steps through `self.twins`.

    Attributes
    ----------
    sizes : hypothesis.strategies.SearchStrategy of int
        The sizes.
    streams : sequence of int
        The streams that are allocated on. With more than one, blocks are also used on others, and
        the sub-allocator, if it has `hold` and `finish`, holds work there.
    model : bool
        Compare with the slow model of TensorFlow or PyTorch. It must be False if a `BFCAllocator`
        is used on other streams.
    alignment : int or None
        What addresses must be multiples of, in bytes. None is 256 for bfc's allocators, and 1 for
        others.
    expects : tuple of exception types
        Errors that a step may raise, because the sub-allocator does. Such a step has not happened.
    save_failure : str, os.PathLike or None
        Where to save `self.twins.trace()` if a step fails. When Hypothesis is done, the file holds
        the smallest failure.
    twins : Twins
        The allocator, its model, and the steps.

    Notes
    -----
    `TestMine.settings` is Hypothesis' `settings`: without a deadline and health checks at first.
    `settings(TestMine.settings, max_examples=..., stateful_step_count=...)` leaves it so. A failure
    shrinks to a few lines that repeat it.

    Examples
    --------
    >>> import bfc
    >>> class Mine(AllocatorMachine):
    ...     def make(self):
    ...         return bfc.BFCAllocator(bfc.SimulatedSubAllocator("64 MiB"), allow_growth=True)
    >>> TestMine = Mine.TestCase  # which pytest and unittest run
    """

    sizes: st.SearchStrategy[int] = sizes(smallest=0)
    streams: Sequence[int] = (0,)
    model: bool = True
    alignment: int | None = None
    expects: Errors = ()
    save_failure: str | os.PathLike[str] | None = None

    twins: Twins

    def make(self) -> Any:
        """Make the allocator that is tested: a subclass defines this.

        Returns
        -------
        object
            A fresh one: an allocator of bfc over a sub-allocator of your own, or any object with
            `allocate_raw(nbytes)` and `deallocate_raw(ptr)`. `bfc.testing.Twins` says what it is
            held to.

        Raises
        ------
        NotImplementedError
            If the subclass does not define it.
        """
        raise NotImplementedError("define make(self), which returns a fresh allocator")

    @initialize()
    def start(self) -> None:
        self.begin(self.make())

    def begin(self, allocator: Any) -> None:
        """Start a history with an allocator: for a machine that does not use `make`.

        Parameters
        ----------
        allocator : object
            As from `make`.
        """
        knows = not _has_streams(self) or isinstance(allocator, CachingAllocator)
        model = self.model and knows
        self.twins = Twins(allocator, model=model, alignment=self.alignment, expects=self.expects)

    # -- steps ------------------------------------------------------------------------------------

    @rule(nbytes=_sizes, stream=_streams)
    def allocate(self, nbytes: int, stream: int) -> None:
        self.twins.allocate(nbytes, stream)

    @rule(share=st.integers(1, 1050), extra=st.integers(-300, 300), stream=_streams)
    def allocate_a_share_of_the_limit(self, share: int, extra: int, stream: int) -> None:
        self.twins.allocate(max(0, self.twins.limit * share // 1000 + extra), stream)

    @precondition(_has_live)
    @rule(index=st.integers(0, 1000))
    def free(self, index: int) -> None:
        self.twins.free(index)

    @precondition(lambda self: len(self.twins.live) > 4)
    @rule()
    def free_every_second(self) -> None:
        for index in range(len(self.twins.live) // 2):
            self.twins.free(index)

    @precondition(lambda self: self.twins.is_ours and self.twins.live)
    @rule(index=st.integers(0, 1000))
    def free_wrongly(self, index: int) -> None:
        self.twins.free_wrongly(index)

    @precondition(lambda self: hasattr(self.twins.source, "fail_at"))
    @rule(number=st.integers(1, 4))
    def refuse_a_call(self, number: int) -> None:
        self.twins.fail_at(number)

    @precondition(lambda self: hasattr(self.twins.allocator, "release_free_regions"))
    @rule()
    def release_free_regions(self) -> None:
        self.twins.release_free_regions()

    @precondition(lambda self: self.twins.is_ours)
    @rule()
    def clear_stats(self) -> None:
        self.twins.clear_stats()

    @precondition(_has_streams)
    @rule(event=_stream_events)
    def on_streams(self, event: Hold | Finish | Use) -> None:
        if isinstance(event, Hold):
            self.twins.hold(event.stream)
        elif isinstance(event, Finish):
            self.twins.finish(event.stream)
        elif self.twins.live:
            self.twins.record_stream(event.block, event.stream)

    # -- what must hold ---------------------------------------------------------------------------

    @invariant()
    def everything_holds(self) -> None:
        self.twins.check()

    def teardown(self) -> None:
        if not hasattr(self, "twins"):
            return  # make() has failed
        try:
            if not self.twins.has_failed:
                self.twins.close()
        finally:
            if self.twins.has_failed and self.save_failure is not None:
                self.twins.trace().save(self.save_failure)
            self.twins.stop()
