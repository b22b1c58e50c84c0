"""The tape between an allocator and its model hears the calls for memory that is mapped."""

from __future__ import annotations

from typing import Any

import pytest

import bfc
from bfc_slow_models.recorded_source import Differs, Tape, TapedDevice, Unfollowable
from bfc_slow_models.torch_device import StandIn

MIB = 1 << 20


@pytest.fixture(params=[StandIn, bfc.SimulatedSubAllocator])
def source(request: pytest.FixtureRequest) -> Any:
    return request.param(100 * MIB)


def grow(device: Any) -> tuple[int, list[int]]:
    """What an allocator does for two chunks of 20 MiB."""
    address = device.reserve(120 * MIB)
    pages = [device.create(20 * MIB), device.create(20 * MIB)]
    device.map(address, pages)
    device.set_access(address, 40 * MIB)
    return address, pages


def shrink(device: Any, address: int, pages: list[int]) -> None:
    device.wait(0)
    for at, page in enumerate(pages):
        device.unmap(address + at * 20 * MIB, 20 * MIB)
        device.release(page)
    device.unreserve(address, 120 * MIB)


def test_a_model_that_makes_the_same_calls_gets_the_same_answers(source: Any) -> None:
    tape = Tape(source)
    address, pages = grow(source)
    assert tape.live == {address: 20 * MIB, address + 20 * MIB: 20 * MIB}
    shrink(source, address, pages)
    assert tape.live == {}
    model = TapedDevice(tape)
    assert grow(model) == (address, pages)
    shrink(model, address, pages)
    tape.check_empty()


def test_a_wait_is_one_call_though_it_asks_for_a_fence() -> None:
    class Waits(StandIn):
        def wait(self, stream: int) -> None:
            self.fence(stream).wait()

    source = Waits(100 * MIB)
    tape = Tape(source)
    source.wait(2)
    assert [call.kind for call in tape.calls] == ["wait"]


@pytest.mark.parametrize(
    ("ours", "models"),
    [
        (("reserve", 20 * MIB), ("reserve", 40 * MIB)),
        (("create", 2 * MIB), ("reserve", 2 * MIB)),
        (("wait", 2), ("wait", 4)),
    ],
)
def test_another_call_is_told(source: Any, ours: tuple[Any, ...], models: tuple[Any, ...]) -> None:
    tape = Tape(source)
    getattr(source, ours[0])(*ours[1:])
    with pytest.raises(Differs, match=f"the model calls {models[0]}.*the allocator {ours[0]}"):
        getattr(TapedDevice(tape), models[0])(*models[1:])


def test_other_pages_are_told(source: Any) -> None:
    tape = Tape(source)
    address, pages = grow(source)
    model = TapedDevice(tape)
    model.reserve(120 * MIB)
    model.create(20 * MIB)
    model.create(20 * MIB)
    with pytest.raises(Differs, match="map"):
        model.map(address, pages[::-1])


def test_a_failed_call_cannot_be_followed(source: Any) -> None:
    tape = Tape(source)
    with pytest.raises(bfc.SubAllocatorError):
        source.unmap(1 << 44, 2 * MIB)
    with pytest.raises(Unfollowable):
        TapedDevice(tape).unmap(1 << 44, 2 * MIB)


def test_nothing_is_heard_after_the_end(source: Any) -> None:
    tape = Tape(source)
    tape.stop()
    grow(source)
    assert not tape.calls
