"""Memory that is mapped: the contract's defaults, and the simulated device, call by call."""

from __future__ import annotations

import copyreg
import itertools
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest

import bfc
from bfc.suballocators._books import MappingBooks

MIB = 1 << 20
PAGE = 2 * MIB
BASE = 1 << 44


@pytest.fixture
def device() -> bfc.SimulatedSubAllocator:
    return bfc.SimulatedSubAllocator("64 MiB")


def reserve(device: bfc.SubAllocator, nbytes: int) -> int:
    address = device.reserve(nbytes)
    assert address is not None
    return address


def create(device: bfc.SubAllocator, nbytes: int = PAGE) -> int:
    page = device.create(nbytes)
    assert page is not None
    return page


class OnlyBlocks(bfc.SubAllocator):
    total_bytes = 1 << 30

    def __repr__(self) -> str:
        return "OnlyBlocks()"

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        return None

    def free(self, address: int, nbytes: int) -> None:
        raise bfc.SubAllocatorError("no such block")


@pytest.mark.parametrize(
    "call",
    [
        lambda source: source.reserve(PAGE),
        lambda source: source.unreserve(0, PAGE),
        lambda source: source.create(PAGE),
        lambda source: source.release(1),
        lambda source: source.map(0, [1]),
        lambda source: source.set_access(0, PAGE),
        lambda source: source.unmap(0, PAGE),
    ],
)
def test_a_source_of_blocks_alone_says_that_it_cannot_map(call: Callable) -> None:
    source = OnlyBlocks()
    assert not source.supports_virtual_memory
    assert "no reserve" in str(source.supports_virtual_memory)
    with pytest.raises(bfc.SubAllocatorError, match=r"OnlyBlocks\(\) cannot map memory: this"):
        call(source)


def test_a_source_waits_for_a_stream_by_its_fence() -> None:
    waited = []

    class Fence:
        def done(self) -> bool:
            return False

        def wait(self) -> None:
            waited.append("fence")

    queued: Any = OnlyBlocks()
    queued.asynchronous = True
    queued.fence = lambda stream: Fence() if stream == 7 else None
    queued.wait(6)
    assert waited == []
    queued.wait(7)
    assert waited == ["fence"]
    OnlyBlocks().wait(7)


# -- the log ---------------------------------------------------------------------------------------


def test_every_driver_call_is_an_entry(device: bfc.SimulatedSubAllocator) -> None:
    address = reserve(device, 10 * PAGE)
    pages = [create(device), create(device, 2 * PAGE)]
    device.map(address + PAGE, pages)
    device.set_access(address + PAGE, 3 * PAGE)
    device.wait(5)
    device.unmap(address + PAGE, PAGE)
    device.release(pages[0])
    device.unmap(address + 2 * PAGE, 2 * PAGE)
    device.release(pages[1])
    device.unreserve(address, 10 * PAGE)
    assert device.calls == [
        ("reserve", 10 * PAGE, BASE),
        ("create", PAGE, 1),
        ("create", 2 * PAGE, 2),
        ("map", PAGE, BASE + PAGE),
        ("map", 2 * PAGE, BASE + 2 * PAGE),
        ("access", 3 * PAGE, BASE + PAGE),
        ("wait", 0, 5),
        ("unmap", PAGE, BASE + PAGE),
        ("release", PAGE, 1),
        ("unmap", 2 * PAGE, BASE + 2 * PAGE),
        ("release", 2 * PAGE, 2),
        ("unreserve", 10 * PAGE, BASE),
    ]
    assert (device.live_bytes, device.pages, device.reservations) == (0, {}, {})


def test_blocks_and_pages_share_the_log_and_the_memory(device: bfc.SimulatedSubAllocator) -> None:
    block = device.alloc(256, 60 * MIB)
    assert block is not None
    page = create(device, 4 * MIB)
    assert device.create(PAGE) is None
    assert device.alloc(256, 1) is None
    assert device.memory_info() == (0, 64 * MIB)
    device.free(*block)
    assert device.alloc(256, 60 * MIB) is not None
    device.release(page)
    assert device.live_bytes == 60 * MIB
    assert [kind for kind, _, _ in device.calls] == [
        "alloc", "create", "create", "alloc", "free", "alloc", "release",
    ]  # fmt: skip
    assert device.calls[2:4] == [("create", PAGE, None), ("alloc", 1, None)]


def test_reservations_rise_end_to_end_and_are_never_joined_or_used_again() -> None:
    device = bfc.SimulatedSubAllocator("1 GiB", reserve_base=1 << 45)
    first, second = reserve(device, PAGE), reserve(device, 3 * PAGE)
    assert (first, second) == (1 << 45, (1 << 45) + PAGE)
    with pytest.raises(bfc.SubAllocatorError, match="not a whole reservation"):
        device.unreserve(first, 4 * PAGE)
    page = create(device, 2 * PAGE)
    with pytest.raises(bfc.SubAllocatorError, match="pass the end"):
        device.map(first, [page])
    device.unreserve(first, PAGE)
    assert reserve(device, PAGE) == second + 3 * PAGE
    device.release(page)


def test_addresses_run_out_before_memory_does(device: bfc.SimulatedSubAllocator) -> None:
    whole = 1 << 47
    address = reserve(device, whole)
    assert device.reserve(PAGE) is None
    assert device.calls[-1] == ("reserve", PAGE, None)
    device.unreserve(address, whole)
    assert device.reserve(PAGE) == BASE + whole


FAR = 1 << 62  # where blocks go on that have come to reserved addresses


@pytest.mark.parametrize(
    "base", [BASE - 8 * MIB, BASE + 8 * MIB, BASE, FAR - 8 * MIB, FAR - 64 * MIB, FAR + 8 * MIB]
)
@pytest.mark.parametrize("reserve_base", [BASE, FAR - 8 * MIB])
def test_blocks_and_reservations_do_not_meet(base: int, reserve_base: int) -> None:
    device = bfc.SimulatedSubAllocator("1 GiB", base=base, reserve_base=reserve_base)
    taken: list[tuple[int, int]] = []
    rng = random.Random(0)
    for _ in range(40):
        if rng.random() < 0.5:
            block = device.alloc(256, 3 * MIB)
            assert block is not None
            taken.append(block)
        else:
            taken.append((reserve(device, 2 * PAGE), 2 * PAGE))
    taken.sort()
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(taken))


@pytest.mark.parametrize("reserve_base", [0, -PAGE, PAGE + 256])
def test_an_odd_reserve_base_is_a_value_error(reserve_base: int) -> None:
    with pytest.raises(ValueError, match="reserve_base"):
        bfc.SimulatedSubAllocator("1 MiB", reserve_base=reserve_base)


# -- pages -----------------------------------------------------------------------------------------


def test_memory_stays_taken_while_a_page_is_mapped_somewhere(
    device: bfc.SimulatedSubAllocator,
) -> None:
    address, page = reserve(device, 4 * PAGE), create(device)
    device.map(address, [page])
    device.map(address + 2 * PAGE, [page, page])
    assert device.mappings == dict.fromkeys((address, address + 2 * PAGE, address + 3 * PAGE), page)
    device.release(page)
    assert device.live_bytes == PAGE
    with pytest.raises(bfc.SubAllocatorError, match="was released already"):
        device.release(page)
    with pytest.raises(bfc.SubAllocatorError, match="was released already"):
        device.map(address + PAGE, [page])
    device.unmap(address + 2 * PAGE, 2 * PAGE)
    assert device.live_bytes == PAGE
    device.unmap(address, PAGE)
    assert device.live_bytes == 0
    device.unreserve(address, 4 * PAGE)


def test_access_is_given_for_runs_and_goes_with_the_mapping(
    device: bfc.SimulatedSubAllocator,
) -> None:
    address = reserve(device, 8 * PAGE)
    device.map(address, [create(device) for _ in range(3)])
    assert device.accessible == []
    device.set_access(address, PAGE)
    device.set_access(address + 2 * PAGE, PAGE)
    assert device.accessible == [(address, PAGE), (address + 2 * PAGE, PAGE)]
    device.set_access(address, 3 * PAGE)
    assert device.accessible == [(address, 3 * PAGE)]
    device.unmap(address + PAGE, PAGE)
    device.map(address + PAGE, [1])
    assert device.accessible == [(address, PAGE), (address + 2 * PAGE, PAGE)]


WRONG = {
    "reserve nothing": (lambda d, a, p: d.reserve(0), "positive multiple"),
    "reserve an odd size": (lambda d, a, p: d.reserve(PAGE + 1), "positive multiple"),
    "create nothing": (lambda d, a, p: d.create(0), "positive multiple"),
    "create an odd size": (lambda d, a, p: d.create(MIB), "positive multiple"),
    "create less than nothing": (lambda d, a, p: d.create(-PAGE), "positive multiple"),
    "release no page": (lambda d, a, p: d.release(99), "no such page"),
    "map no page": (lambda d, a, p: d.map(a, []), "one page or more"),
    "map an unknown page": (lambda d, a, p: d.map(a, [p, 99]), "no page 99"),
    "map over the first": (lambda d, a, p: d.map(a + 4 * PAGE, [p]), "mapped at .* already"),
    "map over the second": (lambda d, a, p: d.map(a + 3 * PAGE, [p, p]), "mapped at .* already"),
    "map into a page": (lambda d, a, p: d.map(a + 6 * PAGE, [p]), "mapped at .* already"),
    "map at an odd address": (lambda d, a, p: d.map(a + MIB, [p]), "must be a multiple"),
    "map past the end": (lambda d, a, p: d.map(a + 9 * PAGE, [p, p]), "pass the end"),
    "map where nothing is reserved": (lambda d, a, p: d.map(a + 10 * PAGE, [p]), "not reserved"),
    "map before all": (lambda d, a, p: d.map(0, [p]), "not reserved"),
    "unmap nothing": (lambda d, a, p: d.unmap(a + 4 * PAGE, 0), "not whole pages"),
    "unmap what is not mapped": (lambda d, a, p: d.unmap(a, PAGE), "not whole pages"),
    "unmap a part": (lambda d, a, p: d.unmap(a + 5 * PAGE, PAGE), "not whole pages"),
    "unmap the end of a page": (lambda d, a, p: d.unmap(a + 6 * PAGE, PAGE), "not whole pages"),
    "unmap too much": (lambda d, a, p: d.unmap(a + 4 * PAGE, 4 * PAGE), "not whole pages"),
    "unmap elsewhere": (lambda d, a, p: d.unmap(a - PAGE, PAGE), "not whole pages"),
    "access to nothing": (lambda d, a, p: d.set_access(a, PAGE), "not whole pages"),
    "access to a part": (lambda d, a, p: d.set_access(a + 5 * PAGE, PAGE), "not whole pages"),
    "unreserve with memory": (lambda d, a, p: d.unreserve(a, 10 * PAGE), "memory is mapped"),
    "unreserve a part": (lambda d, a, p: d.unreserve(a, PAGE), "not a whole reservation"),
    "unreserve the rest": (lambda d, a, p: d.unreserve(a + PAGE, 9 * PAGE), "not a whole"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_use_is_refused_in_words_and_changes_nothing(
    device: bfc.SimulatedSubAllocator, wrong: str
) -> None:
    call, words = WRONG[wrong]
    address, page, large = reserve(device, 10 * PAGE), create(device), create(device, 2 * PAGE)
    device.map(address + 4 * PAGE, [page, large])
    before = device.calls[:], device.mappings, device.pages, device.live_bytes
    with pytest.raises(bfc.SubAllocatorError, match=words):
        call(device, address, page)
    assert (device.calls, device.mappings, device.pages, device.live_bytes) == before


# -- failures on order -----------------------------------------------------------------------------


def life(device: bfc.SimulatedSubAllocator) -> None:
    """Every kind of call twice, some in one step."""
    address = reserve(device, 8 * PAGE)
    try:
        pages = [create(device) for _ in range(3)]
        device.map(address, pages)
        device.set_access(address, 3 * PAGE)
        device.wait(0)
        device.unmap(address, 3 * PAGE)
        for page in pages:
            device.release(page)
    finally:
        for at in device.mappings:
            device.unmap(at, PAGE)
        for page in device.pages:
            device.release(page)
        device.unreserve(address, 8 * PAGE)


KINDS = ["reserve", "create", "map", "access", "wait", "unmap", "release", "unreserve"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_call_fails_once_at_every_place_and_nothing_is_lost(kind: str) -> None:
    clean = bfc.SimulatedSubAllocator("64 MiB")
    life(clean)
    for n in range(1, sum(entry[0] == kind for entry in clean.calls) + 1):
        device = bfc.SimulatedSubAllocator("64 MiB")
        device.fail_at(n, kind)  # type: ignore[arg-type]
        with pytest.raises((bfc.SubAllocatorError, AssertionError)):
            life(device)
        refused = [entry for entry in device.calls if entry[2] is None]
        assert [entry[0] for entry in refused] == [kind]
        assert device.live_bytes == 0
        assert device.pages == {}
        assert device.reservations == ({BASE: 8 * PAGE} if kind == "unreserve" else {})


def test_a_map_that_fails_midway_is_undone(device: bfc.SimulatedSubAllocator) -> None:
    address, pages = reserve(device, 4 * PAGE), [create(device) for _ in range(3)]
    device.fail_at(3, "map")
    with pytest.raises(bfc.SubAllocatorError, match="map of 2097152 bytes fails") as caught:
        device.map(address, pages)
    assert caught.value.lost == ()
    assert device.calls[-4:] == [
        ("map", PAGE, address),
        ("map", PAGE, address + PAGE),
        ("map", PAGE, None),
        ("unmap", 2 * PAGE, address),
    ]
    assert device.mappings == {}
    device.map(address, pages)
    assert len(device.mappings) == 3


def test_what_cannot_be_undone_is_told_and_can_be_unmapped_later(
    device: bfc.SimulatedSubAllocator,
) -> None:
    address, pages = reserve(device, 4 * PAGE), [create(device) for _ in range(3)]
    device.fail_at(3, "map")
    device.fail_at(1, "unmap")
    with pytest.raises(bfc.SubAllocatorError, match="undoing it failed, too") as caught:
        device.map(address, pages)
    assert caught.value.lost == ((address, 2 * PAGE),)
    assert f"{2 * PAGE} bytes at {address:#x}" in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).lost == caught.value.lost
    assert device.mappings == {address: pages[0], address + PAGE: pages[1]}
    for page in pages:
        device.release(page)
    assert device.live_bytes == 2 * PAGE, "the memory is taken while it is mapped"
    device.unmap(*caught.value.lost[0])
    assert device.live_bytes == 0


def copying_as_tblib_does(error: Exception) -> tuple[object, ...]:
    """Of an exception's copy: it has not an equal `__dict__`, but the same one."""

    def make(kind: type[Exception], attributes: dict[str, object]) -> Exception:
        again = kind()
        again.__dict__ = attributes
        return again

    return make, (type(error), error.__dict__)


def test_what_one_failure_left_mapped_is_not_told_of_the_next(
    device: bfc.SimulatedSubAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Dask is loaded, copies of an error share their attributes."""
    monkeypatch.setitem(copyreg.dispatch_table, bfc.SubAllocatorError, copying_as_tblib_does)
    address, pages = reserve(device, 4 * PAGE), [create(device) for _ in range(3)]
    ordered = bfc.SubAllocatorError("as ordered")
    device.fail_at(3, "map", error=ordered)
    device.fail_at(1, "unmap")
    with pytest.raises(bfc.SubAllocatorError) as caught:
        device.map(address, pages)
    assert caught.value.lost == ((address, 2 * PAGE),)
    device.unmap(*caught.value.lost[0])

    device.fail_at(1, "map", error=ordered)
    with pytest.raises(bfc.SubAllocatorError) as caught:
        device.map(address, pages)
    assert caught.value.lost == ()


def test_several_calls_fail_and_with_the_error_that_was_ordered(
    device: bfc.SimulatedSubAllocator,
) -> None:
    odd = bfc.DriverError("cuMemCreate", 801, "CUDA_ERROR_NOT_SUPPORTED")
    device.fail_at([1, 3], "create", error=odd)
    for fails in (True, False, True, False):
        if fails:
            with pytest.raises(bfc.DriverError, match="NOT_SUPPORTED") as caught:
                device.create(PAGE)
            assert caught.value.code == 801
        else:
            create(device)
    assert [page for _, _, page in device.calls] == [None, 1, None, 2]


def test_orders_are_kept_by_kind_replaced_and_cancelled(device: bfc.SimulatedSubAllocator) -> None:
    device.fail_at(1, "create")
    device.fail_at(1)
    assert device.alloc(256, 1) is None
    assert device.create(PAGE) is None
    device.fail_at(1, "create")
    device.fail_at(2, "create")
    create(device)
    device.fail_at(0, "create")
    create(device)
    device.fail_at(1, "free")
    block = device.alloc(256, 1)
    assert block is not None
    with pytest.raises(bfc.SubAllocatorError, match="free of 1 bytes fails"):
        device.free(*block)
    device.free(*block)
    with pytest.raises(ValueError, match="kind is one of 'alloc', 'free'"):
        device.fail_at(1, "mmap")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="counts calls from 1"):
        device.fail_at([1, -1], "create")


def test_a_wait_lets_a_held_stream_finish(device: bfc.SimulatedSubAllocator) -> None:
    device.hold(5)
    fence = device.fence(5)
    assert fence is not None
    assert not fence.done()
    device.wait(6)
    assert not fence.done()
    device.fail_at(1, "wait")
    with pytest.raises(bfc.SubAllocatorError, match="wait"):
        device.wait(5)
    assert not fence.done()
    device.wait(5)
    assert fence.done()
    assert device.calls == [("wait", 0, 6), ("wait", 0, None), ("wait", 0, 5)]


# -- the books, against a model that knows each granule --------------------------------------------


def test_the_books_agree_with_a_table_of_granules() -> None:
    rng = random.Random(1)
    books = MappingBooks(1)
    books.reserved(1000, 300)
    books.reserved(1300, 300)
    table: dict[int, tuple[int, int]] = {}  # granule: where its page begins, and the page
    sizes: dict[int, int] = {}
    for number in range(1, 3000):
        address = rng.randrange(990, 1610)
        if rng.random() < 0.6:
            sizes[number] = rng.choice([1, 1, 2, 5, 20])
            books.created(number, sizes[number])
            chosen = rng.choices(list(sizes), k=rng.randrange(1, 4))
            end = address + sum(sizes[page] for page in chosen)
            inside = any(s <= address and end <= s + 300 for s in (1000, 1300))
            possible = inside and not any(at in table for at in range(address, end))
            try:
                books.mapped(books.plan_map(address, chosen))
                assert possible
                for page in chosen:
                    for at in range(address, address + sizes[page]):
                        table[at] = address, page
                    address += sizes[page]
            except bfc.SubAllocatorError:
                assert not possible
        else:
            end = address + rng.randrange(1, 30)
            starts = {start for start, _ in table.values()}
            possible = (
                all(at in table for at in range(address, end))
                and address in starts
                and (end not in table or end in starts)
                and not address < 1300 < end
            )
            try:
                books.unmapped(books.find_run(address, end - address, "unmap"))
                assert possible
                for at in range(address, end):
                    del table[at]
            except bfc.SubAllocatorError:
                assert not possible
        assert dict(books.mappings()) == dict(table.values())
