"""Alignments of more than all addresses have: under TensorFlow's policy beside the slow model, in
the case that is described, under every policy, and what is refused.

`BFC_SEED=n` repeats one history.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

import bfc
from bfc_slow_models.tensorflow_model import Model, layout_of

KIB, MIB = 1 << 10, 1 << 20
BASE = 1 << 40
SEEDS = [int(os.environ["BFC_SEED"])] if "BFC_SEED" in os.environ else range(60)


def pool(capacity: int = 1 << 30, **options: object) -> bfc.BFCAllocator:
    return bfc.BFCAllocator(bfc.SimulatedSubAllocator(capacity), **options)  # type: ignore[arg-type]


def test_the_best_fit_lies_at_a_multiple_and_what_is_before_it_stays_free() -> None:  # CC-32
    ours = pool(memory_limit=MIB, allow_growth=True, strict=True, tensorflow="2.23")
    asked = [(256, 64), (256, 4096), (256, 64), (1024, 1024)]
    places = [ours.allocate_raw(size, alignment=alignment) for size, alignment in asked]
    assert [place - BASE for place in places] == [0, 4096, 256, 1024]
    assert [chunk.size for chunk in ours.snapshot().free_chunks()] == [512, 2048, MIB - 4352]
    for place in places:
        ours.deallocate_raw(place)
    assert [chunk.size for chunk in ours.snapshot().free_chunks()] == [MIB]


def test_strict_2_21_ignores_an_alignment_and_the_default_does_not() -> None:
    for options, place in (({"strict": True}, 256), ({}, 4096)):
        ours = pool(memory_limit=MIB, **options)
        ours.allocate_raw(256)
        assert ours.allocate_raw(256, alignment=4096) == BASE + place


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_histories_agree_with_the_model(seed: int) -> None:
    rng = random.Random(seed)
    options = {
        "memory_limit": rng.choice([64 * KIB, MIB, 20 * MIB]),
        "allow_growth": rng.random() < 0.5,
        "garbage_collection": rng.random() < 0.5,
        "fragmentation_fraction": rng.choice([0.0, 0.01]),
        "strict": rng.random() < 0.5,
        "tensorflow": rng.choice(["2.21", "2.23"]),
    }
    capacity, joins = rng.choice([1 << 30, 15 * MIB]), rng.random() < 0.3
    devices = [
        bfc.SimulatedSubAllocator(capacity, alignment=256, supports_coalescing=joins)
        for _ in range(2)
    ]
    print(f"repeat with BFC_SEED={seed}: {options}")
    ours, model = bfc.BFCAllocator(devices[0], **options), Model(devices[1], **options)
    live: list[int] = []
    for _ in range(150):
        if live and rng.random() < 0.4:
            address = live.pop(rng.randrange(len(live)))
            ours.deallocate_raw(address)
            model.free(address)
            continue
        size = rng.randrange(1, options["memory_limit"] // rng.choice([2, 20, 100]))
        alignment = rng.choice([64, 256, 1 << rng.randrange(9, 17)])
        try:
            place = ours.allocate_raw(size, alignment=alignment)
        except bfc.OutOfMemoryError:
            place = None
        assert place == model.allocate(size, alignment=alignment)
        if place is not None:
            live.append(place)
            ignored = options["strict"] and options["tensorflow"] == "2.21"
            assert ignored or place % alignment == 0
        assert layout_of(ours) == model.layout()
    assert devices[0].calls == devices[1].calls
    assert ours.stats() == model.stats()
    ours.check()


def test_a_buffer_has_its_alignment_too() -> None:
    ours = pool(allow_growth=True)
    first = ours.allocate(100)
    buffers = [ours.allocate("3 MiB", alignment=2 * MIB), ours.try_allocate(100, alignment=4096)]
    assert [buffer.ptr % 4096 for buffer in buffers if buffer is not None] == [0, 0]
    assert buffers[0].ptr % (2 * MIB) == 0  # type: ignore[union-attr]
    assert first.ptr == BASE


def test_a_plan_is_not_asked_for_a_place_that_may_not_be_aligned() -> None:
    trace = bfc.Trace([0, 0, 1, 1] * 3, [0, 1, 0, 1] * 3, [768, 1 << 20, 0, 0] * 3)
    ours = pool(allow_growth=True)
    ours.use_plan(bfc.Plan.from_trace(trace, marks=[0, 4, 8], fallback="bfc"), gate=None)
    with ours.step("train"):
        ours.allocate_raw(256)
        assert ours.allocate_raw(768, alignment=64 * KIB) % (64 * KIB) == 0


@pytest.mark.parametrize(
    ("alignment", "said"),
    [(3, "power of two"), (0, "power of two"), (-4096, "power of two"), (2 << 30, "memory limit")],
)
def test_a_wrong_alignment_takes_nothing(alignment: int, said: str) -> None:
    ours = pool()
    for request in (ours.allocate_raw, ours.allocate, ours.try_allocate):
        with pytest.raises(ValueError, match=said):
            request(100, alignment=alignment)
    assert ours.stats().pool_bytes == 0


@pytest.mark.parametrize("version", ["2.22", "", "jax", 2.23, None])
def test_an_unknown_version_is_refused_in_words(version: object) -> None:
    with pytest.raises((ValueError, TypeError), match=r"'2\.21'"):
        pool(tensorflow=version)


def pools() -> list[tuple[str, Any]]:
    def device() -> bfc.SimulatedSubAllocator:
        return bfc.SimulatedSubAllocator("1 GiB")

    return [
        ("BFC", pool(allow_growth=True)),
        ("BFC in pages", bfc.BFCAllocator(device(), virtual_memory=True)),
        ("caching", bfc.CachingAllocator(device())),
        ("expandable", bfc.CachingAllocator(device(), settings="expandable_segments:True")),
        ("split limit", bfc.CachingAllocator(device(), settings="max_split_size_mb:32")),
        ("stitched", bfc.CachingAllocator(device(), stitch=True)),
        ("pinned", bfc.PinnedAllocator(device())),
    ]


@pytest.mark.parametrize("name", [name for name, _ in pools()])
def test_every_policy_honours_an_alignment(name: str) -> None:
    """Addresses are multiples, nothing overlaps, and the books agree."""
    ours = dict(pools())[name]
    rng = random.Random(7)
    live: dict[int, int] = {}
    for _ in range(400):
        if live and rng.random() < 0.45:
            address = rng.choice(list(live))
            del live[address]
            ours.deallocate_raw(address)
            continue
        size = rng.choice([rng.randrange(1, 4 * KIB), rng.randrange(1, 6 * MIB)])
        alignment = 1 << rng.randrange(6, 22)
        address = ours.allocate_raw(size, alignment=alignment)
        assert address % alignment == 0
        assert all(address + size <= at or at + live[at] <= address for at in live)
        live[address] = size
        ours.check()
    for address in live:
        ours.deallocate_raw(address)
    ours.check()
    ours.close()


def test_what_lies_before_an_aligned_block_is_used() -> None:
    ours = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    ours.allocate_raw(512)
    aligned = ours.allocate_raw(512, alignment=4096)
    before = [ours.allocate_raw(512) for _ in range(7)]
    assert aligned - BASE == 4096
    assert [it - BASE for it in before] == list(range(512, 4096, 512))


def test_strict_pytorch_has_no_alignment() -> None:
    ours = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), strict=True)
    assert ours.allocate_raw(100, alignment=512) % 512 == 0
    with pytest.raises(ValueError, match="strict=False"):
        ours.allocate_raw(100, alignment=4096)


def test_a_tag_has_no_aligned_memory() -> None:
    ours = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), virtual_memory=True)
    with ours.tag("weights"), pytest.raises(ValueError, match="outside of it"):
        ours.allocate(100, alignment=1 << 16)
