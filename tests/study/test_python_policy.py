"""Policies written in Python: their replays, what is checked of them, and how errors are said."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

import bfc
from bfc.study import Policy, PythonPolicy, compare
from bfc.suballocators import SubAllocator
from bfc.testing import traces
from bfc_slow_models.tensorflow_model import Model
from bfc_tools.browser.data import data_of
from bfc_tools.study.counting import CountedSimulated
from bfc_tools.study.experiment import at_its_fullest
from examples.my_policies import BestFit, Buddy

ROOT = Path(__file__).parents[2]
RECORDING = ROOT / "tests" / "recordings" / "rec_magma27_snapshot.npz"
TRACE = ROOT / "bench" / "traces" / "gpu_decomfl.npz"
MIB = 1 << 20
BASE = 1 << 40  # of a simulated device


class SlowBFC(PythonPolicy):
    """The slow model of TensorFlow's policy, whose device is the policy itself."""

    def __init__(self, sub_allocator: SubAllocator, **options: Any) -> None:
        super().__init__(sub_allocator)
        self.supports_coalescing = sub_allocator.supports_coalescing
        device: Any = self
        self.model = Model(device, memory_limit=self.memory_limit, **options)

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        return self.take(nbytes)

    def allocate(self, size: int, stream: int) -> tuple[int, int] | None:
        address = self.model.allocate(size)
        if address is None:
            return None
        return address, next(it.size for it in self.model.chunks() if it.ptr == address)

    def free(self, address: int, nbytes: int = 0) -> None:
        if nbytes:  # the model gives a region back, or several that lie end to end
            end = address + nbytes
            for start in [it for it in self.regions if address <= it < end]:
                self.give_back(start)
        else:
            self.model.free(address)

    def release(self) -> None:
        self.model.release_free_regions()


def assert_same(ours: bfc.Replay, compiled: bfc.Replay) -> None:
    """All but the time."""
    assert np.array_equal(ours.addresses, compiled.addresses)
    assert ours.timeline is not None
    assert compiled.timeline is not None
    assert ours.timeline.to_frame().equals(compiled.timeline.to_frame())
    times = ["seconds", "ns_per_event"]
    assert ours.to_frame().drop(columns=times).equals(compiled.to_frame().drop(columns=times))


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("capacity", ["80 GiB", "600 MiB"])
def test_a_slow_bfc_places_as_the_compiled_one(capacity: str, joins: bool) -> None:
    """On the second device half of the requests are refused."""
    trace = bfc.Trace.load(TRACE)[:500]
    options: dict[str, Any] = {"allow_growth": True}

    def source() -> bfc.SimulatedSubAllocator:
        return bfc.SimulatedSubAllocator(capacity, supports_coalescing=joins)

    compiled = trace.replay(bfc.BFCAllocator(source(), **options), samples=len(trace))
    ours = SlowBFC(source(), **options)
    assert_same(trace.replay(ours, samples=len(trace)), compiled)
    assert (compiled.failed > 0) == (capacity == "600 MiB")


@given(traces())
def test_a_slow_bfc_places_as_the_compiled_one_in_any_history(trace: bfc.Trace) -> None:
    with bfc.BFCAllocator(bfc.SimulatedSubAllocator("4 MiB"), allow_growth=True) as allocator:
        compiled = trace.replay(allocator, samples=200)
        stats, regions = allocator.stats(), allocator.snapshot().regions
    with SlowBFC(bfc.SimulatedSubAllocator("4 MiB"), allow_growth=True) as policy:
        ours = trace.replay(policy, samples=200)
        mine = policy.snapshot()
    assert np.array_equal(ours.addresses, compiled.addresses)
    assert ours.failed == compiled.failed
    for name in ("bytes_in_use", "pool_bytes", "largest_free_block_bytes", "num_allocs"):
        assert getattr(mine.stats, name) == getattr(stats, name)
    assert [(it.ptr, it.size, len(it.chunks)) for it in mine.regions] == [
        (it.ptr, it.size, len(it.chunks)) for it in regions
    ]


def test_the_example_s_best_fit_places_as_tensorflow_s_policy_a_recording_that_began_late() -> None:
    trace = bfc.Trace.load(RECORDING)
    assert trace.beginning.events
    compiled = bfc.BFCAllocator(bfc.SimulatedSubAllocator("80 GiB"), allow_growth=True)
    ours = BestFit(bfc.SimulatedSubAllocator("80 GiB"))
    samples = len(trace)
    assert_same(trace.replay(ours, samples=samples), trace.replay(compiled, samples=samples))


@given(traces())
def test_a_buddy_allocator_breaks_no_rule(trace: bfc.Trace) -> None:
    with Buddy(bfc.SimulatedSubAllocator("256 MiB")) as policy:
        result = trace.closed().replay(policy)
        assert policy.stats().bytes_in_use == 0
        placed = result.addresses[result.addresses > 0]
        assert not (placed % 512).any()


# What is checked ------------------------------------------------------------------------------


class Scripted(PythonPolicy):
    """One region, and what a test says of each request."""

    def __init__(
        self,
        answers: list[Callable[[Scripted], Any]],
        on_free: Callable[[Scripted, int], Any] = lambda policy, address: None,
    ) -> None:
        super().__init__(bfc.SimulatedSubAllocator("1 MiB"))
        self.answers, self.on_free = iter(answers), on_free
        self.take(4096)

    def allocate(self, size: int, stream: int) -> Any:
        return next(self.answers)(self)

    def free(self, address: int) -> None:
        self.on_free(self, address)


def at(address: object) -> Callable[[Scripted], Any]:
    return lambda policy: address


HISTORY = bfc.Trace([0, 0, 1, 0], [0, 1, 0, 2], [1000, 512, 0, 100])
OK = at(BASE)


def give(address: int) -> Callable[[Scripted], Any]:
    return lambda policy: policy.give_back(address)


def divide(policy: Scripted) -> int:
    return 1 // 0


@pytest.mark.parametrize(
    ("answers", "event", "said"),
    [
        (
            [OK, at(BASE + 500)],
            1,
            "the answer is 0x100000001f4: its 512 bytes overlap the 1000 bytes at 0x10000000000",
        ),
        ([OK, at(BASE + 1000 - 512)], 1, "000 that event 0 allocated and nobody has freed"),
        ([OK, at(BASE - 256)], 1, "overlap the 1000 bytes"),
        ([OK, at(BASE + 3600)], 1, "its 512 bytes end 16 bytes behind their region, the 4096 byte"),
        ([OK, at(BASE + 4096)], 1, "its 512 bytes lie in no region of the policy: take() adds one"),
        ([at(BASE - 2000)], 0, "its 1000 bytes lie in no region"),
        ([at(0)], 0, "Scripted.allocate(1000, 0): the answer is 0: its 1000 bytes lie in no regi"),
        ([at((BASE, 999))], 0, "the block has 999 bytes, and 1000 were asked for"),
        ([at((BASE, 5000))], 0, "its 5000 bytes end 904 bytes behind their region"),
        ([at((BASE, 1000, 7))], 0, "an answer is an address, an address and the bytes of the blo"),
        ([at("0x100")], 0, "the answer is '0x100': an answer is an address"),
        ([at(True)], 0, "the answer is True: an answer is an address"),
        ([at(1.5)], 0, "the answer is 1.5: an answer is an address"),
        ([OK, divide], 1, "Scripted.allocate(512, 0): it raised ZeroDivisionError: integer"),
        ([OK, give(BASE)], 1, "give_back(0x10000000000) in allocate(512, 0): the 1000 bytes at 0"),
        ([give(BASE + 256)], 0, "give_back(0x10000000100) in allocate(1000, 0): no region begins"),
        ([lambda policy: policy.take(0)], 0, "take(0) in allocate(1000, 0): a region has at least"),
    ],
)
def test_a_broken_rule_is_said_with_its_event(answers: list[Any], event: int, said: str) -> None:
    policy = Scripted(answers)
    with pytest.raises(bfc.PolicyError, match=re.escape(said)) as found:
        HISTORY.replay(policy)
    assert str(found.value).startswith(f"event {event}: Scripted.")
    assert found.value.event == event
    # Nobody knows what the books of such a policy say: all that it had went back.
    assert policy.sub_allocator.live == {}  # type: ignore[attr-defined]
    with pytest.raises(bfc.ClosedError, match="this policy was closed"):
        HISTORY.replay(policy)


@pytest.mark.parametrize(
    ("on_free", "said"),
    [
        (lambda policy, address: {}[7], "Scripted.free(0x10000000000): it raised KeyError: 7"),
        # The block that is freed may go with its region, the other in it may not.
        (lambda policy, address: policy.give_back(BASE), "the 512 bytes at 0x10000000400 that ev"),
    ],
)
def test_a_fault_in_free_is_said_with_its_event(on_free: Any, said: str) -> None:
    with pytest.raises(bfc.PolicyError, match=re.escape(said)) as found:
        HISTORY.replay(Scripted([OK, at(BASE + 1024)], on_free))
    assert found.value.event == 2


def test_a_policy_that_frees_the_wrong_block_is_found_when_it_hands_that_out() -> None:
    class WrongFree(BestFit):
        def free(self, address: int) -> None:
            super().free(max(self.busy))

    with pytest.raises(bfc.PolicyError, match=r"event 3: .* that event 1 allocated and nobody"):
        HISTORY.replay(WrongFree(bfc.SimulatedSubAllocator("4 MiB")))


def test_none_refuses_and_the_free_of_what_was_refused_is_skipped() -> None:
    freed: list[int] = []
    policy = Scripted([at(None)] * 3, lambda policy, address: freed.append(address))
    result = HISTORY.replay(policy, samples=9)
    assert (result.failed, result.addresses.tolist(), freed) == (3, [0] * 4, [])
    assert (result.peak_bytes_live, result.peak_bytes_reserved) == (0, 4096)
    assert result.timeline is not None
    assert result.timeline.refused.tolist() == [1, 2, 2, 3]


def test_a_region_that_is_taken_and_given_back_within_an_event_is_a_peak() -> None:
    def spare(policy: Scripted) -> int:
        taken = policy.take(8192)
        assert taken is not None
        policy.give_back(taken[0])
        return BASE

    result = HISTORY.replay(Scripted([spare, at(None), at(None)]), samples=9)
    assert result.timeline is not None
    assert result.peak_bytes_reserved == result.timeline.reserved.max() == 4096 + 8192
    assert result.timeline.event.tolist()[:2] == [0, 0]  # the moment within the event has a row
    assert set(result.timeline.driver_calls.tolist()) == {2}


def test_errors_that_are_not_the_policy_s_come_as_they_are() -> None:
    source = bfc.SimulatedSubAllocator("64 MiB")
    source.fail_at(1, error=bfc.DriverError("cuMemAlloc", 700, "CUDA_ERROR_ILLEGAL_ADDRESS"))
    with pytest.raises(bfc.DriverError):
        HISTORY.replay(BestFit(source))
    with pytest.raises(bfc.ClosedError):
        HISTORY.replay(Scripted([lambda policy: policy.close()]))

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    policy = Buddy(bfc.SimulatedSubAllocator("64 MiB"))
    with pytest.raises(KeyboardInterrupt):
        HISTORY.replay(policy, progress=stop)
    assert policy.regions == {}


def test_a_policy_that_never_called_super_says_so() -> None:
    class Forgot(BestFit):
        def __init__(self, source: SubAllocator) -> None:
            self.books = 0

    with pytest.raises(bfc.ClosedError, match=r"Forgot.__init__ must begin with super\(\)"):
        HISTORY.replay(Forgot(bfc.SimulatedSubAllocator("1 MiB")))
    with pytest.raises(TypeError, match="a trace is replayed on an allocator, not ABCMeta"):
        HISTORY.replay(BestFit)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="abstract"):
        PythonPolicy(bfc.SimulatedSubAllocator("1 MiB"))  # type: ignore[abstract]


def test_a_limit_is_kept_and_a_second_replay_goes_on_where_the_first_ended() -> None:
    source = bfc.SimulatedSubAllocator("64 MiB")
    policy = BestFit(source, memory_limit="3 MiB")
    first = bfc.Trace([0], [0], [MIB]).replay(policy)
    second = bfc.Trace([0, 0, 0], [0, 1, 2], [MIB, 2 * MIB, MIB]).replay(policy)
    assert (first.failed, second.failed) == (0, 1)
    assert policy.stats().bytes_in_use == 3 * MIB
    assert second.peak_bytes_live == 2 * MIB  # of this replay alone
    assert len(source.calls) == 2  # what is above the limit is not asked for
    policy.close()
    assert source.live == {}


def test_owners_and_streams_are_in_the_snapshot() -> None:
    trace = bfc.Trace([0, 0], [0, 1], [512, 256], [0, 3], owner=[1, 0], owners=["", "weights"])
    policy = BestFit(bfc.SimulatedSubAllocator("4 MiB"))
    trace.replay(policy)
    chunks = [(it.owner, it.stream) for it in policy.snapshot().live_chunks()]
    assert chunks == [("weights", 0), ("", 3)]
    assert policy.stats().by_owner == {"weights": 512, "": 256}


# Beside the compiled ones ---------------------------------------------------------------------


def test_it_has_a_row_and_a_timeline_and_a_picture_beside_the_others() -> None:
    kinds = {"bfc": bfc.BFCAllocator, "buddy": Buddy}
    found = compare(HISTORY, kinds, "1 GiB", passes=1, samples=9)
    assert [(row.policy, row.refused, row.regions_taken) for row in found] == [
        ("bfc", 0, 1),
        ("buddy", 0, 1),
    ]
    assert found[1].peak_bytes_in_use == 1024 + 512
    assert list(found.timelines) == ["bfc", "buddy"]
    assert found.to_frame()["peak_bytes_reserved"].tolist() == [1024 * MIB, 64 * MIB]
    snapshot = at_its_fullest(HISTORY, Policy("buddy", Buddy), lambda: CountedSimulated("1 GiB"))
    assert "1.5 KiB in use (2 chunks), 64.00 MiB reserved" in str(snapshot)


def test_a_report_shows_it() -> None:
    found = data_of([("small", HISTORY)], [Policy("my:Buddy", Buddy), Policy("bfc", BestFit)])
    buddy = found["runs"][0]
    assert (buddy["label"], buddy["peak_reserved"]) == ("my:Buddy", 64 * MIB)
    assert buddy["timeline"]["in_use"] == [1024, 1536, 512, 1024]
    assert buddy["segments"]["size"] == [64 * MIB]
