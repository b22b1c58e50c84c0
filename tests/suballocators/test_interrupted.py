"""Our own sources, where their calls fail in the middle: what raises has kept nothing."""

from __future__ import annotations

import dis
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from interrupts import struck
from memory_hooks import call_without_memory

import bfc

pytestmark = pytest.mark.usefixtures("quiet_collector")

MIB = 1 << 20

FACTORIES: dict[str, Callable[[], Any]] = {
    "simulated": lambda: bfc.SimulatedSubAllocator("64 MiB"),
    "simulated, reusing": lambda: bfc.SimulatedSubAllocator("64 MiB", reuse=True),
    "simulated, falling": lambda: bfc.SimulatedSubAllocator("64 MiB", chunk="32 MiB"),
    "simulated, joining": lambda: bfc.SimulatedSubAllocator("64 MiB", supports_coalescing=True),
    "host": lambda: bfc.HostSubAllocator("64 MiB"),
}


@pytest.fixture(params=FACTORIES)
def source(request: pytest.FixtureRequest) -> Iterator[Any]:
    source = FACTORIES[request.param]()
    yield source
    assert live(source) == {}
    assert source.live_bytes == 0


def live(source: Any) -> dict[int, Any]:
    blocks = source._mappings if isinstance(source, bfc.HostSubAllocator) else source.live
    assert isinstance(blocks, dict)
    return blocks


def test_an_alloc_that_raises_at_any_line_has_kept_nothing(source) -> None:
    line = 1
    while struck(line, source.alloc, 256, MIB):
        assert live(source) == {}
        assert source.live_bytes == 0
        line += 1
    assert line > 5
    (block,) = live(source)
    source.free(block, MIB)


def test_an_alloc_without_host_memory_has_kept_nothing(source) -> None:
    for n in range(200):
        _, block = call_without_memory(n, source.alloc, 256, MIB)
        assert list(live(source)) == ([block[0]] if block else [])
        assert source.live_bytes == (MIB if block else 0)
        if block:
            source.free(*block)


def test_a_free_without_host_memory_is_made_or_not(source) -> None:
    pytest.importorskip("_testcapi")
    for n in range(200):
        block = source.alloc(256, MIB)
        freed, _ = call_without_memory(n, source.free, *block)
        assert source.live_bytes == (0 if freed else MIB)
        assert bool(live(source)) is not freed
        if not freed:
            source.free(*block)


# -- memory that is mapped -------------------------------------------------------------------------

PAGE = 2 * MIB


class Ground:
    """Six slots of reserved addresses: pages in slots 0 and 1, of which the first has access; page
    2 is mapped nowhere."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.address = source.reserve(6 * PAGE)
        self.pages = [source.create(PAGE) for _ in range(3)]
        source.map(self.address, self.pages[:2])
        source.set_access(self.address, PAGE)

    def state(self) -> tuple[object, ...]:
        """What the books say, and that it is true of the system."""
        books = books_of(self.source)
        mapped = dict(books.mappings())
        counted = Counter(mapped.values())
        assert all(page.mappings == counted[number] for number, page in books.pages.items())
        if isinstance(self.source, bfc.HostSubAllocator):
            ours = [self.address + slot * PAGE for slot in range(6)]
            assert shared(ours) == set(mapped)
        return (
            {number: page.nbytes for number, page in books.pages.items()},
            books.reservations,
            mapped,
            list(books.accessible_runs()),
            books.page_bytes,
            self.source.live_bytes,
        )

    def leave(self) -> None:
        books = books_of(self.source)
        for at, _page in list(books.mappings()):
            self.source.unmap(at, PAGE)
        for page in list(books.pages):
            self.source.release(page)
        for start, nbytes in books.reservations.items():
            self.source.unreserve(start, nbytes)


def books_of(source: Any) -> Any:
    return source._pages.books if isinstance(source, bfc.HostSubAllocator) else source._books


def shared(addresses: list[int]) -> set[int]:
    """Those at which a page of a file is mapped, as the system sees it."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode = line.split()[:2]
        start, end = (int(part, 16) for part in span.split("-"))
        if mode[3] == "s":
            found.update(at for at in addresses if start <= at < end)
    return found


VERBS: dict[str, Callable[[Ground], object]] = {
    "reserve": lambda g: g.source.reserve(2 * PAGE),
    "create": lambda g: g.source.create(PAGE),
    "map": lambda g: g.source.map(g.address + 3 * PAGE, g.pages[1:]),
    "set_access": lambda g: g.source.set_access(g.address, 2 * PAGE),
    "unmap": lambda g: g.source.unmap(g.address, 2 * PAGE),
    "release": lambda g: g.source.release(g.pages[2]),
    "release what is mapped": lambda g: g.source.release(g.pages[0]),
}


def outcomes(source: Any, verb: str) -> tuple[object, object]:
    """The states before a call and after it, without the numbers that a system makes up."""
    here = Ground(source)
    before = here.state()
    VERBS[verb](here)
    after = here.state()
    here.leave()
    return before, after


def sizes(state: Any) -> list[object]:
    return [len(part) if isinstance(part, dict | list) else part for part in state]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("verb", VERBS)
def test_mapping_without_host_memory_is_done_or_not(source, verb: str) -> None:
    pytest.importorskip("_testcapi")
    before, after = (sizes(state) for state in outcomes(source, verb))
    for n in range(120):
        here = Ground(source)
        done, _ = call_without_memory(n, VERBS[verb], here)
        assert sizes(here.state()) == (after if done else before), f"at allocation {n}"
        here.leave()
        assert source.live_bytes == 0
    assert done


@pytest.mark.parametrize("verb", VERBS)
def test_mapping_that_raises_at_any_line_is_done_or_not(source, verb: str) -> None:
    if verb == "reserve" and isinstance(source, bfc.HostSubAllocator):
        pytest.skip("between mmap and its answer addresses are lost, which cost no memory")
    before, after = (sizes(state) for state in outcomes(source, verb))
    line = 1
    while True:
        here = Ground(source)
        is_struck = struck(line, VERBS[verb], here)
        found = sizes(here.state())
        if not is_struck:
            assert found == after
        elif verb in ("reserve", "create"):
            assert found == before, "nobody knows of it"
        else:
            assert found in (before, after)
        here.leave()
        assert source.live_bytes == 0
        if not is_struck:
            break
        line += 1
    assert line > 5


def functions_of(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    for cls in kind.__mro__:
        for name, value in vars(cls).items():
            if isinstance(value, types.FunctionType) and name != "fail_at":
                yield f"{cls.__name__}.{name}", value


@pytest.mark.parametrize("kind", [bfc.SimulatedSubAllocator, bfc.HostSubAllocator])
def test_no_handler_needs_memory_to_begin(kind: type) -> None:
    """To clean up behind a handler, CPython keeps the number of the instruction as an int. Above
    256 it asks for memory, and if there is none it enters the handler again, for ever."""
    far = [
        name
        for name, function in functions_of(kind)
        for entry in dis._parse_exception_table(function.__code__)  # type: ignore[attr-defined]
        if entry.lasti and entry.end // 2 > 256
    ]
    assert far == []
