"""PyTorch 2.11's compiled caching allocator does what docs/behaviour/pytorch.md says.

This holds the peer, not ours: that it is the real thing, and driven right. "(row 9)" is a number
among the corner cases there.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from torch_corners import check_sums

import bfc
from bench.peers.server import Failure, PeerDied
from bench.peers.torch import COUNTERS, STATS, TorchPeer

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("torch_peer")]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BASE = 1 << 40
SIDE, OTHER = 2, 4
POOL, SECOND_POOL = (0, 1), (0, 2)
TRACES = Path(__file__).parents[2] / "bench" / "traces"
RECORDED = sorted(TRACES.glob("gpu_*.npz"))

Make = Callable[..., TorchPeer]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes peers that end with the test."""
    peers = []

    def start(torch: str = "2.11", **options: object) -> TorchPeer:
        peers.append(TorchPeer(torch=torch, **options))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


@pytest.fixture
def peer(make: Make) -> TorchPeer:
    return make()


def now(peer: TorchPeer, group: str) -> int:
    return peer.stats()[f"{group}.all.current"]


def take(peer: TorchPeer, nbytes: int, stream: int = 0) -> int:
    address = peer.malloc(nbytes, stream)
    assert isinstance(address, int), address
    return address


def cache(peer: TorchPeer, *sizes: int, stream: int = 0) -> list[int]:
    """Blocks of these sizes that are free again."""
    addresses = [take(peer, size, stream) for size in sizes]
    for address in addresses:
        assert peer.free(address) is None
    return addresses


def sizes(peer: TorchPeer) -> list[list[int]]:
    return [[block["size"] for block in segment["blocks"]] for segment in peer.snapshot()]


def states(peer: TorchPeer) -> list[str]:
    return [block["state"] for segment in peer.snapshot() for block in segment["blocks"]]


def named(peer: TorchPeer, name: str) -> list[tuple[str, int, int | None]]:
    return [call for call in peer.calls if call[0] == name]


def is_failure(answer: object, kind: str) -> bool:
    return isinstance(answer, Failure) and answer.kind == kind


# Sizes and splitting -------------------------------------------------------------------------


def test_no_bytes_are_no_allocation(peer: TorchPeer) -> None:  # (row 1)
    peer.record_history(True)
    before = peer.stats()
    assert peer.malloc(0) == 0
    assert peer.allocate(0) == 0
    assert peer.stats() == before
    assert peer.trace() == []
    assert peer.calls == []


def test_one_byte_takes_a_small_segment(peer: TorchPeer) -> None:  # (row 2)
    assert take(peer, 1) == BASE
    stats = peer.stats()
    assert stats["allocated_bytes.all.current"] == 512
    assert stats["requested_bytes.all.current"] == 1
    assert stats["reserved_bytes.small_pool.current"] == 2 * MIB
    assert stats["segment.all.current"] == 1
    assert stats["inactive_split.all.current"] == 1
    assert stats["inactive_split_bytes.all.current"] == 2096640
    assert peer.calls == [("malloc", 2 * MIB, BASE)]


@pytest.mark.parametrize(
    ("nbytes", "layout"),
    [
        (MIB - 511, [[MIB, MIB]]),  # (row 5)
        (MIB + 1, [[1049088, 19922432]]),  # (row 6)
        (10 * MIB - 512, [[10 * MIB - 512, 10486272]]),  # (row 7)
        (10 * MIB - 511, [[10 * MIB]]),  # (row 8)
        (10 * MIB, [[10 * MIB]]),
        (10 * MIB + 1, [[10486272, 2096640]]),  # (row 9)
        (11 * MIB, [[12 * MIB]]),  # (row 10)
        (11 * MIB - 512, [[11533824, 1049088]]),  # (row 11)
        (19 * MIB, [[20 * MIB]]),  # (row 12)
    ],
)
def test_a_request_is_rounded_placed_and_split(
    peer: TorchPeer, nbytes: int, layout: list[list[int]]
) -> None:
    take(peer, nbytes)
    assert sizes(peer) == layout
    assert now(peer, "allocated_bytes") == layout[0][0]
    assert now(peer, "requested_bytes") == nbytes


def test_small_blocks_stand_side_by_side(make: Make) -> None:  # (rows 3, 4)
    peer = make()
    first, second = take(peer, 512), take(peer, 513)
    assert second - first == 512
    assert sizes(peer) == [[512, 1024, 2 * MIB - 1536]]
    peer = make()
    assert [take(peer, MIB), take(peer, MIB)] == [BASE, BASE + MIB]
    assert sizes(peer) == [[MIB, MIB]]
    assert now(peer, "inactive_split") == 0


def test_best_fit_and_the_low_part(peer: TorchPeer) -> None:  # (rows 14, 15)
    a, b = take(peer, 24 * MIB), take(peer, 30 * MIB)
    peer.free(b)
    peer.free(a)
    assert take(peer, 23 * MIB) == a
    low, high = take(peer, 4 * MIB), take(peer, 4 * MIB)
    assert (low, high) == (b, b + 4 * MIB)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_neighbours_merge_in_any_order(peer: TorchPeer, order: tuple[int, ...]) -> None:  # (row 16)
    blocks = [take(peer, 4 * MIB) for _ in range(3)]
    for number in order:
        peer.free(blocks[number])
    assert sizes(peer) == [[20 * MIB]]
    assert now(peer, "inactive_split") == 0


def test_a_hole_is_used_again(peer: TorchPeer) -> None:  # (row 17)
    blocks = [take(peer, 4 * MIB) for _ in range(3)]
    peer.free(blocks[1])
    assert now(peer, "inactive_split") == 2
    assert take(peer, 4 * MIB) == blocks[1]


@pytest.mark.parametrize("first_is_lower", [True, False])
def test_equal_sizes_go_by_address(make: Make, first_is_lower: bool) -> None:  # (row 18)
    segments = [BASE, BASE + GIB] if first_is_lower else [BASE + GIB, BASE]
    peer = make(addresses=segments)
    blocks = [take(peer, 4 * MIB) for _ in range(10)]
    for number in (7, 2):
        peer.free(blocks[number])
    assert take(peer, 4 * MIB) == min(blocks[7], blocks[2])


def test_streams_do_not_share(peer: TorchPeer) -> None:  # (row 19)
    (first,) = cache(peer, 4 * MIB, stream=SIDE)
    assert take(peer, 4 * MIB, OTHER) != first
    assert now(peer, "reserved_bytes") == 40 * MIB
    assert take(peer, 4 * MIB, SIDE) == first


def test_far_too_much(peer: TorchPeer) -> None:  # (row 20)
    assert is_failure(peer.allocate(1 << 60), "oom")
    assert (now_counter(peer, "num_ooms"), peer.calls) == (0, [])
    assert is_failure(peer.malloc(1 << 60), "oom")
    assert (now_counter(peer, "num_ooms"), len(peer.calls)) == (1, 2)


def now_counter(peer: TorchPeer, name: str) -> int:
    assert name in COUNTERS
    return peer.stats()[name]


def test_pointers_that_are_none(peer: TorchPeer) -> None:  # (row 21)
    address = take(peer, 4096)
    peer.free(address)
    live = take(peer, 512)
    before = peer.stats(), peer.snapshot()
    for wrong in (live + 512, live + 1, 12345):
        assert is_failure(peer.free(wrong), "internal")
    assert (peer.stats(), peer.snapshot()) == before
    assert peer.free(live) is None
    assert is_failure(peer.free(live), "internal")
    assert peer.free(0) is None


def test_a_live_block_holds_its_segment(peer: TorchPeer) -> None:  # (row 23)
    kept, freed = take(peer, 512), take(peer, 512)
    peer.free(freed)
    assert peer.empty_cache() is None
    assert now(peer, "segment") == 1
    peer.free(kept)
    peer.empty_cache()
    assert now(peer, "reserved_bytes") == 0
    assert peer.calls[-1] == ("free", 2 * MIB, BASE)
    assert peer.live_bytes == 0


def test_without_caching(make: Make) -> None:  # (row 24)
    peer = make(environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    address = take(peer, 1000)
    peer.record_stream(address, SIDE)
    peer.free(address)
    assert peer.calls == [("malloc", 1000, BASE), ("free", 1000, BASE)]
    assert peer.snapshot() == []
    assert set(peer.stats().values()) <= {0, -1}


# Streams and events --------------------------------------------------------------------------


def test_a_recorded_block_waits_for_its_event(peer: TorchPeer) -> None:  # (rows 25 to 27)
    peer.record_history(True)
    peer.hold(SIDE)
    address = take(peer, 4 * MIB)
    peer.record_stream(address, SIDE)
    peer.free(address)
    assert now(peer, "allocated_bytes") == 0
    assert now(peer, "active_bytes") == now(peer, "requested_bytes") == 4 * MIB
    assert states(peer) == ["active_pending_free", "inactive"]
    peer.finish(SIDE)
    assert states(peer) == ["active_pending_free", "inactive"]
    assert named(peer, "event_query") == []
    assert take(peer, 4 * MIB) == address
    actions = [entry["action"] for entry in peer.trace()]
    assert [action for action in actions if action != "snapshot"] == [
        "segment_alloc",
        "alloc",
        "free_requested",
        "free_completed",
        "alloc",
    ]


def test_events_are_polled_even_by_what_fails(peer: TorchPeer) -> None:  # (row 27)
    peer.hold(SIDE)
    address = take(peer, 4 * MIB)
    peer.record_stream(address, SIDE)
    peer.free(address)
    take(peer, 512)
    assert named(peer, "event_query") == [("event_query", 1, 0)]
    assert states(peer).count("active_pending_free") == 1
    peer.finish(SIDE)
    assert is_failure(peer.malloc(100 * GIB), "oom")
    assert states(peer).count("active_pending_free") == 0


def test_its_own_stream_and_the_same_twice(peer: TorchPeer) -> None:  # (rows 28, 29)
    address = take(peer, 4 * MIB, SIDE)
    peer.record_stream(address, SIDE)
    peer.free(address)
    assert named(peer, "event_record") == []
    assert take(peer, 4 * MIB, SIDE) == address
    peer.record_stream(address, OTHER)
    peer.record_stream(address, OTHER)
    peer.free(address)
    assert named(peer, "event_record") == [("event_record", 1, OTHER)]


def test_two_streams_must_both_finish(peer: TorchPeer) -> None:  # (row 30)
    for stream in (SIDE, OTHER):
        peer.hold(stream)
    address = take(peer, 4 * MIB)
    peer.record_stream(address, SIDE)
    peer.record_stream(address, OTHER)
    peer.free(address)
    peer.finish(SIDE)
    take(peer, 512)
    assert "active_pending_free" in states(peer)
    peer.finish(OTHER)
    take(peer, 512)
    assert "active_pending_free" not in states(peer)


def test_events_of_one_stream_come_in_order(peer: TorchPeer) -> None:  # (rows 31, 32)
    peer.hold(SIDE)
    x, y, z = (take(peer, 4 * MIB) for _ in range(3))
    for address, stream in ((x, SIDE), (y, SIDE), (z, OTHER)):
        peer.record_stream(address, stream)
        peer.free(address)
    take(peer, 512)
    assert states(peer).count("active_pending_free") == 2  # z's stream is not held
    peer.finish_events(SIDE, 1)
    assert take(peer, 4 * MIB) == x
    assert states(peer).count("active_pending_free") == 1


def test_a_pending_neighbour_is_not_merged(peer: TorchPeer) -> None:  # (row 33)
    a, b = take(peer, 4 * MIB), take(peer, 4 * MIB)
    peer.hold(SIDE)
    peer.record_stream(b, SIDE)
    peer.free(b)
    peer.free(a)
    assert sizes(peer) == [[4 * MIB, 4 * MIB, 12 * MIB]]
    peer.finish(SIDE)
    take(peer, 512)
    assert sizes(peer)[0] == [20 * MIB]


def test_emptying_waits(peer: TorchPeer) -> None:  # (row 33b)
    peer.hold(SIDE)
    address = take(peer, 30 * MIB)
    peer.record_stream(address, SIDE)
    peer.free(address)
    peer.empty_cache()
    assert named(peer, "event_synchronize") == [("event_synchronize", 1, SIDE)]
    assert now(peer, "reserved_bytes") == 0
    peer.empty_cache()
    assert now_counter(peer, "num_sync_all_streams") == 2
    assert now_counter(peer, "num_alloc_retries") == 0


def test_a_scope_defers_what_is_recorded(peer: TorchPeer) -> None:  # (rows 34, 34b)
    peer.hold(SIDE)
    peer.create_pool(POOL)
    peer.begin_pool(POOL)
    address = take(peer, 30 * MIB)
    peer.record_stream(address, SIDE)
    peer.free(address)
    assert take(peer, 30 * MIB) != address
    assert peer.end_pool(POOL) is None
    take(peer, 512)
    assert named(peer, "event_record") == []
    assert peer.begin_pool(POOL) is None
    assert take(peer, 30 * MIB) == address


# Limits, collection and large blocks -----------------------------------------------------------


def test_the_limit_may_be_reached(make: Make) -> None:  # (rows 35, 36)
    peer = make(capacity=80 * MIB)
    peer.set_memory_fraction(0.5)
    for nbytes in (4 * MIB, 19 * MIB, 16 * MIB):
        take(peer, nbytes)
    assert now(peer, "reserved_bytes") == 40 * MIB
    assert is_failure(peer.malloc(4 * MIB), "oom")
    assert peer.set_memory_fraction(1.0) is None
    take(peer, 4 * MIB)
    assert is_failure(peer.set_memory_fraction(1.5), "internal")
    assert peer.memory_fraction() == 1.0


def test_a_limit_of_nothing(peer: TorchPeer) -> None:  # (row 37)
    (address,) = cache(peer, 512)
    peer.set_memory_fraction(0.0)
    assert take(peer, 512) == address
    assert is_failure(peer.malloc(2 * MIB), "oom")


def test_what_one_failure_costs(make: Make) -> None:  # (row 38)
    peer = make(capacity=16 * MIB)
    peer.record_history(True)
    answer = peer.malloc(4 * MIB - 100)
    assert is_failure(answer, "oom")
    assert "20.00 MiB" in answer.text
    for counter in ("num_alloc_retries", "num_ooms", "num_sync_all_streams"):
        assert now_counter(peer, counter) == 1
    assert [(entry["action"], entry["addr"], entry["size"]) for entry in peer.trace()] == [
        ("oom", 16 * MIB, 4 * MIB)
    ]
    assert peer.calls == [("malloc", 20 * MIB, None)] * 2


def test_another_streams_cache_is_given_up(make: Make) -> None:  # (row 39)
    peer = make(capacity=100 * MIB)
    cache(peer, 80 * MIB, stream=SIDE)
    take(peer, 60 * MIB, OTHER)
    assert now_counter(peer, "num_alloc_retries") == 1
    assert now_counter(peer, "num_device_free") == 1


def test_no_second_search_after_the_wait(make: Make) -> None:  # (row 40)
    peer = make(capacity=20 * MIB)
    pending, _rest = take(peer, 8 * MIB), take(peer, 9 * MIB)
    peer.hold(SIDE)
    peer.record_stream(pending, SIDE)
    peer.free(pending)
    assert is_failure(peer.malloc(8 * MIB), "oom")
    assert take(peer, 8 * MIB) == pending


def test_large_blocks_are_kept_for_large_requests(make: Make) -> None:  # (rows 41, 42, 44)
    peer = make(settings="max_split_size_mb:32", capacity=160 * MIB)
    (block,) = cache(peer, 40 * MIB)
    assert take(peer, 16 * MIB) != block
    assert take(peer, 32 * MIB) == block
    assert peer.stats()["oversize_allocations.current"] == 1
    cache(peer, 84 * MIB)
    take(peer, 64 * MIB)
    assert now_counter(peer, "num_alloc_retries") == 0
    assert named(peer, "free")[0][1] == 84 * MIB


def test_a_large_block_must_not_be_much_too_large(make: Make) -> None:  # (row 43)
    for cached, reused in ((84, False), (82, True)):
        peer = make(settings="max_split_size_mb:32")
        (block,) = cache(peer, cached * MIB)
        assert (take(peer, 64 * MIB) == block) == reused


def test_the_largest_go_first(make: Make) -> None:  # (rows 44b, 44c)
    peer = make(settings="max_split_size_mb:32", capacity=160 * MIB)
    cache(peer, 34 * MIB, 36 * MIB, 38 * MIB, 40 * MIB)
    take(peer, 70 * MIB)
    assert [nbytes for _, nbytes, _ in named(peer, "free")] == [40 * MIB, 38 * MIB]
    assert now_counter(peer, "num_alloc_retries") == 0


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb:2",  # (row 45)
        "max_split_size_mb:19",
        "no_such_key:1",  # (row 52)
        "expandable_segments:true",
        "garbage_collection_threshold:1.0",
        "roundup_power2_divisions:3",
    ],
)
def test_settings_that_are_refused(make: Make, text: str) -> None:
    assert is_failure(make().set_settings(text), "value")
    with pytest.raises(ValueError, match=r"^value: "):
        make(settings=text)


def test_the_stat_is_that_of_the_start(make: Make) -> None:  # (rows 49, 50)
    peer = make()
    assert peer.set_settings("max_split_size_mb:40") is None
    assert now_counter(peer, "max_split_size") == -1
    (block,) = cache(peer, 40 * MIB)
    assert take(peer, 30 * MIB) != block
    assert peer.set_settings("expandable_segments:False") is None  # resets it
    assert take(peer, 25 * MIB) == block
    assert make(settings="max_split_size_mb:40").stats()["max_split_size"] == 40 * MIB


@pytest.mark.parametrize(("fraction", "reserved"), [(120 / 400, 80), (1.0, 160)])
def test_collection(make: Make, fraction: float, reserved: int) -> None:  # (rows 46, 47)
    peer = make(capacity=400 * MIB, settings="garbage_collection_threshold:0.5")
    peer.set_memory_fraction(fraction)
    cache(peer, 40 * MIB, 40 * MIB)
    take(peer, 80 * MIB)
    assert now(peer, "reserved_bytes") == reserved * MIB
    assert now_counter(peer, "num_alloc_retries") == 0


def test_the_first_variable_wins(make: Make) -> None:  # (row 53)
    environment = {
        "PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:4",
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:40",
    }
    peer = make(environment=environment)
    assert now_counter(peer, "max_split_size") == -1
    take(peer, 84 * MIB)
    assert sizes(peer) == [[96 * MIB]]


def test_a_driver_error_is_no_lack_of_memory(peer: TorchPeer) -> None:  # (2.9, step 7)
    peer.fail_at(1, 999)
    assert is_failure(peer.malloc(512), "driver")
    assert peer.malloc(512) == BASE
    assert now_counter(peer, "num_ooms") == 0


# Private pools and expandable segments ---------------------------------------------------------


def test_pools_do_not_share(peer: TorchPeer) -> None:  # (rows 54, 55)
    peer.create_pool(POOL)
    peer.begin_pool(POOL)
    inside = take(peer, 30 * MIB)
    peer.free(inside)
    peer.end_pool(POOL)
    take(peer, 30 * MIB)
    assert [segment["segment_pool_id"] for segment in peer.snapshot()] == [POOL, (0, 0)]
    assert [segment["address"] for segment in peer.snapshot(POOL)] == [inside]
    assert peer.pool_use_count(POOL) == 2
    peer.release_pool(POOL)
    peer.empty_cache()
    assert now(peer, "segment") == 2
    peer.release_pool(POOL)
    peer.empty_cache()
    assert now(peer, "segment") == 1


def test_scopes_nest_and_have_streams(peer: TorchPeer) -> None:  # (rows 57, 58)
    for pool in (POOL, SECOND_POOL):
        peer.create_pool(pool)
    peer.begin_pool(POOL)
    peer.begin_pool(SECOND_POOL, SIDE)
    take(peer, 30 * MIB, SIDE)
    take(peer, 30 * MIB)
    peer.end_pool(SECOND_POOL)
    take(peer, 30 * MIB, SIDE)
    peer.end_pool(POOL)
    peer.begin_pool(POOL, "none")
    take(peer, 30 * MIB)
    ids = [segment["segment_pool_id"] for segment in peer.snapshot()]
    assert ids == [SECOND_POOL, POOL, POOL, (0, 0)]
    assert is_failure(peer.begin_pool(POOL), "internal")
    assert is_failure(peer.end_pool(SECOND_POOL), "internal")


def test_a_pool_that_does_not_split(peer: TorchPeer) -> None:  # (row 59)
    peer.create_pool(POOL)
    peer.set_no_split(POOL)
    peer.begin_pool(POOL)
    take(peer, 4 * MIB)
    take(peer, 4 * MIB)
    assert sizes(peer) == [[20 * MIB], [20 * MIB]]


def test_a_pool_that_lends(make: Make) -> None:  # (row 60)
    peer = make(capacity=40 * MIB)
    peer.create_pool(POOL)
    peer.begin_pool(POOL)
    (block,) = cache(peer, 40 * MIB)
    peer.end_pool(POOL)
    assert is_failure(peer.malloc(30 * MIB), "oom")
    peer.set_use_on_oom(POOL)
    assert take(peer, 30 * MIB) == block
    assert sizes(peer) == [[30 * MIB, 10 * MIB]]
    peer.free(block)
    assert [segment["segment_pool_id"] for segment in peer.snapshot()] == [POOL]


def test_a_pool_with_its_own_allocator(make: Make) -> None:  # (row 61, 2.14)
    peer = make(capacity=50 * MIB, settings="expandable_segments:True")
    peer.create_pool(POOL, own_allocator=True)
    peer.begin_pool(POOL)
    assert sizes(peer) == []
    address = take(peer, 4 * MIB)
    assert peer.calls == [("pool_malloc", 20 * MIB, address)]
    assert is_failure(peer.malloc(40 * MIB), "oom")
    peer.free(address)
    peer.end_pool(POOL)
    for _ in range(2):
        peer.release_pool(POOL)
    peer.empty_cache()
    assert peer.calls[-1] == ("pool_free", 20 * MIB, address)


def test_an_expandable_segment_grows(make: Make) -> None:  # (rows 62, 63)
    peer = make(settings="expandable_segments:True")
    first = take(peer, 2 * MIB)
    assert sizes(peer) == [[2 * MIB, 18 * MIB]]
    assert (now(peer, "segment"), now(peer, "inactive_split")) == (0, 0)
    assert take(peer, 32 * MIB) == first + 2 * MIB
    assert sizes(peer) == [[2 * MIB, 32 * MIB, 6 * MIB]]
    assert now(peer, "reserved_bytes") == peer.live_bytes == 40 * MIB
    assert [segment["is_expandable"] for segment in peer.snapshot()] == [True]
    assert [nbytes for _, nbytes, _ in named(peer, "create")] == [20 * MIB] * 2
    assert named(peer, "malloc") == []


def test_an_expandable_segment_shrinks(make: Make) -> None:  # (rows 64, 65)
    peer = make(settings="expandable_segments:True", reserve_base=1 << 45)
    cache(peer, 25 * MIB)
    peer.empty_cache()
    assert now(peer, "reserved_bytes") == peer.live_bytes == 0
    assert now_counter(peer, "num_device_free") == 1
    reserved = 20 * MIB * -(-(80 * GIB * 9 // 8) // (20 * MIB))
    assert named(peer, "reserve") == [("reserve", reserved, 1 << 45)]
    assert named(peer, "unreserve") == [("unreserve", reserved, 1 << 45)]
    assert len(named(peer, "wait")) == 1
    take(peer, 512)
    assert now(peer, "reserved_bytes") == 2 * MIB


def test_only_whole_chunks_are_unmapped(make: Make) -> None:  # (row 66b)
    peer = make(settings="expandable_segments:True")
    blocks = [take(peer, size * MIB) for size in (10, 60, 10)]
    peer.free(blocks[1])
    peer.empty_cache()
    assert sizes(peer) == [[10 * MIB, 10 * MIB], [10 * MIB, 10 * MIB]]


def test_the_option_turned_on_later(peer: TorchPeer) -> None:  # (rows 67, 68)
    (block,) = cache(peer, 12 * MIB)
    peer.set_settings("expandable_segments:True")
    assert take(peer, 11 * MIB) == block
    assert now(peer, "inactive_split_bytes") == MIB
    (mapped,) = cache(peer, 30 * MIB)
    peer.set_settings("expandable_segments:False")
    assert take(peer, 30 * MIB) != mapped


# Rounding, statistics and the trace ------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "nbytes", "size"),
    [
        ("4", 84 * MIB, 96 * MIB),  # (row 70)
        ("4", 1200, 1536),  # (row 71)
        ("4", 2048, 2048),
        ("4", 2049, 2560),
        ("8", 4097, 4608),  # (row 72)
        ("1", 1200, 1536),  # (row 73)
        ("[64:8,256:4]", 150 * MIB + 1, 150 * MIB + 512),  # (row 74)
        ("[64:8,256:2]", 400 * MIB, 512 * MIB),  # (row 75)
        ("[64:8,256:2]", 3 * MIB + 1, 3 * MIB + 256 * KIB),  # (row 76)
    ],
)
def test_rounding_by_divisions(make: Make, setting: str, nbytes: int, size: int) -> None:
    peer = make(settings=f"roundup_power2_divisions:{setting}")
    peer.record_history(True)
    peer.set_memory_fraction(0.0)
    assert is_failure(peer.malloc(nbytes), "oom")
    # The entry of a failure has the rounded size; a block may be larger than that.
    assert [entry["size"] for entry in peer.trace()] == [size]


def test_resets(peer: TorchPeer) -> None:  # (rows 77, 78)
    cache(peer, 30 * MIB)
    take(peer, 8 * MIB)
    peer.reset_peak_stats()
    stats = peer.stats()
    assert stats["allocated_bytes.all.current"] == 8 * MIB
    for name in STATS:
        if name.endswith(".peak"):
            assert stats[name] == stats[name.replace(".peak", ".current")], name
    peer.reset_accumulated_stats()
    for name, value in peer.stats().items():
        if name.endswith((".allocated", ".freed")) or name.startswith("num_"):
            assert value == 0, name
        else:
            assert value == stats[name], name


def test_the_trace_is_a_ring(peer: TorchPeer) -> None:  # (rows 80, 82)
    peer.record_history(True, 4)
    for nbytes in range(1, 7):
        take(peer, nbytes)
    assert [entry["size"] for entry in peer.trace()] == [3, 4, 5, 6]
    assert [entry["action"] for entry in peer.trace()] == ["alloc"] * 3 + ["snapshot"]


def test_actions_left_out_of_the_trace(peer: TorchPeer) -> None:  # (row 81)
    peer.record_history(True, 100, ["free_requested", "snapshot"])
    peer.snapshot()
    cache(peer, 30 * MIB)
    actions = [entry["action"] for entry in peer.trace()]
    assert actions == ["segment_alloc", "alloc", "free_completed"]
    assert is_failure(peer.record_history(True, 100, ["no such"]), "internal")


@pytest.mark.parametrize("settings", ["", "expandable_segments:True", "max_split_size_mb:40"])
@pytest.mark.parametrize("seed", range(5))
def test_the_sums_hold_after_every_operation(make: Make, settings: str, seed: int) -> None:
    rng = random.Random(seed)  # (row 79)
    peer = make(settings=settings, capacity=600 * MIB)
    operations: list[tuple] = []
    live: list[int] = []
    for step in range(300):
        action = rng.random()
        if action < 0.4 and live:
            slot = live.pop(rng.randrange(len(live)))
            if rng.random() < 0.3:
                operations.append(("record_stream_slot", slot, SIDE))
            operations.append(("free_slot", slot))
        elif action < 0.5:
            operations.append((rng.choice(["hold", "finish"]), SIDE))
        elif action < 0.52:
            operations.append(("empty_cache",))
        else:
            nbytes = rng.choice([rng.randrange(1, MIB), rng.randrange(MIB, 60 * MIB)])
            operations.append(("malloc", nbytes, rng.choice([0, OTHER]), step))
            live.append(step)
        operations += [("stats",), ("snapshot",)]
    answers = peer.run(operations)
    kinds = {answer.kind for answer in answers if isinstance(answer, Failure)}
    assert kinds <= {"oom"}
    checked = 0
    for operation, stats, segments in zip(operations, answers, answers[1:], strict=False):
        if operation == ("stats",):
            check_sums(stats, segments)
            checked += 1
    assert checked == 300


# Recorded runs, and the peer itself -----------------------------------------------------------


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_run_on_a_gpu_is_repeated_to_the_byte(make: Make, path: Path) -> None:
    with np.load(path) as trace:
        run = {name: trace[name] for name in trace.files if name != "meta"}
    peer = make(capacity=1 << 44, addresses=run["segment_address"].tolist())
    addresses, seconds = peer.replay(run["op"], run["id"], run["size"], run["stream"])
    allocates = run["op"] == 0
    assert (addresses == run["address"])[allocates].all()
    segments = zip(run["segment_size"].tolist(), run["segment_address"].tolist(), strict=True)
    assert peer.calls == [("malloc", nbytes, address) for nbytes, address in segments]
    assert seconds > 0


def test_a_replay_is_what_single_calls_are(make: Make) -> None:
    op, ident = [0, 0, 1, 0, 1, 1], [0, 1, 0, 2, 1, 2]
    size, stream = [700, 5 * MIB, 0, 700, 0, 0], [0, 2, 0, 0, 2, 0]
    addresses, _ = make().replay(op, ident, size, stream)
    peer = make()
    slots = [
        ("free_slot", number) if kind else ("malloc", nbytes, handle, number)
        for kind, number, nbytes, handle in zip(op, ident, size, stream, strict=True)
    ]
    assert [answer or 0 for answer in peer.run(slots)] == addresses.tolist()


def test_a_replay_goes_on_where_memory_lacks(make: Make) -> None:
    peer = make(capacity=30 * MIB)
    addresses, _ = peer.replay([0, 0, 1, 1, 0], [0, 1, 1, 0, 2], [MIB * 20, MIB * 20, 0, 0, 512])
    assert addresses.tolist() == [BASE, 0, 0, 0, BASE + 20 * MIB]


def test_a_list_of_addresses(make: Make) -> None:
    peer = make(addresses=[BASE + 6 * MIB, 0, 0])
    assert take(peer, 512) == BASE + 6 * MIB
    assert is_failure(peer.malloc(30 * MIB), "oom")
    assert is_failure(peer.malloc(30 * MIB), "driver")  # nothing was recorded there


def test_a_chosen_growth_is_refused(peer: TorchPeer) -> None:
    peer.fail_at(2)
    assert take(peer, 512) == BASE
    take(peer, 30 * MIB)  # at the second try
    assert peer.calls[1:3] == [("malloc", 30 * MIB, None), ("malloc", 30 * MIB, BASE + 2 * MIB)]


def test_a_failure_does_not_stop_a_list(peer: TorchPeer) -> None:
    answers = peer.run([("malloc", 1 << 50, 0, 7), ("free_slot", 7), ("free", 5), ("malloc", 1)])
    assert is_failure(answers[0], "oom")
    assert answers[1] is None
    assert is_failure(answers[2], "internal")
    assert answers[3] == BASE
    assert is_failure(peer.run([("free_slot", 99)])[0], "other")


def test_an_odd_stream_is_not_recorded_on(peer: TorchPeer) -> None:
    with pytest.raises(ValueError, match="must be even"):
        peer.record_stream(take(peer, 512), 3)
    assert peer.calls == [("malloc", 2 * MIB, BASE)]


@pytest.mark.parametrize("keeps", [False, True])
def test_a_use_is_forgotten_where_a_record_has_a_used_address(make: Make, keeps: bool) -> None:
    """(2.15) What is known of the uses in captures outlives a record of a block, by its address. A
    later record there loses a use from before the capture in which it is freed, and its memory
    is handed out while the stream still works on it."""
    peer = make(torch="2.15")
    peer.keep_records(keeps)

    def capture(step: Callable[[], object]) -> None:
        peer.mark_capture(True)
        peer.capture(OTHER, True)
        step()
        peer.capture(OTHER, False)
        peer.mark_capture(False)

    first = take(peer, 12 * MIB, OTHER)
    capture(lambda: peer.record_stream(first, SIDE))
    peer.free(first)
    take(peer, 512)
    peer.empty_cache()
    second = take(peer, 12 * MIB, OTHER)
    peer.record_stream(second, SIDE)
    peer.hold(SIDE)
    capture(lambda: peer.free(second))
    assert (take(peer, 12 * MIB, OTHER) == second) is not keeps


def test_an_ended_process_says_so(make: Make) -> None:
    peer = make()
    assert peer._process is not None
    peer._process.kill()
    with pytest.raises(PeerDied, match="-9"):
        peer.malloc(1)
    peer.close()
    with pytest.raises(PeerDied, match="closed"):
        peer.stats()


@pytest.mark.parametrize("seed", range(6))
def test_a_replay_empties_the_cache_where_the_trace_says_so(seed: int) -> None:
    """On a device that is sometimes too small, with and without expandable segments."""
    dice = random.Random(seed)
    events: list[tuple[int, int, int]] = []
    live: list[int] = []
    for number in range(600):
        roll = dice.random()
        if roll < 0.08:
            events.append((2, 0, 0))
        elif roll < 0.5 and live:
            events.append((1, live.pop(dice.randrange(len(live))), 0))
        else:
            live.append(number)
            size = dice.choice([dice.randrange(1, 4000), dice.randrange(MIB, 50 * MIB)])
            events.append((0, number, size))
    trace = bfc.Trace(*zip(*events, strict=True))
    for settings in ("", "expandable_segments:True", "garbage_collection_threshold:0.5"):
        with TorchPeer(capacity=900 * MIB, settings=settings, torch="2.11") as peer:
            addresses, _ = peer.replay(trace.op, trace.id, trace.size)
            peak = peer.stats()["reserved_bytes.all.peak"]
        source = bfc.SimulatedSubAllocator(900 * MIB)
        with bfc.CachingAllocator(source, settings=settings, strict=True) as ours:
            replayed = trace.replay(ours)
        assert replayed.peak_bytes_reserved == peak
        assert (replayed.addresses == 0).tolist() == (addresses == 0).tolist()
        plain = replayed.addresses[addresses != 0] - addresses[addresses != 0]
        assert settings.startswith("expandable") or not plain.any()
