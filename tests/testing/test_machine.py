"""The machine: it is quiet where all is well, and finds what was planted."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings

import bfc
from bfc.testing import AllocatorMachine, IntegerSource, Misbehaving, Twins, sizes
from bfc_slow_models.recorded_source import Differs

MIB = 1 << 20
FEW = settings(max_examples=40, stateful_step_count=30, deadline=None, database=None)
FINDS = settings(
    max_examples=400,
    stateful_step_count=15,
    deadline=None,
    database=None,
    derandomize=True,
    print_blob=False,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def run(machine: type[AllocatorMachine], options: settings) -> None:
    case = machine.TestCase
    case.settings = options
    case().runTest()


# What is right ---------------------------------------------------------------------------------


class OverPages(AllocatorMachine):
    def make(self) -> bfc.Allocator:
        return bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB"), allow_growth=True)


class GenerousSource(AllocatorMachine):
    def make(self) -> bfc.Allocator:
        return bfc.BFCAllocator(IntegerSource(64 * MIB, granule=4096, gap=300), allow_growth=True)


class OnStreams(AllocatorMachine):
    streams = (0, 2, 4)

    def make(self) -> bfc.Allocator:
        return bfc.BFCAllocator(bfc.SimulatedSubAllocator("64 MiB"), allow_growth=True)


class Caching(AllocatorMachine):
    streams = (0, 2, 4)

    def make(self) -> bfc.Allocator:
        return bfc.CachingAllocator(Misbehaving(bfc.HostSubAllocator("300 MiB")))


class StrictCaching(AllocatorMachine):
    streams = (0, 2)

    def make(self) -> bfc.Allocator:
        settings = "max_split_size_mb:32,roundup_power2_divisions:4"
        source = bfc.SimulatedSubAllocator("300 MiB")
        return bfc.CachingAllocator(source, settings=settings, strict=True)


class Bump:
    """A policy of somebody's own: never uses anything twice."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.next, self.end = 4096, 4096 + room

    def allocate_raw(self, nbytes: int) -> int:
        if self.next + nbytes > self.end:
            raise MemoryError("full")
        start, self.next = self.next, self.next + nbytes
        return start if nbytes else 0

    def deallocate_raw(self, ptr: int) -> None: ...


class OfTheirOwn(AllocatorMachine):
    def make(self) -> Bump:
        return Bump(8 * MIB)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "machine", [OverPages, GenerousSource, OnStreams, Caching, StrictCaching, OfTheirOwn]
)
def test_what_is_right_passes(machine) -> None:
    run(machine, FEW)


@pytest.mark.parametrize(
    ("machine", "model"),
    [(OverPages, "BesideTensorFlow"), (StrictCaching, "BesideTorch"), (OnStreams, "NoneType")],
)
def test_the_model_is_the_allocators(machine, model: str) -> None:
    state = machine()
    state.start()
    assert type(state.twins.beside).__name__ == model
    state.twins.close()


# What is wrong ---------------------------------------------------------------------------------


def find(machine: type[AllocatorMachine], error: type[BaseException], match: str) -> None:
    """Some history must fail like that, however long it is."""
    with pytest.raises(error, match=match):
        run(machine, settings(FINDS, phases=[Phase.generate]))


def shrunk(machine: type[AllocatorMachine], error: type[BaseException], match: str) -> list[str]:
    """The steps of the failing history, as Hypothesis prints them."""
    with pytest.raises(error, match=match) as raised:
        run(machine, FINDS)
    notes = "\n".join(getattr(raised.value, "__notes__", []))
    return [
        line.strip()
        for line in notes.splitlines()
        if line.strip().startswith("state.") and "holds" not in line
    ]


class Twice(Bump):
    """Hands out again what was freed, though it may be used once more by then."""

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []

    def allocate_raw(self, nbytes: int) -> int:
        return self.freed[-1] if self.freed and nbytes else super().allocate_raw(nbytes)

    def deallocate_raw(self, ptr: int) -> None:
        self.freed.append(ptr)


@pytest.mark.long
def test_a_policy_that_hands_out_twice_is_found_in_few_steps(tmp_path) -> None:
    """And the failing history is saved."""

    class FindsTwice(AllocatorMachine):
        save_failure = tmp_path / "failing.npz"

        def make(self) -> Bump:
            return Twice()

    steps = shrunk(FindsTwice, AssertionError, "overlap")
    assert len(steps) <= 7, steps  # start, three requests, a free, teardown, and one more
    assert bfc.Trace.load(tmp_path / "failing.npz").op.tolist() == [0, 1, 0, 0]


class Crooked(AllocatorMachine):
    alignment = 512

    def make(self) -> bfc.Allocator:
        return bfc.BFCAllocator(bfc.SimulatedSubAllocator("64 MiB"))


def test_an_address_that_is_not_aligned_is_found() -> None:
    find(Crooked, AssertionError, "not a multiple of 512")


class Keeps(bfc.BFCAllocator):
    """Keeps some of what was to be freed."""

    def deallocate_raw(self, ptr: int) -> None:
        if self.requested_size(ptr) != 100:
            super().deallocate_raw(ptr)


class FindsKeeps(AllocatorMachine):
    sizes = sizes(90, 110)

    def make(self) -> bfc.Allocator:
        return Keeps(bfc.SimulatedSubAllocator("64 MiB"))


def test_a_free_that_does_nothing_is_found() -> None:
    find(FindsKeeps, AssertionError, "in use, and")


class Raises(AllocatorMachine):
    """A source that is unplugged at the third call."""

    def make(self) -> bfc.Allocator:
        source = Misbehaving(bfc.SimulatedSubAllocator("64 MiB"))
        source.on("alloc", 3, raises=OSError("unplugged"))
        return bfc.BFCAllocator(source, allow_growth=True)


class ExpectsThat(Raises):
    expects = (bfc.SubAllocatorError,)


def test_what_a_source_raises_fails_unless_it_is_expected() -> None:
    find(Raises, bfc.SubAllocatorError, "unplugged")
    run(ExpectsThat, FEW)


def test_a_difference_to_the_model_is_found() -> None:
    twins = Twins(bfc.BFCAllocator(bfc.SimulatedSubAllocator("64 MiB"), allow_growth=True))
    twins.beside.model.slack_cap = 256  # the model splits where the allocator does not
    with pytest.raises(Differs, match="layout"):  # noqa: PT012
        for nbytes in (MIB, 600_000):
            twins.allocate(nbytes)
            twins.check()
    assert twins.has_failed
    twins.stop()


def test_a_call_that_the_model_does_not_make_is_found() -> None:
    twins = Twins(bfc.CachingAllocator(bfc.SimulatedSubAllocator("64 MiB"), strict=True))
    twins.beside.model.segment_size = lambda size: 4 * MIB
    with pytest.raises(Differs, match=r"the model calls alloc\(4194304\), the allocator alloc"):
        twins.allocate(100)


def test_a_default_allocator_leaves_the_model_where_it_serves_what_that_refuses() -> None:
    source = bfc.SimulatedSubAllocator("30 MiB")
    twins = Twins(bfc.CachingAllocator(source))
    twins.allocate(12 * MIB)
    assert twins.beside is not None
    assert twins.allocate(25 * MIB) is None
    assert twins.beside is None
    twins.close()


# What was done ---------------------------------------------------------------------------------


def test_the_history_is_a_trace() -> None:
    twins = Twins(bfc.BFCAllocator(bfc.SimulatedSubAllocator("64 MiB")))
    for nbytes in (1000, 1 << 40, 300):
        twins.allocate(nbytes)
    twins.free(0)
    trace = twins.trace()
    assert trace.op.tolist() == [0, 0, 0, 1]
    assert trace.id.tolist() == [0, 1, 2, 0]
    assert trace.size.tolist() == [1000, 1 << 40, 300, 0]
    replayed = trace.replay(bfc.BFCAllocator(bfc.SimulatedSubAllocator("64 MiB")))
    assert replayed.failed == 1
    twins.close()


def test_make_must_be_defined() -> None:
    with pytest.raises(NotImplementedError, match="define make"):
        run(AllocatorMachine, FEW)


def test_a_source_is_as_it_was_afterwards() -> None:
    source = bfc.SimulatedSubAllocator("64 MiB")
    before = dict(vars(source))
    twins = Twins(bfc.BFCAllocator(source))
    twins.allocate(100)
    twins.close()
    assert set(vars(source)) == set(before)


def test_no_model_for_what_it_does_not_know() -> None:
    used = bfc.BFCAllocator(bfc.SimulatedSubAllocator("64 MiB"))
    used.allocate_raw(100)
    source = bfc.SimulatedSubAllocator("64 MiB")
    strange = [
        used,
        bfc.BFCAllocator(source, retry_seconds=1.0),
        bfc.CachingAllocator(source, release_only_what_is_needed=True),
        Keeps(source),
        Bump(),
    ]
    assert [Twins(one).beside for one in strange] == [None] * 5
