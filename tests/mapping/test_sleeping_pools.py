"""Private pools whose memory sleeps with a tag, as that of captured graphs does."""

from __future__ import annotations

import functools
import random
import threading

import pytest
from sleepers import KINDS, MIB, fail_at, failing_host, recover
from waiting import DEADLINE, Halt

import bfc

MAKERS = [
    bfc.CachingAllocator,
    functools.partial(bfc.CachingAllocator, settings="expandable_segments:True"),
    functools.partial(bfc.CachingAllocator, stitch=True),
]
stitched = MAKERS[2]


def filled(pool: bfc.CachingAllocator, nbytes: int, value: int) -> bfc.Buffer:
    return pool.allocate(nbytes).from_host(bytes([value]) * nbytes)


def holds(buffer: bfc.Buffer, value: int) -> bool:
    return bytes(buffer.to_host()) == bytes([value]) * buffer.nbytes


@pytest.mark.parametrize("make", MAKERS)
def test_a_private_pool_sleeps_with_the_tag_that_it_was_first_used_in(make) -> None:
    pool = make(bfc.HostSubAllocator("1 GiB"))
    private = bfc.MemPool(pool)
    with pool.tag("graph"), bfc.use_mem_pool(private):
        kept, freed = filled(pool, 3 * MIB, 1), filled(pool, 3 * MIB, 2)
    with bfc.use_mem_pool(private):  # from then on without the tag, too
        small = filled(pool, 100, 3)
    freed.free()
    place, reserved = kept.ptr, pool.stats().bytes_reserved
    for _ in range(3):
        report = pool.sleep(keep={"graph": "host"})
        assert (report.kept_bytes, report.released_bytes) == (3 * MIB + 100, reserved)
        assert (pool.stats().bytes_reserved, pool.stats().bytes_asleep) == (0, reserved)
        assert all(it.asleep for it in pool.snapshot().regions)
        pool.check()
        with bfc.use_mem_pool(private), pytest.raises(bfc.AsleepError, match=r"wake\('graph'\)"):
            pool.allocate(MIB)
        assert pool.empty_cache() == 0
        pool.wake()
        assert (kept.ptr, pool.stats().bytes_reserved) == (place, reserved)
        assert holds(kept, 1)
        assert holds(small, 3)
        pool.check()
    assert pool.tag_stats()["graph"]["bytes_in_use"] == 3 * MIB + 100
    kept.free()
    small.free()
    private.release()
    assert pool.stats().bytes_reserved == 0
    pool.close()


@pytest.mark.parametrize("make", MAKERS)
def test_what_is_freed_while_it_sleeps_goes_after_waking(make) -> None:
    pool = make(bfc.HostSubAllocator("1 GiB"))
    private = bfc.MemPool(pool)
    with pool.tag("graph"), bfc.use_mem_pool(private):
        buffer = filled(pool, 3 * MIB, 1)
    pool.sleep()
    buffer.free()
    private.release()
    pool.empty_cache()
    pool.wake()
    pool.check()
    pool.empty_cache()
    assert pool.stats().bytes_reserved == 0
    with pool.tag("other"), bfc.use_mem_pool(bfc.MemPool(pool)):
        other = filled(pool, MIB, 1)
    pool.sleep()
    del other
    pool.close()  # asleep
    assert pool.sub_allocator.live_bytes == 0 if hasattr(pool.sub_allocator, "live_bytes") else True


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", MAKERS)
def test_what_is_freed_while_it_sleeps_leaves_the_sums_right(make) -> None:
    """Its bytes were once taken off twice, and no request fitted below the limit any more."""
    pool = make(bfc.HostSubAllocator("1 GiB"), memory_limit=256 * MIB)
    private, other = bfc.MemPool(pool), bfc.MemPool(pool)
    with pool.tag("graph"), bfc.use_mem_pool(private):
        buffer = filled(pool, 3 * MIB, 1)
    with pool.tag("kv"), bfc.use_mem_pool(other):
        cache = filled(pool, 40 * MIB, 2)
    pool.sleep(keep={"kv": "host"})
    buffer.free()
    private.release()
    pool.empty_cache()
    assert pool.stats().bytes_reserved == 0
    pool.allocate(100 * MIB).free()
    pool.wake()
    assert holds(cache, 2)
    cache.free()
    other.release()
    pool.empty_cache()
    assert pool.stats().bytes_reserved == 0
    pool.check()
    pool.close()


@pytest.mark.parametrize("make", MAKERS)
def test_a_pool_that_is_gone_is_forgotten(make) -> None:
    """A new one of the same id once slept with the tag of the old one."""
    pool, name = make(bfc.HostSubAllocator("1 GiB")), (0, 7)
    with pool.tag("graph"):
        pool.begin_allocate_to_pool(name)
        filled(pool, 3 * MIB, 1).free()
        pool.end_allocate_to_pool(name)
    pool.release_pool(name)
    pool.empty_cache()
    pool.begin_allocate_to_pool(name)
    awake = filled(pool, 3 * MIB, 2)
    pool.end_allocate_to_pool(name)
    with pool.tag("graph"), bfc.use_mem_pool(bfc.MemPool(pool)):
        asleep = filled(pool, 3 * MIB, 3)
    pool.sleep()
    assert holds(awake, 2)
    awake.free()
    asleep.free()
    pool.release_pool(name)
    pool.close()


@pytest.mark.parametrize("make", MAKERS)
def test_a_pool_that_sleeps_with_a_tag_lends_nothing(make) -> None:
    """The borrower belongs to no tag, and its contents were dropped with the tag's."""
    pool = make(bfc.HostSubAllocator("1 GiB"), memory_limit=48 * MIB)
    private = bfc.MemPool(pool, use_on_oom=True)
    with pool.tag("graph"), bfc.use_mem_pool(private):
        filled(pool, 30 * MIB, 1).free()
    with pytest.raises(bfc.OutOfMemoryError):
        pool.allocate(30 * MIB)
    pool.close()


def test_a_pool_belongs_to_one_tag() -> None:
    pool = stitched(bfc.HostSubAllocator("1 GiB"))
    private = bfc.MemPool(pool)
    with bfc.use_mem_pool(private):
        before = pool.allocate(MIB)
        with pool.tag("graph"), pytest.raises(RuntimeError, match="has memory of no tag"):
            pool.allocate(MIB)
    before.free()
    pool.empty_cache()
    other = bfc.MemPool(pool)
    with pool.tag("graph"), bfc.use_mem_pool(other):
        held = pool.allocate(MIB)
    with pool.tag("kv"), bfc.use_mem_pool(other), pytest.raises(RuntimeError, match="'graph'"):
        pool.allocate(MIB)
    held.free()


def test_only_so_much_is_kept_on_the_host() -> None:
    pool = stitched(bfc.HostSubAllocator("1 GiB"))
    with pool.tag("a"):
        a = filled(pool, 3 * MIB, 1)
    with pool.tag("b"):
        b = filled(pool, 3 * MIB, 2)
    pool.sleep(keep={"a": "host"}, keep_limit="3 MiB")
    with pytest.raises(MemoryError, match="keep_limit is"):
        pool.sleep(keep={"b": "host"}, keep_limit="5 MiB")
    assert pool.asleep == {"a"}
    assert holds(b, 2)
    pool.sleep(drop="b", keep_limit=0)
    pool.wake()
    assert holds(a, 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("seed", range(3))
def test_contents_are_right_after_each_call_has_failed_once(make, seed: int) -> None:
    """Two tags, each with memory of its own and a private pool, and calls that fail."""
    draw, host = random.Random(seed), failing_host("128 MiB")
    pool = make(host)
    privates = {tag: bfc.MemPool(pool) for tag in "ab"}
    live: list[tuple[bfc.Buffer, int | None, str]] = []
    for step in range(400):
        tag, what = draw.choice("ab"), draw.random()
        if what < 0.4 and tag not in pool.asleep and len(live) < 12:
            nbytes, value = draw.choice([100, MIB, 3 * MIB]), draw.randrange(256)
            with pool.tag(tag):
                if make is bfc.CachingAllocator or draw.random() < 0.5:
                    with bfc.use_mem_pool(privates[tag]):
                        live.append((filled(pool, nbytes, value), value, tag))
                else:
                    live.append((filled(pool, nbytes, value), value, tag))
        elif what < 0.6 and live:
            live.pop(draw.randrange(len(live)))[0].free()
        elif live:
            if draw.random() < 0.5:
                fail_at(host, draw.choice(KINDS), draw.randrange(1, 6))
            known = {row[2] for row in live} - pool.asleep
            keep = {it: "host" for it in known if draw.random() < 0.5}
            try:
                if what < 0.8:
                    dropped = known - set(keep)
                    live = [(b, None if it in dropped else v, it) for b, v, it in live]
                    pool.sleep(keep=keep, drop=dropped)
                else:
                    pool.wake()
            except (bfc.SubAllocatorError, bfc.OutOfMemoryError):
                assert host.failed, f"seed {seed}, step {step}"
            recover(host)
        for buffer, value, it in live:
            if value is not None and it not in pool.asleep:
                assert holds(buffer, value), f"seed {seed}, step {step}"
        pool.check()
    pool.wake()
    for buffer, _, _ in live:
        buffer.free()
    for private in privates.values():
        private.release()
    pool.empty_cache()
    assert pool.stats().bytes_reserved == 0
    pool.close()


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("tag", [None, "other"])
def test_a_pool_joins_no_tag_while_another_thread_takes_memory_for_it(make, tag) -> None:
    """That memory belonged to no tag, and stayed behind when the pool slept."""
    slow, halt = failing_host("1 GiB"), Halt()
    for call in ("alloc", "create"):
        slow.on(call, first=halt)
    pool = make(slow)
    private = bfc.MemPool(pool)
    taken: list[bfc.Buffer] = []

    def take() -> None:
        with pool.tag(tag), bfc.use_mem_pool(private):
            taken.append(filled(pool, 3 * MIB, 1))

    thread = threading.Thread(target=take)
    thread.start()
    assert halt.inside.wait(DEADLINE)
    try:
        message = "has memory of" if tag is None else "'other'"
        with (
            pool.tag("graph"),
            bfc.use_mem_pool(private),
            pytest.raises(RuntimeError, match=message),
        ):
            pool.allocate(3 * MIB)
    finally:
        halt.go.set()
        thread.join()
    assert holds(taken[0], 1)
    pool.check()
    taken.pop().free()
    private.release()
    pool.empty_cache()
    assert slow.live_bytes == 0
    pool.close()


@pytest.mark.parametrize(
    ("fails", "undoing"),
    [("set_access", "unmap"), ("set_access", "release"), ("map", "release"), ("map", "unmap")],
)
def test_what_a_region_failed_with_goes_back_once_it_can(fails: str, undoing: str) -> None:
    """The first failure is raised; what could not be undone is not lost, and counts until then."""
    host = failing_host("64 MiB")
    pool = stitched(host)
    private = bfc.MemPool(pool)
    with pool.tag("graph"), bfc.use_mem_pool(private):
        fail_at(host, fails, 1)
        fail_at(host, undoing, 1)
        with pytest.raises(bfc.SubAllocatorError, match=f"{fails} fails"):
            pool.allocate(3 * MIB)
        recover(host)
        pool.empty_cache()
        assert host.live_bytes == 0
        filled(pool, 3 * MIB, 1)
    pool.check()
    private.release()
    pool.close()
    assert host.live_bytes == 0
