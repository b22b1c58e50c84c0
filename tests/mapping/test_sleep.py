"""Sleep and wake: memory goes, addresses stay, and contents come back."""

from __future__ import annotations

import asyncio
import gc
import mmap
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sleepers import MIB, Block, fail_at, failing_host, recover

import bfc

ON = "expandable_segments:True"
Make = Callable[..., bfc.Allocator]


def expandable(source: bfc.SubAllocator, **options: Any) -> bfc.CachingAllocator:
    return bfc.CachingAllocator(source, settings=ON, **options)


def strict(source: bfc.SubAllocator, **options: Any) -> bfc.CachingAllocator:
    return expandable(source, strict=True, **options)


def stitched(source: bfc.SubAllocator, **options: Any) -> bfc.BFCAllocator:
    return bfc.BFCAllocator(source, virtual_memory=True, page_size="2 MiB", **options)


def stitched_caching(source: bfc.SubAllocator, **options: Any) -> bfc.CachingAllocator:
    return bfc.CachingAllocator(source, stitch=True, **options)


#: A strict one differs from the first only where memory is refused: that is for the long tests.
MAKERS = [expandable, stitched, pytest.param(strict, marks=pytest.mark.long), stitched_caching]


@pytest.fixture(params=MAKERS)
def made(request: pytest.FixtureRequest) -> Make:
    """Makes an allocator whose memory can sleep."""
    maker: Make = request.param
    return maker


@pytest.fixture
def host() -> bfc.HostSubAllocator:
    return bfc.HostSubAllocator("1 GiB")


@pytest.fixture
def pool(made: Make, host: bfc.HostSubAllocator) -> bfc.Allocator:
    return made(host)


def page_of(pool: bfc.Allocator) -> int:
    """The bytes of a page of large allocations."""
    return 2 * MIB if isinstance(pool, bfc.BFCAllocator) or pool.stitch else 20 * MIB


# -- what sleep and wake do ------------------------------------------------------------------------


@pytest.mark.sampled(2)
def test_memory_goes_and_comes_back_at_the_same_address(
    pool: bfc.Allocator, host: bfc.HostSubAllocator
) -> None:
    with pool.tag("weights"):
        weights = [Block(pool, size, size) for size in (1000, 3 * MIB, 70 * MIB)]
    plain = Block(pool, 5 * MIB, 7)
    before = pool.stats()
    report = pool.sleep(keep={"weights": "host"})
    assert report.tags == ("weights",)
    assert report.kept_bytes == 1000 + 73 * MIB
    assert pool.asleep == {"weights"}
    asleep = pool.stats()
    assert asleep.bytes_reserved == host.live_bytes < 21 * MIB
    assert asleep.bytes_in_use == before.bytes_in_use
    assert report.released_bytes == before.bytes_reserved - asleep.bytes_reserved
    assert 74 * MIB <= asleep.bytes_asleep <= 82 * MIB
    if isinstance(pool, bfc.CachingAllocator):
        assert pool.memory_stats()["reserved_bytes.all.current"] == asleep.bytes_reserved
    else:
        assert pool.page_stats()["pages"] * 2 * MIB == asleep.bytes_reserved
    pool.check()
    plain.check()
    pool.wake("weights")
    for block in (*weights, plain):
        block.check()
    after = pool.stats()
    assert (after.bytes_asleep, pool.asleep) == (0, frozenset())
    assert after.bytes_reserved == host.live_bytes == asleep.bytes_reserved + asleep.bytes_asleep
    pool.check()
    pool.close()
    assert host.live_bytes == 0


@pytest.mark.sampled(2)
def test_tags_sleep_and_wake_each_for_itself(pool: bfc.Allocator) -> None:
    with pool.tag("weights"):
        weights = Block(pool, 30 * MIB, 1)
        with pool.tag("kv"):
            cache = Block(pool, 50 * MIB, 2)
        more = Block(pool, 4 * MIB, 3)
    pool.sleep(keep={"weights": "host"}, drop=["kv"])
    assert pool.asleep == {"weights", "kv"}
    pool.wake("weights")
    assert pool.asleep == {"kv"}
    weights.check()
    more.check()
    with pytest.raises(bfc.AsleepError, match="wake\\('kv'\\)"):
        bytes(cache.buffer)
    pool.wake(fill=9)
    assert cache.buffer.ptr == cache.ptr
    assert bytes(cache.buffer) == bytes([9]) * (50 * MIB)
    pool.check()


def test_without_arguments_all_tags_are_dropped_and_what_has_no_tag_stays(
    pool: bfc.Allocator,
) -> None:
    plain = Block(pool, 3 * MIB, 1)
    with pool.tag("a"):
        Block(pool, 3 * MIB, 2)
    with pool.tag("b"):
        kept = Block(pool, 3 * MIB, 3)
    report = pool.sleep()
    assert (report.tags, report.kept_bytes) == (("a", "b"), 0)
    plain.check()
    pool.wake()
    kept.write()
    kept.check()


def test_one_way_for_all_tags_but_those_that_are_dropped(pool: bfc.Allocator) -> None:
    blocks = {}
    for name in "abc":
        with pool.tag(name):
            blocks[name] = Block(pool, 3 * MIB, ord(name))
    assert pool.sleep(keep="host", drop="b").kept_bytes == 6 * MIB
    pool.wake()
    blocks["a"].check()
    blocks["c"].check()


def test_what_is_not_named_stays_awake(pool: bfc.Allocator) -> None:
    blocks = {}
    for name in "ab":
        with pool.tag(name):
            blocks[name] = Block(pool, 3 * MIB, ord(name))
    pool.sleep(drop=["a"])
    assert pool.asleep == {"a"}
    blocks["b"].check()
    pool.sleep(keep={})
    assert pool.asleep == {"a"}


def test_twice_is_harmless(pool: bfc.Allocator) -> None:
    with pool.tag("weights"):
        block = Block(pool, 30 * MIB, 1)
    pool.wake()
    pool.wake("weights")
    assert pool.sleep(keep="host").kept_bytes == 30 * MIB
    asleep = pool.stats()
    assert pool.sleep() == bfc.SleepReport(seconds=pytest.approx(0, abs=1))
    assert pool.sleep(drop=["weights"]).released_bytes == 0
    assert pool.stats() == asleep
    pool.wake()
    pool.wake()
    block.check()


def test_a_tag_without_memory_sleeps(pool: bfc.Allocator) -> None:
    with pool.tag("empty"):
        pass
    pool.sleep()
    assert pool.asleep == {"empty"}
    with pool.tag("empty"), pytest.raises(bfc.AsleepError):
        pool.allocate_raw(512)
    pool.wake()
    with pool.tag("empty"):
        assert pool.allocate_raw(512)


@pytest.mark.sampled(2)
def test_contents_go_through_pieces(pool: bfc.Allocator) -> None:
    """Allocations that lie in several, and several in one."""
    with pool.tag("weights"):
        blocks = [Block(pool, size, i) for i, size in enumerate([70 * MIB, 777, 512, 31 * MIB])]
        blocks += [Block(pool, 1000 + i, i) for i in range(300)]
    pool.sleep(keep="host")
    pool.wake()
    for block in blocks:
        block.check()


def test_only_live_allocations_are_copied(pool: bfc.Allocator) -> None:
    with pool.tag("weights"):
        blocks = [Block(pool, 10 * MIB, i) for i in range(5)]
    for block in (blocks.pop(3), blocks.pop(1)):
        block.buffer.free()
    assert pool.sleep(keep="host").kept_bytes == 30 * MIB
    pool.wake()
    for block in blocks:
        block.check()


@pytest.mark.sampled(2)
def test_contents_go_where_a_callable_says(pool: bfc.Allocator, tmp_path: Path) -> None:
    """To files."""
    asked = []

    def give(nbytes: int) -> mmap.mmap:
        asked.append(nbytes)
        with (tmp_path / str(len(asked))).open("w+b") as file:
            file.truncate(nbytes)
            return mmap.mmap(file.fileno(), nbytes)

    with pool.tag("weights"):
        block = Block(pool, 50 * MIB, 1)
    pool.sleep(keep={"weights": give})
    assert sum(asked) == 50 * MIB
    assert max(asked) == 32 * MIB
    first = (tmp_path / "1").read_bytes()
    assert first[: len(block.mark)] == block.mark
    pool.wake()
    block.check()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("given", [b"x" * 64 * MIB, bytearray(10), 7], ids=["ro", "short", "int"])
def test_a_callable_that_gives_no_room_fails_and_nothing_has_changed(
    pool: bfc.Allocator, given: object
) -> None:
    with pool.tag("weights"):
        block = Block(pool, 50 * MIB, 1)
    with pytest.raises((ValueError, TypeError)):
        pool.sleep(keep=lambda nbytes: given)
    assert pool.asleep == frozenset()
    block.check()
    bytes(block.buffer)
    pool.check()


def test_pinned_memory_of_the_host_is_ordinary_memory(pool: bfc.Allocator) -> None:
    with pool.tag("weights"):
        block = Block(pool, 5 * MIB, 1)
    pool.sleep(keep={"weights": "pinned"})
    pool.wake()
    block.check()


def mapped_bytes() -> int:
    """What this process has mapped of memory of its own."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))


def test_the_memory_of_the_host_is_given_back_after_waking(pool: bfc.Allocator) -> None:
    with pool.tag("weights"):
        block = Block(pool, 60 * MIB, 1)
    before = mapped_bytes()
    pool.sleep(keep="host")
    assert mapped_bytes() - before > 50 * MIB
    pool.wake()
    assert mapped_bytes() - before < 10 * MIB
    block.check()


def test_tags_have_ranges_of_their_own(pool: bfc.Allocator) -> None:
    with pool.tag("a"):
        first = pool.allocate(3 * MIB)
    second = pool.allocate(3 * MIB)
    with pool.tag("b"):
        third = pool.allocate(3 * MIB)
    regions = [region for region in pool.snapshot().regions if region.size]
    assert len({region.reserved for region in regions}) == 3
    assert len({first.ptr, second.ptr, third.ptr}) == 3


def test_what_a_tag_caches_goes_back_with_the_rest(pool: bfc.Allocator) -> None:
    with pool.tag("a"):
        pool.allocate(30 * MIB).free()
    cached = pool.stats().bytes_reserved
    assert cached >= 30 * MIB
    assert pool.empty_cache() == cached


# -- while it sleeps -------------------------------------------------------------------------------


def test_allocating_reading_and_exporting_raise(pool: bfc.Allocator) -> None:
    with pool.tag("weights"):
        buffer = pool.allocate(4 * MIB)
    view = buffer.view("u1")
    pool.sleep()
    with pool.tag("weights"):
        for allocate in (pool.allocate, pool.allocate_raw):
            for stream in (0, 3):
                with pytest.raises(bfc.AsleepError, match="tag 'weights' sleeps"):
                    allocate(512, stream)
        with pytest.raises(bfc.AsleepError):
            pool.allocate_many([512, 1024])
    for it in (buffer, view):
        for use in (
            memoryview,
            bytes,
            np.asarray,
            np.from_dlpack,
            lambda it: it.to_host(),
            lambda it: it.from_host(np.zeros(4 * MIB, "u1")),
            lambda it: it.__dlpack__(copy=True),
            lambda it: bfc.copy(it, np.zeros(4 * MIB, "u1")),
            lambda it: bfc.copy(np.zeros(4 * MIB, "u1"), it),
        ):
            with pytest.raises(bfc.AsleepError, match="same address"):
                use(it)
    assert buffer.ptr
    assert pool.allocated_size(buffer.ptr) == 4 * MIB
    pool.wake()
    assert len(bytes(buffer)) == 4 * MIB


@pytest.mark.sampled(2)
def test_frees_are_bookkeeping(made: Make) -> None:
    source = failing_host()
    pool = made(source)
    with pool.tag("weights"):
        blocks = [Block(pool, 15 * MIB, i) for i in range(8)]
        raw = pool.allocate_raw(25 * MIB)
    pool.sleep(keep="host")
    pages = source.live_bytes
    assert pages == 0
    asleep = pool.stats().bytes_asleep
    for kind in ("unmap", "release", "create", "map", "set_access", "copy", "wait"):
        fail_at(source, kind, 1)  # none of them is called
    for block in blocks[2:6]:
        block.buffer.free()
    pool.deallocate_raw(raw)
    pool.check()
    left = pool.stats().bytes_asleep
    assert asleep - 90 * MIB <= left <= asleep - 80 * MIB
    assert pool.stats().bytes_in_use == 60 * MIB
    recover(source)
    pool.wake()
    assert source.live_bytes == pool.stats().bytes_reserved == left
    for block in (*blocks[:2], *blocks[6:]):
        block.check()
    pool.check()
    with pool.tag("weights"):
        Block(pool, 60 * MIB, 9).check()
    pool.close()
    assert source.live_bytes == 0


def test_everything_may_be_freed_while_it_sleeps(made: Make, host: bfc.HostSubAllocator) -> None:
    pool = made(host)
    with pool.tag("weights"):
        blocks = [Block(pool, 15 * MIB, i) for i in range(3)]
    pool.sleep(keep="host")
    blocks.clear()
    gc.collect()
    assert pool.stats().bytes_asleep == 0
    assert pool.empty_cache() == 0
    pool.check()
    pool.wake()
    assert host.live_bytes == 0
    with pool.tag("weights"):
        Block(pool, 15 * MIB, 1).check()


def test_statistics_and_snapshots_work(pool: bfc.Allocator) -> None:
    with pool.tag("weights"):
        block = Block(pool, 30 * MIB, 1)
        Block(pool, 3 * MIB, 2)
    Block(pool, 3 * MIB, 2).buffer.free()
    pool.sleep()
    shot = pool.snapshot()
    assert 30 * MIB <= shot.stats.bytes_asleep <= 40 * MIB
    assert [region.asleep for region in shot.regions].count(True) == 1
    assert block.ptr in {chunk.ptr for chunk in shot.live_chunks()}
    torch = shot.to_torch()
    assert sum(segment["total_size"] for segment in torch["segments"]) == shot.stats.bytes_reserved
    assert "asleep" in str(shot).splitlines()[0]
    assert shot.tags == (bfc.TagInfo("weights", **pool.tag_stats()["weights"]),)
    assert shot.tags[0].asleep
    assert "\ntags: 'weights' (30.00 MiB in use, asleep)\n" in str(shot)
    assert 0 <= shot.stats.fragmentation <= 1
    assert shot.as_dict()


def test_other_tags_work_on(pool: bfc.Allocator) -> None:
    with pool.tag("asleep"):
        sleeping = Block(pool, 30 * MIB, 1)
    with pool.tag("awake"):
        awake = Block(pool, 30 * MIB, 2)
    pool.sleep(keep={"asleep": "host"})
    rng = random.Random(1)
    live = []
    for i in range(200):
        if live and rng.random() < 0.5:
            block = live.pop(rng.randrange(len(live)))
            block.check()
            block.buffer.free()
        elif rng.random() < 0.1:
            pool.empty_cache()
        elif rng.random() < 0.5:
            with pool.tag("awake"):
                live.append(Block(pool, rng.randrange(1, 5 * MIB), i))
        else:
            live.append(Block(pool, rng.randrange(1, 5 * MIB), i))
        if i % 20 == 0:
            pool.check()
    pool.wake()
    for block in (sleeping, awake, *live):
        block.check()


def test_close_while_it_sleeps(made: Make, host: bfc.HostSubAllocator) -> None:
    before = mapped_bytes()
    pool = made(host)
    with pool.tag("weights"):
        block = Block(pool, 50 * MIB, 1)
    pool.sleep(keep="host")
    pool.close()
    assert host.live_bytes == 0
    assert mapped_bytes() - before < 20 * MIB
    with pytest.raises(bfc.ClosedError):
        bytes(block.buffer)
    with pytest.raises(bfc.ClosedError):
        pool.wake()
    with pytest.raises(bfc.ClosedError):
        pool.sleep()


def test_it_goes_while_it_sleeps(made: Make, host: bfc.HostSubAllocator) -> None:
    pool = made(host)
    with pool.tag("weights"):
        block = Block(pool, 50 * MIB, 1)
    pool.sleep(keep="host")
    del pool, block
    gc.collect()
    assert host.live_bytes == 0


# -- what is refused -------------------------------------------------------------------------------


def test_an_exported_view(pool: bfc.Allocator) -> None:
    with pool.tag("weights"):
        block = Block(pool, 4 * MIB, 1)
    with pool.tag("kv"):
        other = Block(pool, 4 * MIB, 2)
    before = pool.stats()
    with memoryview(block.buffer):
        with pytest.raises(BufferError, match="'weights'"):
            pool.sleep(keep="host")
        assert (pool.asleep, pool.stats()) == (frozenset(), before)
        pool.sleep(drop=["kv"])
    bytes(block.buffer)
    pool.wake()
    bytes(other.buffer)
    pool.sleep(keep="host")
    pool.wake()
    block.check()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"drop": ["nothing"]}, ValueError, "unknown tag 'nothing'; this allocator has: 'weights'"),
        ({"keep": {"nothing": "host"}}, ValueError, "unknown tag"),
        ({"keep": {"weights": "host"}, "drop": ["weights"]}, ValueError, "name it once"),
        ({"keep": {"weights": "disk"}}, ValueError, "'disk'"),
        ({"keep": "disk"}, ValueError, "'disk'"),
        ({"keep": 7}, ValueError, "7"),
        ({"drop": [7]}, TypeError, "names of tags"),
    ],
)
def test_bad_arguments(
    pool: bfc.Allocator, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pool.tag("weights"):
        block = Block(pool, 4 * MIB, 1)
    with pytest.raises(error, match=words):
        pool.sleep(**arguments)
    assert pool.asleep == frozenset()
    block.check()
    bytes(block.buffer)


def test_bad_tags_and_fills(pool: bfc.Allocator) -> None:
    with pytest.raises(TypeError):
        pool.tag(7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="name"):
        pool.tag("")
    with pytest.raises(ValueError, match="unknown tag"):
        pool.wake("nothing")
    for fill in (-1, 256, 0.5, b"x"):
        with pytest.raises(ValueError, match="fill is a byte"):
            pool.wake(fill=fill)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"allocator\.tag"):
        type(pool.tag("x"))()
    scope = pool.tag("x")
    with pytest.raises(RuntimeError, match="not entered here"):
        scope.__exit__(None, None, None)


@pytest.mark.parametrize("policy", [bfc.BFCAllocator, bfc.CachingAllocator])
def test_memory_that_is_not_mapped_cannot_sleep(policy: type[bfc.Allocator]) -> None:
    pool = policy(bfc.HostSubAllocator("1 GiB"))
    with pool.tag("weights"):
        buffer = pool.allocate(4)
    buffer.from_host(b"abcd")
    with pytest.raises(bfc.SettingsError, match="mapped"):
        pool.sleep()
    pool.wake()
    assert (bytes(buffer), pool.asleep) == (b"abcd", frozenset())


def test_a_tag_that_is_mapped_in_part_cannot_sleep(host: bfc.HostSubAllocator) -> None:
    pool = expandable(host)
    with pool.tag("weights"):
        Block(pool, 4 * MIB, 1)
        pool.set_settings("expandable_segments:False")
        block = Block(pool, 40 * MIB, 2)
    with pytest.raises(bfc.SettingsError, match=r"40.00 MiB of tag 'weights' lie in ordinary"):
        pool.sleep(keep="host")
    bytes(block.buffer)
    block.buffer.free()
    pool.sleep(keep="host")
    pool.wake()


def test_a_simulated_device_keeps_nothing(made: Make) -> None:
    device = bfc.SimulatedSubAllocator("1 GiB")
    pool = made(device)
    with pool.tag("weights"):
        address = pool.allocate_raw(30 * MIB)
    calls = len(device.calls)
    with pytest.raises(bfc.SettingsError, match="no contents"):
        pool.sleep(keep={"weights": "host"})
    assert (pool.asleep, len(device.calls)) == (frozenset(), calls)
    pool.sleep()
    assert device.live_bytes == 0
    with pytest.raises(bfc.SettingsError, match="no contents"):
        pool.wake(fill=0)
    pool.wake()
    pages = -(-30 * MIB // page_of(pool))
    assert device.live_bytes == pages * page_of(pool)
    assert [call[0] for call in device.calls[calls:]] == [
        *["wait", "unmap", *["release"] * pages],
        *[*["create"] * pages, *["map"] * pages, "access"],
    ]
    pool.deallocate_raw(address)
    pool.close()


def test_waking_without_room_is_refused_and_can_be_repeated(made: Make) -> None:
    host = bfc.HostSubAllocator("100 MiB")
    pool = made(host)
    with pool.tag("weights"):
        block = Block(pool, 60 * MIB, 1)
    pool.sleep(keep="host")
    big = pool.allocate(80 * MIB)
    before = pool.stats()
    with pytest.raises(bfc.OutOfMemoryError) as caught:
        pool.wake()
    assert caught.value.requested == 60 * MIB
    assert (pool.asleep, pool.stats()) == ({"weights"}, before)
    assert host.live_bytes == before.bytes_reserved
    pool.check()
    big.free()
    pool.wake()  # what is cached goes back first
    block.check()


def test_waking_keeps_to_the_limit(made: Make) -> None:
    host = bfc.HostSubAllocator("1 GiB")
    pool = made(host, memory_limit="100 MiB")
    with pool.tag("weights"):
        block = Block(pool, 60 * MIB, 1)
    pool.sleep(keep="host")
    other = Block(pool, 60 * MIB, 2)
    with pytest.raises(bfc.OutOfMemoryError, match="limit"):
        pool.wake()
    other.buffer.free()
    pool.wake()
    block.check()
    assert pool.stats().bytes_reserved == 60 * MIB


@pytest.mark.sampled(2)
def test_all_tags_of_one_call_wake_or_none(made: Make) -> None:
    pool = made(bfc.HostSubAllocator("1 GiB"), memory_limit="100 MiB")
    blocks = []
    for name in "abc":
        with pool.tag(name):
            blocks.append(Block(pool, 35 * MIB, ord(name)))
        pool.sleep(keep={name: "host"})
    with pytest.raises(bfc.OutOfMemoryError):
        pool.wake()
    assert pool.asleep == {"a", "b", "c"}
    pool.wake("a", "b")
    with pytest.raises(bfc.OutOfMemoryError):
        pool.wake("b", "c")
    assert pool.asleep == {"c"}
    blocks[0].check()
    blocks[1].check()


# -- scopes ----------------------------------------------------------------------------------------


def test_a_tag_takes_no_memory_of_a_private_pool_that_has_some(
    host: bfc.HostSubAllocator,
) -> None:
    pool = expandable(host)
    private = bfc.MemPool(pool)
    with bfc.use_mem_pool(private):
        inside = pool.allocate(512)
    refused = pytest.raises(RuntimeError, match="has memory of no tag")
    with pool.tag("a"), bfc.use_mem_pool(private), refused:
        pool.allocate(512)
    with pool.tag("a"):
        tagged = pool.allocate(512)
    assert pool.snapshot().of_pool(private.id).live_chunks()[0].ptr == inside.ptr != tagged.ptr


def test_a_tag_holds_in_its_thread_alone(pool: bfc.Allocator) -> None:
    found = []

    def allocate() -> None:
        found.append(Block(pool, 3 * MIB, 1))

    with pool.tag("a"):
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
    pool.sleep()
    found[0].check()
    bytes(found[0].buffer)


def test_a_tag_holds_in_its_task_alone(pool: bfc.Allocator) -> None:
    async def one(name: str | None) -> Block:
        if name is None:
            await asyncio.sleep(0)
            return Block(pool, 3 * MIB, 1)
        with pool.tag(name):
            await asyncio.sleep(0)
            return Block(pool, 3 * MIB, 2)

    async def all_of_them() -> list[Block]:
        return await asyncio.gather(one("a"), one(None), one("b"))

    blocks = asyncio.run(all_of_them())
    pool.sleep(drop=["a"])
    for block, sleeps in zip(blocks, (True, False, False), strict=True):
        if sleeps:
            with pytest.raises(bfc.AsleepError):
                bytes(block.buffer)
        else:
            block.check()
            bytes(block.buffer)


def test_a_tag_of_one_allocator_is_none_of_another(made: Make, pool: bfc.Allocator) -> None:
    other = made(bfc.HostSubAllocator("1 GiB"))
    with pool.tag("a"), other.tag("a"):
        blocks = Block(pool, 3 * MIB, 1), Block(other, 3 * MIB, 2)
    pool.sleep()
    blocks[1].check()
    bytes(blocks[1].buffer)
    assert other.asleep == frozenset()


def test_a_scope_can_be_entered_again(pool: bfc.Allocator) -> None:
    scope = pool.tag("a")
    with scope, scope:
        first = pool.allocate(3 * MIB)
    outside = pool.allocate(3 * MIB)
    with scope:
        second = pool.allocate(3 * MIB)
    pool.sleep()
    bytes(outside)
    for buffer in (first, second):
        with pytest.raises(bfc.AsleepError):
            bytes(buffer)


# -- histories -------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(10))
def test_random_cycles(made: Make, seed: int) -> None:
    """500 for each placement: contents and addresses are the same after each."""
    rng = random.Random(seed)
    host = bfc.HostSubAllocator("1 GiB")
    pool = made(host)
    live: dict[str, list[Block]] = {"a": [], "b": [], "": []}
    kept: dict[str, bool] = {}
    pool.tag("a"), pool.tag("b")
    for cycle in range(50):
        for _ in range(rng.randrange(6)):
            name = rng.choice([it for it in live if it not in pool.asleep])
            size = rng.choice([rng.randrange(1, 4000), rng.randrange(1, 5 * MIB)])
            if name:
                with pool.tag(name):
                    live[name].append(Block(pool, size, cycle, rng.choice([0, 1])))
            else:
                live[name].append(Block(pool, size, cycle))
        for name in sorted({"a", "b"} - pool.asleep):
            if rng.random() < 0.7:
                kept[name] = rng.random() < 0.7
                pool.sleep(**({"keep": {name: "host"}} if kept[name] else {"drop": [name]}))
        for blocks in live.values():
            while len(blocks) > 8 or (blocks and rng.random() < 0.3):
                blocks.pop(rng.randrange(len(blocks))).buffer.free()
        if rng.random() < 0.2:
            pool.empty_cache()
        assert host.live_bytes == pool.stats().bytes_reserved
        if cycle % 10 == 0:
            pool.check()
        waking = sorted(pool.asleep)[: 1 + (rng.random() < 0.6)]
        before = pool.stats()
        pool.wake(*waking)
        after = pool.stats()
        came = after.bytes_reserved - before.bytes_reserved
        assert host.live_bytes == after.bytes_reserved
        assert came == before.bytes_asleep - after.bytes_asleep
        for name in waking:
            for block in live[name]:
                if not kept[name]:
                    block.write()
        for name, blocks in live.items():
            for block in blocks if name not in pool.asleep else ():
                block.check()
    pool.check()
    pool.close()
    assert host.live_bytes == 0


# -- pages with several addresses ------------------------------------------------------------------


def with_views() -> tuple[bfc.BFCAllocator, list[Block], list[Block]]:
    """Of one tag, blocks that lie in views and blocks that do not."""
    pool = stitched(bfc.HostSubAllocator("1 GiB"))
    with pool.tag("a"):
        small = [Block(pool, 4 * MIB, i) for i in range(20)]
        for block in small[::2]:
            block.buffer.free()
        views = [Block(pool, size * MIB, size) for size in (12, 9, 8)]
        for _ in range(2):
            Block(pool, 7 * MIB, 1).buffer.free()
    assert pool.page_stats()["stitches"] >= 3
    return pool, small[1::2], views


def test_stitched_pages_come_back_at_all_their_addresses() -> None:
    pool, small, views = with_views()
    before = pool.page_stats()
    pool.sleep(keep="host")
    assert pool.page_stats()["pages"] == 0
    assert pool.sub_allocator.live_bytes == 0
    pool.check()
    pool.wake()
    pool.check()
    for block in (*small, *views):
        block.check()
    assert pool.page_stats()["pages"] <= before["pages"]
    for block in (*small, *views):
        block.write()  # each page is used through one of its addresses
    for block in (*small, *views):
        block.check()
    with pool.tag("a"):
        more = [Block(pool, size * MIB, size) for size in (3, 7, 13)]
    for block in (*small, *views, *more):
        block.check()
    pool.check()
    pool.close()
    assert pool.sub_allocator.live_bytes == 0


def test_views_are_freed_while_they_sleep() -> None:
    pool, small, views = with_views()
    pool.sleep(keep="host")
    asleep = pool.stats().bytes_asleep
    views.pop(0).buffer.free()
    assert pool.stats().bytes_asleep == asleep - 12 * MIB
    pool.check()
    pool.empty_cache()
    pool.trim(0)
    with pool.tag("b"):
        others = [Block(pool, 5 * MIB, 1)]
    pool.check()
    pool.wake()
    for block in (*small, *views, *others):
        block.check()
    pool.check()
    pool.trim(0, wait=True)
    assert pool.sub_allocator.live_bytes == pool.stats().bytes_reserved
    pool.close()
    assert pool.sub_allocator.live_bytes == 0


def test_free_pages_of_another_tag_go_back_where_the_limit_is_reached() -> None:
    """They are not lent: what sleeps shares no page with what is awake."""
    pool = stitched(bfc.HostSubAllocator("1 GiB"), memory_limit="64 MiB")
    with pool.tag("a"):
        kept = Block(pool, 10 * MIB, 1)
        Block(pool, 50 * MIB, 2).buffer.free()
    other = Block(pool, 40 * MIB, 3)
    with pool.tag("b"):
        small = Block(pool, 1000, 4)
    pool.sleep(keep={"a": "host"})
    more = Block(pool, 20 * MIB, 5)
    with pytest.raises(bfc.OutOfMemoryError):
        pool.wake()
    more.buffer.free()
    pool.wake()
    for block in (kept, other, small):
        block.check()
    pool.check()


@pytest.mark.parametrize(
    "make",
    [
        lambda: bfc.CachingAllocator(bfc.HostSubAllocator("1 GiB"), stitch=True),
        lambda: bfc.BFCAllocator(bfc.HostSubAllocator("1 GiB"), virtual_memory=True),
        lambda: bfc.CachingAllocator(
            bfc.HostSubAllocator("1 GiB"), settings="expandable_segments:True"
        ),
    ],
    ids=["caching", "bfc", "expandable"],
)
def test_a_tag_whose_only_request_was_refused_leaves_nothing_asleep(make: Any) -> None:
    """The place of its lane is taken by the next one."""
    with make() as allocator:
        with pytest.raises(bfc.OutOfMemoryError), allocator.tag("refused"):
            allocator.allocate("2 GiB")
        allocator.sleep()
        buffer = allocator.allocate("5 MiB")
        assert allocator.stats().bytes_asleep == 0
        assert allocator.stats().bytes_reserved >= 5 << 20
        allocator.check()
        buffer.to_host()
        allocator.wake()
        buffer.to_host()
        buffer.free()
        allocator.check()


def test_a_refused_wake_says_who_has_the_memory():
    device = bfc.SimulatedSubAllocator("80 GiB")
    pool = bfc.BFCAllocator(device, virtual_memory=True)
    with pool.tag("kv"):
        kept = [pool.allocate("1 GiB") for _ in range(40)]
    pool.sleep(drop=["kv"])
    other = bfc.CachingAllocator(device)
    blocks = [other.allocate("30 GiB"), other.allocate("20 GiB")]
    blocks.pop().free()
    with pytest.raises(bfc.OutOfMemoryError) as caught:
        pool.wake("kv")
    assert "release_free_regions() of other pools" in str(caught.value)
    assert "freeing something first" not in str(caught.value)
    other.release_free_regions()
    pool.wake("kv")
    assert len(kept) == 40
