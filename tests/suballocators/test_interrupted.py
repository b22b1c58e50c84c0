"""Our own sources, where their calls fail in the middle: what raises has kept nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from strikes import struck

import bfc

pytestmark = pytest.mark.usefixtures("quiet_collector")

MIB = 1 << 20

FACTORIES: dict[str, Callable[[], Any]] = {
    "simulated": lambda: bfc.SimulatedSubAllocator("64 MiB"),
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
    testcapi = pytest.importorskip("_testcapi")
    gc.disable()
    try:
        for n in range(200):
            block = None
            testcapi.set_nomemory(n, n + 1)
            try:
                block = source.alloc(256, MIB)
            except MemoryError:
                pass
            finally:
                testcapi.remove_mem_hooks()
            assert list(live(source)) == ([block[0]] if block else [])
            assert source.live_bytes == (MIB if block else 0)
            if block:
                source.free(*block)
    finally:
        gc.enable()


def test_a_free_without_host_memory_is_made_or_not(source) -> None:
    testcapi = pytest.importorskip("_testcapi")
    gc.disable()
    try:
        for n in range(200):
            block = source.alloc(256, MIB)
            testcapi.set_nomemory(n, n + 1)
            try:
                source.free(*block)
                freed = True
            except MemoryError:
                freed = False
            finally:
                testcapi.remove_mem_hooks()
            assert source.live_bytes == (0 if freed else MIB)
            assert bool(live(source)) is not freed
            if not freed:
                source.free(*block)
    finally:
        gc.enable()
