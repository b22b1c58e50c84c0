"""The two users of the transactions of mapped memory, expandable segments and stitching, each in
two forms: how each is made, and what it does so that every kind of call comes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import bfc

MIB = 1 << 20


def freed(allocator: Any, size: int, stream: int = 0) -> None:
    allocator.deallocate_raw(allocator.allocate_raw(size, stream))


def work_in_segments(allocator: bfc.CachingAllocator) -> None:
    kept = allocator.allocate_raw(25 * MIB)
    freed(allocator, 50 * MIB, 1)
    freed(allocator, 45 * MIB)
    allocator.empty_cache()
    freed(allocator, 1000)
    allocator.deallocate_raw(kept)
    allocator.empty_cache()


def work_in_pages(allocator: Any) -> None:
    kept = [allocator.allocate_raw(25 * MIB), allocator.allocate_raw(1000)]
    freed(allocator, 50 * MIB, 1)
    blocks = [allocator.allocate_raw(4 * MIB) for _ in range(8)]
    for ptr in blocks[::2]:
        allocator.deallocate_raw(ptr)
    freed(allocator, 14 * MIB)
    for ptr in [*kept, *blocks[1::2]]:
        allocator.deallocate_raw(ptr)
    allocator.release_free_regions()


def grow_in_segments(allocator: bfc.CachingAllocator) -> None:
    kept = allocator.allocate(25 * MIB)
    allocator.allocate(50 * MIB, 1).free()
    allocator.allocate(45 * MIB).free()
    kept.free()


def grow_in_pages(allocator: Any) -> None:
    """Grows, stitches, and takes pages of another stream."""
    live: list[int] = []
    try:
        for size in (4, 2, 4, 2, 4, 2):
            live.append(allocator.allocate_raw(size * MIB))
        for ptr in live[::2]:
            allocator.deallocate_raw(ptr)
        live = live[1::2]
        live.append(allocator.allocate_raw(12 * MIB))
        allocator.deallocate_raw(live.pop())
        live.append(allocator.allocate_raw(11 * MIB, 1))
        live.append(allocator.allocate_raw(1000, 1))
    finally:
        for ptr in live:
            try:
                allocator.deallocate_raw(ptr)
            except bfc.InvalidPointerError:
                pass  # it was freed before the interrupt


#: As a program in its own interpreter writes it.
FORKED_IN_SEGMENTS = """
def work(allocator):
    kept = allocator.allocate_raw(25 << 20)
    allocator.deallocate_raw(allocator.allocate_raw(50 << 20, 1))
    allocator.empty_cache()
    allocator.deallocate_raw(kept)
    allocator.empty_cache()
"""
FORKED_IN_PAGES = """
def work(allocator):
    live = [allocator.allocate_raw(size << 20) for size in (4, 2, 4, 2, 4, 2)]
    for ptr in live[::2]:
        allocator.deallocate_raw(ptr)
    for ptr in (allocator.allocate_raw(12 << 20), allocator.allocate_raw(11 << 20, 1)):
        allocator.deallocate_raw(ptr)
    allocator.release_free_regions()
    for ptr in live[1::2]:
        allocator.deallocate_raw(ptr)
    allocator.release_free_regions()
"""


@dataclass(frozen=True)
class User:
    """One form of one of the two."""

    name: str
    #: As a program in its own interpreter writes it.
    source: str
    work: Callable[[Any], None]
    grow: Callable[[Any], None]
    forked: str
    #: In MiB: of allocations in a forked child, and of a device that `grow` fills.
    sizes: tuple[int, ...]
    capacity: str
    #: The kinds of calls that `forked` makes.
    kinds: tuple[str, ...]

    @property
    def stitches(self) -> bool:
        return self.work is work_in_pages

    @property
    def page(self) -> int:
        """The bytes of a page for a large allocation."""
        return (2 if self.stitches else 20) * MIB

    def made(self, device: Any, **more: Any) -> Any:
        allocator = eval(self.source.replace("(it, ", "(it, **more, "), {"bfc": bfc, "more": more})
        return allocator(device)

    def page_bytes(self, allocator: Any) -> int:
        """The bytes of all pages that are made."""
        stats = allocator.page_stats()
        return stats["pages"] * stats["page_size"] if self.stitches else stats["page_bytes"]

    def has_lost(self, allocator: Any) -> bool:
        return bool(allocator.page_stats()["lost_slots"])

    def give_back(self, allocator: Any) -> None:
        """Everything that is free."""
        allocator.release_free_regions()
        if self.stitches:
            allocator.trim()
        else:
            allocator.empty_cache()


def of_segments(name: str, strict: bool) -> User:
    source = (
        f"lambda it: bfc.CachingAllocator(it, settings='expandable_segments:True', strict={strict})"
    )
    kinds = ("reserve", "create", "map", "set_access", "unmap", "release", "unreserve", "wait")
    return User(
        name, source, work_in_segments, grow_in_segments, FORKED_IN_SEGMENTS, (60, 30, 1),
        "400 MiB", kinds,
    )  # fmt: skip


def of_pages(name: str, source: str) -> User:
    kinds = ("reserve", "create", "map", "set_access", "unmap", "release")
    return User(
        name, source, work_in_pages, grow_in_pages, FORKED_IN_PAGES, (12, 8, 1), "20 MiB", kinds
    )


USERS = [
    of_segments("expandable", False),
    of_segments("strict", True),
    of_pages("bfc", 'lambda it: bfc.BFCAllocator(it, virtual_memory=True, page_size="2 MiB")'),
    of_pages("caching", "lambda it: bfc.CachingAllocator(it, stitch=True)"),
]
#: One test for each form.
EACH_USER = pytest.mark.parametrize("user", USERS, ids=lambda user: user.name)
