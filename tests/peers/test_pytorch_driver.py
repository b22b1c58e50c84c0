"""The driver that the compiled PyTorch runs on: it writes down each call, refuses what it is told
to, and complains as a real one where a call makes no sense."""

from __future__ import annotations

import pytest

from bench.peers.server import Failure
from bench.peers.torch import TorchPeer

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("torch_peer")]

MIB = 1 << 20
RANGE = 1 << 44
UNKNOWN = 999


def kind_of(answer: object) -> str | None:
    return answer.kind if isinstance(answer, Failure) else None


def test_every_call_stands_in_the_log_with_its_bytes_and_address() -> None:
    with TorchPeer(torch="2.11", settings="expandable_segments:True", capacity=200 * MIB) as peer:
        address = peer.malloc(25 * MIB, 2)
        assert address == RANGE
        peer.free(address)
        peer.empty_cache()
        assert peer.calls == [
            ("reserve", 240 * MIB, RANGE),
            ("create", 20 * MIB, 1),
            ("create", 20 * MIB, 2),
            ("map", 20 * MIB, RANGE),
            ("map", 20 * MIB, RANGE + 20 * MIB),
            ("access", 40 * MIB, RANGE),
            ("wait", 0, 2),
            ("unmap", 20 * MIB, RANGE),
            ("release", 20 * MIB, 1),
            ("unmap", 20 * MIB, RANGE + 20 * MIB),
            ("release", 20 * MIB, 2),
            ("unreserve", 240 * MIB, RANGE),
        ]
        assert peer.live_bytes == 0


def test_reservations_lie_end_to_end() -> None:
    with TorchPeer(torch="2.11", settings="expandable_segments:True", capacity=200 * MIB) as peer:
        addresses = [peer.malloc(512), peer.malloc(4 * MIB), peer.malloc(512, 2)]
        assert addresses == [RANGE, RANGE + 226 * MIB, RANGE + 466 * MIB]


@pytest.mark.parametrize("kind", ["reserve", "create", "map", "access"])
@pytest.mark.parametrize("n", [1, 2])
def test_one_kind_of_call_fails_on_order(kind: str, n: int) -> None:
    with TorchPeer(torch="2.11", settings="expandable_segments:True", fabric=False) as peer:
        peer.fail_at(n, UNKNOWN, kind)
        answers = [peer.malloc(25 * MIB, stream) for stream in (0, 2)]
        once_a_request = kind in ("reserve", "access")
        failing = n - 1 if once_a_request else 0
        assert [kind_of(answer) for answer in answers] == [
            "driver" if at == failing else None for at in range(2)
        ]
        refused = [call for call in peer.calls if call[2] is None]
        nbytes = {"reserve": 90 * 1024 * MIB, "access": 40 * MIB}.get(kind, 20 * MIB)
        assert refused == [(kind, nbytes, None)]


def test_an_unmapping_fails_on_order() -> None:
    with TorchPeer(torch="2.11", settings="expandable_segments:True") as peer:
        peer.free(peer.malloc(25 * MIB))
        peer.fail_at(2, UNKNOWN, "unmap")
        assert kind_of(peer.empty_cache()) == "driver"
        assert peer.calls[-1] == ("unmap", 20 * MIB, None)
        assert peer.live_bytes == 20 * MIB


def test_without_fabric_handles_an_error_of_the_driver_is_raised_at_once() -> None:
    # (PyTorch's behaviour, EX-32)
    with TorchPeer(torch="2.11", settings="expandable_segments:True", fabric=False) as peer:
        peer.malloc(4 * MIB)
        before = peer.stats(), peer.snapshot()
        peer.fail_at(1, UNKNOWN, "create")
        assert kind_of(peer.malloc(60 * MIB)) == "driver"
        assert (peer.stats(), peer.snapshot()) == before


def test_with_fabric_handles_any_error_of_a_creation_is_a_lack_of_memory() -> None:
    # (PyTorch's behaviour, EX-33)
    with TorchPeer(torch="2.11", settings="expandable_segments:True") as peer:
        peer.malloc(4 * MIB)
        peer.fail_at(1, UNKNOWN, "create")
        assert peer.malloc(60 * MIB) == RANGE + 4 * MIB
        assert peer.stats()["num_alloc_retries"] == 1


def test_a_pool_with_an_allocator_of_its_own_has_ordinary_segments() -> None:
    # (PyTorch's behaviour, EX-45)
    with TorchPeer(torch="2.11", settings="expandable_segments:True") as peer:
        peer.create_pool((0, 2), own_allocator=True)
        peer.begin_pool((0, 2))
        address = peer.malloc(4 * MIB)
        assert peer.calls == [("pool_malloc", 20 * MIB, address)]
        assert [segment["is_expandable"] for segment in peer.snapshot()] == [False]
        assert peer.stats()["segment.all.current"] == 1


def test_an_order_for_any_call_that_takes_memory_counts_pages_too() -> None:
    with TorchPeer(torch="2.11", settings="expandable_segments:True") as peer:
        peer.fail_at(2)
        assert peer.malloc(60 * MIB) == RANGE
        assert [call[2] for call in peer.calls if call[0] == "create"] == [1, None, 2, 3, 4]


def test_the_device_can_be_made_smaller_or_larger() -> None:
    with TorchPeer(torch="2.11", settings="expandable_segments:True", capacity=100 * MIB) as peer:
        peer.malloc(20 * MIB)
        peer.resize(30 * MIB)
        assert kind_of(peer.malloc(20 * MIB)) == "oom"
        peer.resize(10 * MIB)
        assert kind_of(peer.malloc(20 * MIB, 2)) == "oom"
        assert ("reserve", 20 * MIB, RANGE + 120 * MIB) in peer.calls
        peer.resize(300 * MIB)
        assert peer.malloc(60 * MIB) == RANGE + 20 * MIB


def test_the_text_names_what_is_missing_and_proposes_what_is_on_already() -> None:
    # (PyTorch's behaviour, EX-48)
    with TorchPeer(torch="2.11", settings="expandable_segments:True", capacity=50 * MIB) as peer:
        peer.malloc(30 * MIB)
        answer = peer.malloc(60 * MIB)
    assert isinstance(answer, Failure)
    for part in (
        "Tried to allocate 60.00 MiB",
        "30.00 MiB is allocated",
        "10.00 MiB is reserved by PyTorch but unallocated",
        "expandable_segments:True",
    ):
        assert part in answer.text, answer.text
