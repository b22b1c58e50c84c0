"""A source of mapped memory in C: the allocator makes its calls without the GIL, and one that fails
loses nothing."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cpp import built_library

import bfc
from bfc.devices import Availability

MIB = 1 << 20
PAGE = 2 * MIB
TOTAL = 16 * PAGE
CALLS = ("reserve", "create", "map", "set_access", "unmap", "release", "unreserve")
ERROR = 5
HALF_WAY = -1

_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    source = Path(__file__).parent.parent / "helpers/native_pages.cpp"
    loaded = ctypes.CDLL(str(built_library(source, tmp_path_factory.mktemp("native"))))
    loaded.open_source.restype = ctypes.c_void_p
    loaded.open_source.argtypes = [ctypes.c_uint64]
    loaded.log_of_calls.restype = ctypes.c_char_p
    return loaded


class Native(bfc.SubAllocator):
    """The source in C. It defines no method that maps."""

    total_bytes = TOTAL
    supports_virtual_memory = Availability(True, "numbers")
    mapping_granularity = PAGE

    def __init__(self, library: Any, room: int = TOTAL) -> None:
        self.native_mapping = _capsule(library.open_source(room), b"bfc.NativeMapping", None)

    def __repr__(self) -> str:
        return "Native()"

    def alloc(self, alignment: int, nbytes: int) -> None:
        return None

    def free(self, address: int, nbytes: int) -> None:
        raise bfc.SubAllocatorError("no block was given")


def pools(source: bfc.SubAllocator) -> Iterator[Any]:
    yield bfc.BFCAllocator(source, virtual_memory=True, page_size=PAGE, memory_limit=TOTAL)
    yield bfc.CachingAllocator(source, stitch=True, page_size=PAGE, memory_limit=TOTAL)
    yield bfc.CachingAllocator(source, settings="expandable_segments:True", memory_limit=TOTAL)


def a_life(pool: Any) -> None:
    """Pages are made, stitched, taken apart and given back. A request that fails is left out."""
    blocks: list[int] = []

    def ask(nbytes: int) -> None:
        try:
            blocks.append(pool.allocate_raw(nbytes))
        except (MemoryError, bfc.SubAllocatorError):
            pass

    for _ in range(6):
        ask(2 * PAGE)
    for _ in range(2):
        for address in blocks[::2]:
            pool.deallocate_raw(address)
        del blocks[::2]
        ask(3 * PAGE)
        ask(2 * PAGE)
    for address in blocks:
        pool.deallocate_raw(address)
    try:
        pool.release_free_regions()
    except bfc.SubAllocatorError:
        pass


@pytest.mark.parametrize("kind", range(3))
def test_no_call_comes_with_the_gil(library: Any, kind: int) -> None:
    pool = list(pools(Native(library)))[kind]
    a_life(pool)
    pool.close()
    assert all(library.count(call.encode()) > 0 for call in CALLS), library.log_of_calls()
    assert (library.calls_with_gil(), library.mistakes(), library.left()) == (0, 0, 0)


def test_the_calls_are_those_of_a_source_in_python(library: Any) -> None:
    """In the same order: the functions stand in for the methods, and nothing else changes."""
    for kind in range(3):
        pool = list(pools(Native(library)))[kind]
        a_life(pool)
        pool.close()
        native = library.log_of_calls().decode().split()
        simulated = bfc.SimulatedSubAllocator(TOTAL)
        simulated.alloc = lambda *_: None  # type: ignore[method-assign]
        pool = list(pools(simulated))[kind]
        a_life(pool)
        pool.close()
        names = {"access": "set_access"}
        logged = [names.get(call, call) for call, _, _ in simulated.calls if call != "wait"]
        once = [call for i, call in enumerate(logged) if call != "map" or logged[i - 1] != "map"]
        assert native == once


def test_python_runs_while_memory_is_mapped(library: Any) -> None:
    """A thread waits in `map` until Python lets it on: for ever, if it held the GIL."""
    pool = bfc.CachingAllocator(Native(library), stitch=True, page_size=PAGE, memory_limit=TOTAL)
    library.hold_maps(1)
    asked = threading.Thread(target=lambda: pool.allocate_raw(3 * PAGE))
    asked.start()
    while not library.is_in_map():
        pass
    library.hold_maps(0)
    asked.join()
    pool.close()
    assert library.left() == 0


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("call", [*CALLS, "map half-way", "undoing"])
def test_each_call_that_fails_loses_nothing(library: Any, kind: int, call: str) -> None:
    name = {"map half-way": "map", "undoing": "map"}.get(call, call)
    code = HALF_WAY if name != call else ERROR
    place = 0
    reached = True
    while reached:
        place += 1
        pool = list(pools(Native(library)))[kind]
        library.fail(name.encode(), place, code)
        if call == "undoing":
            library.fail(b"unmap", 1, ERROR)
        a_life(pool)
        try:
            pool.close()
        except bfc.SubAllocatorError as error:
            said = str(error)
            pool.close()
            assert f"of Native failed with {ERROR}" in said
        reached = library.count(name.encode()) >= place
        assert (library.calls_with_gil(), library.mistakes(), library.left()) == (0, 0, 0), place
    assert place > 1


def test_what_has_failed_is_said(library: Any) -> None:
    source = Native(library)
    pool = bfc.CachingAllocator(source, stitch=True, page_size=PAGE, memory_limit=TOTAL)
    library.fail(b"set_access", 1, ERROR)
    with pytest.raises(bfc.SubAllocatorError, match="set_access of Native failed with 5"):
        pool.allocate_raw(PAGE)
    pool.close()
    assert library.left() == 0


def test_a_full_device_is_a_memory_error(library: Any) -> None:
    pool = bfc.CachingAllocator(
        Native(library, 2 * PAGE), stitch=True, page_size=PAGE, memory_limit=TOTAL
    )
    with pytest.raises(MemoryError):
        pool.allocate_raw(3 * PAGE)
    pool.close()
    assert library.left() == 0


def test_the_methods_make_the_same_calls(library: Any) -> None:
    """A user may call them, too. One that maps half-way says what it could not undo."""
    source = Native(library)
    address = source.reserve(4 * PAGE)
    assert address is not None
    pages = [source.create(PAGE) for _ in range(2)]
    library.fail(b"map", 1, HALF_WAY)
    library.fail(b"unmap", 1, ERROR)
    with pytest.raises(bfc.SubAllocatorError, match="map of Native failed") as caught:
        source.map(address, pages)
    assert caught.value.lost == ((address, PAGE),)
    source.unmap(address, PAGE)
    source.map(address, pages)
    source.set_access(address, 2 * PAGE)
    source.unmap(address, 2 * PAGE)
    for page in pages:
        source.release(page)
    source.unreserve(address, 4 * PAGE)
    assert (library.left(), library.mistakes()) == (0, 0)
    with pytest.raises(bfc.SubAllocatorError, match=r"unmap\(-1\)"):
        source.unmap(-1, PAGE)


def test_a_method_of_a_subclass_is_called(library: Any) -> None:
    """Then all are: the functions would pass over what it does."""
    seen = []

    class Watched(Native):
        def map(self, address: int, pages: Any) -> None:
            seen.append(len(pages))
            super().map(address, pages)

    pool = bfc.CachingAllocator(Watched(library), stitch=True, page_size=PAGE, memory_limit=TOTAL)
    pool.deallocate_raw(pool.allocate_raw(3 * PAGE))
    pool.close()
    assert sum(seen) == 3
    assert (library.left(), library.calls_with_gil()) == (0, 0)
