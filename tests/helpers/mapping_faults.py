"""Devices whose calls fail, one by one, alone or together with the call that undoes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from page_ledger import LedgerDevice, PageLedger

import bfc
from bfc.suballocators.simulated import Call

MAPPING: tuple[Call, ...] = (
    "reserve",
    "create",
    "map",
    "access",
    "unmap",
    "release",
    "unreserve",
    "wait",
)
KINDS: tuple[Call, ...] = ("alloc", "free", *MAPPING)
#: What undoes a call, and may fail, too.
UNDOING: tuple[Call, ...] = ("unmap", "release", "unreserve")
FAULT = bfc.SubAllocatorError("as ordered")


class AccountedDevice(LedgerDevice):
    """Also notes what it has failed to unmap."""

    def __init__(self, capacity: str) -> None:
        super().__init__(capacity)
        self.stuck: dict[int, int] = {}

    def unmap(self, address: int, nbytes: int) -> None:
        try:
            super().unmap(address, nbytes)
        except bfc.SubAllocatorError:
            self.stuck[address] = nbytes
            raise
        for start in [it for it in self.stuck if address <= it < address + nbytes]:
            del self.stuck[start]

    def map(self, address: int, pages: Sequence[int]) -> None:
        try:
            super().map(address, pages)
        except bfc.SubAllocatorError as error:
            self.stuck.update(error.lost)
            raise


class PagedProgram:
    """What a program has of an allocator on such a device."""

    def __init__(self, device: AccountedDevice, allocator: Any) -> None:
        self.device = device
        self.allocator = allocator
        self.ledger = PageLedger(device, allocator)

    def take(self, nbytes: int, stream: int = 0) -> int:
        ptr: int = self.allocator.allocate_raw(nbytes, stream)
        self.ledger.take(ptr, stream)
        return ptr

    def drop(self, *addresses: int) -> None:
        for address in addresses:
            self.ledger.give_back(address)
            self.allocator.deallocate_raw(address)


Order = tuple[Call, tuple[int, ...], bfc.SubAllocatorError | None]


def calls_of(fill: Callable[[], Any], operation: Callable[[Any], None]) -> dict[Call, int]:
    """How many calls of each kind the operation makes where nothing fails. `fill` makes a world: a
    `device`, an allocator on it, and `end`, which says what must hold."""
    world = fill()
    before = len(world.device.calls)
    with suppress(bfc.OutOfMemoryError):
        operation(world)
    made = [kind for kind, _, _ in world.device.calls[before:]]
    world.end()
    return {kind: made.count(kind) for kind in KINDS}


def orders(made: dict[Call, int]) -> Iterator[list[Order]]:
    """Each call fails, in each way: alone, with the next one, and with what undoes it."""
    for kind, count in made.items():
        for n, error in itertools.product(range(1, count + 1), (FAULT, None)):
            if error is None and kind not in ("alloc", "reserve", "create"):
                continue
            yield [(kind, (n,), error)]
            yield [(kind, (n, n + 1), error)]
            for undoing in UNDOING:
                if undoing != kind:
                    yield [(kind, (n,), error), (undoing, (1,), FAULT)]
            yield [
                (kind, (n,), error),
                *((it, tuple(range(1, 99)), FAULT) for it in UNDOING if it != kind),
            ]


def attempt(
    fill: Callable[[], Any], operation: Callable[[Any], None], ordered: list[Order]
) -> None:
    world = fill()
    for kind, numbers, error in ordered:
        world.device.fail_at(numbers, kind, error=error)
    with suppress(bfc.SubAllocatorError, bfc.OutOfMemoryError):
        operation(world)
    world.examine()
    for kind in KINDS:
        world.device.fail_at(0, kind)
    world.end()


def fail_every_call(
    fill: Callable[[], Any], operation: Callable[[Any], None], kinds: Sequence[Call] = KINDS
) -> None:
    """Whatever fails of these kinds, the caller is told, and nothing is lost."""
    made = calls_of(fill, operation)
    for ordered in orders({kind: made[kind] for kind in kinds}):
        try:
            attempt(fill, operation, ordered)
        except BaseException as error:
            error.add_note(f"after {ordered}")
            raise
