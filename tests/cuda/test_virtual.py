"""Mapped memory of a CUDA device: contents, the driver's calls, handles, peers, and failures."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import raw_cuda
from memory_hooks import call_without_memory
from raw_cuda import MAPPING
from waiting import run_all

import bfc
from bfc.suballocators._cuda_pages import CUDAPages

MIB = 1 << 20
PAGE = 2 * MIB
QUIET = 2  # a device whose memory no pool of the driver or a library keeps


@pytest.fixture
def source() -> bfc.CUDASubAllocator:
    """A device whose memory can be mapped."""
    source = bfc.CUDASubAllocator()
    if not source.supports_virtual_memory:
        pytest.skip(str(source.supports_virtual_memory))
    return source


class Mapped:
    """Reserved addresses with pages at their front; all is given back at the end of a block."""

    def __init__(self, source: bfc.CUDASubAllocator, pages: int, slots: int = 8) -> None:
        self.source = source
        self.size = source.mapping_granularity
        self.nbytes = slots * self.size
        self.pages: list[int] = []
        address = source.reserve(self.nbytes)
        assert address is not None
        self.address = address
        try:
            for _ in range(pages):
                page = source.create(self.size)
                assert page is not None
                self.pages.append(page)
            if pages:
                source.map(address, self.pages)
                source.set_access(address, pages * self.size)
        except BaseException:
            self.leave()
            raise

    def at(self, slot: int) -> int:
        return self.address + slot * self.size

    def leave(self) -> None:
        for at, _page in list(self.source._pages.books.mappings()):
            self.source.unmap(at, self.size)
        for page in self.pages:
            self.source.release(page)
        self.source.unreserve(self.address, self.nbytes)

    def __enter__(self) -> Mapped:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


def access(address: int, device: int = 0) -> int:
    """What a device may do at an address: 0 nothing, 3 read and write."""
    from cuda.bindings import driver

    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device
    return int(raw_cuda.call("cuMemGetAccess", location, address))


def properties(page: int) -> object:
    return raw_cuda.call("cuMemGetAllocationPropertiesFromHandle", page)


def mapping_calls(emulated) -> list[tuple[str, int | None]]:
    return [(call.name, call.nbytes) for call in emulated.calls if call.name in MAPPING]


# -- contents --------------------------------------------------------------------------------------


def test_what_one_address_writes_another_reads(source) -> None:
    with Mapped(source, 2) as here:
        source.map(here.at(4), here.pages[::-1])
        source.set_access(here.at(4), 2 * here.size)
        raw_cuda.fill(here.at(1) - 4, 7, 8)  # across both pages
        assert raw_cuda.read(here.at(6) - 4, 4) == b"\x07" * 4
        assert raw_cuda.read(here.at(4), 4) == b"\x07" * 4
        raw_cuda.fill(here.at(4), 9, 4)
        assert raw_cuda.read(here.at(1), 4) == b"\x09" * 4


def test_contents_stay_while_a_page_is_mapped_nowhere(source) -> None:
    with Mapped(source, 1) as here:
        raw_cuda.fill(here.at(0), 5, here.size)
        source.wait(0)
        source.unmap(here.at(0), here.size)
        source.map(here.at(7), here.pages)
        source.set_access(here.at(7), here.size)
        assert raw_cuda.read(here.at(8) - 16, 16) == b"\x05" * 16


def test_random_histories_keep_every_byte(source) -> None:
    """Pages at random places, each with its number written to it through any of its addresses."""
    rng = random.Random(0)
    slots, size = 16, source.mapping_granularity
    with Mapped(source, 0, slots) as here:
        held: dict[int, int] = {}
        placed: dict[int, int] = {}
        for step in range(300):
            slot = rng.randrange(slots)
            if slot in placed:
                page = placed.pop(slot)
                assert raw_cuda.read(here.at(slot), 1)[0] == held[page]
                source.wait(0)
                source.unmap(here.at(slot), size)
                continue
            if len(held) < 6:
                page = source.create(size)
                here.pages.append(page)
            else:
                page = rng.choice(list(held))
            source.map(here.at(slot), [page])
            source.set_access(here.at(slot), size)
            placed[slot] = page
            held[page] = held.get(page, step % 251)
            raw_cuda.fill(here.at(slot), held[page], size)


# -- the driver's calls ----------------------------------------------------------------------------


def test_each_verb_is_the_calls_that_it_says(source, emulated) -> None:
    emulated.clear()
    address = source.reserve(10 * PAGE)
    pages = [source.create(PAGE) for _ in range(3)]
    source.map(address, pages)
    source.set_access(address, 3 * PAGE)
    source.unmap(address, 3 * PAGE)
    for page in pages:
        source.release(page)
    source.unreserve(address, 10 * PAGE)
    assert mapping_calls(emulated) == [
        ("cuMemAddressReserve", 10 * PAGE),
        *[("cuMemCreate", PAGE)] * 3,
        *[("cuMemMap", PAGE)] * 3,
        ("cuMemSetAccess", 3 * PAGE),
        ("cuMemUnmap", 3 * PAGE),
        *[("cuMemRelease", PAGE)] * 3,
        ("cuMemAddressFree", 10 * PAGE),
    ]


def test_nothing_is_asked_about_mapping_before_it_is_used(emulated) -> None:
    emulated.clear()
    source = bfc.CUDASubAllocator()
    source.free(*source.alloc(256, MIB))
    assert emulated.count("cuMemGetAllocationGranularity") == 0
    assert source.mapping_granularity == PAGE
    asked = emulated.count()
    assert source.mapping_granularity == PAGE
    assert source.supports_virtual_memory
    assert emulated.count() == asked


def test_memory_is_counted_beside_blocks(source) -> None:
    block = source.alloc(256, MIB)
    with Mapped(source, 3) as here:
        assert source.live_bytes == 3 * here.size + MIB
    source.free(*block)
    assert source.live_bytes == 0


def test_no_memory_and_no_addresses_are_none(emulated) -> None:
    source = bfc.CUDASubAllocator(QUIET)
    emulated.set_free(QUIET, 2 * PAGE)
    try:
        with Mapped(source, 2):
            assert source.create(PAGE) is None
            assert source.alloc(256, PAGE) is None
    finally:
        emulated.set_others(QUIET, 0)
    emulated.fail("cuMemAddressReserve", "CUDA_ERROR_OUT_OF_MEMORY")
    assert source.reserve(PAGE) is None


def test_a_source_says_why_it_does_not_map(emulated) -> None:
    for kind in ("managed", "pinned", "async"):
        source = bfc.CUDASubAllocator(kind=kind)
        assert not source.supports_virtual_memory
        assert 'kind "device"' in str(source.supports_virtual_memory)
        assert source.mapping_granularity == 0
        with pytest.raises(
            bfc.SubAllocatorError, match="cannot map memory: only memory of the kind"
        ):
            source.create(PAGE)
    emulated.set_attribute(0, raw_cuda.HAS_VIRTUAL_MEMORY, 0)
    try:
        source = bfc.CUDASubAllocator()
        assert str(source.supports_virtual_memory).startswith("device 0 or its driver has no virt")
        with pytest.raises(bfc.SubAllocatorError, match="no virtual memory management"):
            source.reserve(PAGE)
    finally:
        emulated.set_attribute(0, raw_cuda.HAS_VIRTUAL_MEMORY, 1)


def test_the_callers_own_context_stays_current(source, emulated) -> None:
    with raw_cuda.current(1):
        before = int(raw_cuda.call("cuCtxGetCurrent"))
        with Mapped(source, 2):
            pass
        source.wait(0)
        for name in MAPPING[:4]:
            emulated.fail(name, "CUDA_ERROR_UNKNOWN")
            with pytest.raises(bfc.DriverError):
                Mapped(source, 2)
            assert int(raw_cuda.call("cuCtxGetCurrent")) == before


# -- waiting ---------------------------------------------------------------------------------------


def test_a_wait_is_for_one_stream_of_the_sources_own_device(emulated) -> None:
    source = bfc.CUDASubAllocator(1)
    block = source.alloc(256, 100)
    with raw_cuda.stream(1) as stream:
        emulated.hold(stream, 1)
        raw_cuda.fill(block[0], 1, 100, stream, 1)
        with raw_cuda.current(0):
            source.wait(0)
            assert emulated.pending == 1
            thread = emulated.release_once_waited_for(stream)
            source.wait(stream)
            thread.join()
        assert emulated.pending == 0
    source.free(*block)


def test_stream_0_is_the_default_stream_of_the_sources_device(emulated) -> None:
    source = bfc.CUDASubAllocator(1)
    block = source.alloc(256, 100)
    with raw_cuda.current(1):
        emulated.hold(0, 1)
        raw_cuda.fill(block[0], 1, 100, device=1)

    def wait() -> None:
        with raw_cuda.current(0):
            source.wait(0)

    waiter = threading.Thread(target=wait)
    waiter.start()
    end = time.monotonic() + 30
    while not emulated.library.emu_blocked() and time.monotonic() < end:
        time.sleep(0.001)
    assert waiter.is_alive()
    emulated.release(0, 1)
    waiter.join()
    assert emulated.pending == 0
    source.free(*block)


def test_a_stream_that_captures_is_not_waited_for_and_goes_on(source) -> None:
    from cuda.bindings import driver

    with raw_cuda.stream() as stream:
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        raw_cuda.call("cuStreamBeginCapture", stream, mode)
        try:
            with pytest.raises(bfc.DriverError, match="graph is being captured"):
                source.wait(stream)
            with Mapped(source, 2):  # which a capture does not mind
                pass
        finally:
            raw_cuda.call("cuStreamEndCapture", stream)


# -- handles for other processes -------------------------------------------------------------------


def handle_of(source: bfc.CUDASubAllocator) -> int:
    page = source.create(source.mapping_granularity)
    try:
        return int(properties(page).requestedHandleTypes)
    finally:
        source.release(page)


def test_pages_are_nobody_elses_unless_asked_for(source) -> None:
    assert source.handle_type == "none"
    assert handle_of(source) == 0
    posix = bfc.CUDASubAllocator(handle_type="posix")
    assert posix.handle_type == "posix"
    assert handle_of(posix) == 1


def test_fabric_handles_where_there_are_some(emulated, fabric) -> None:
    source = bfc.CUDASubAllocator(handle_type="fabric")
    assert handle_of(source) == 8
    assert source.handle_type == "fabric"


def test_a_device_without_fabric_gives_descriptors(emulated) -> None:
    source = bfc.CUDASubAllocator(handle_type="fabric")
    assert source.handle_type == "posix"
    emulated.clear()
    assert handle_of(source) == 1
    assert emulated.count("cuMemCreate") == 1, "no call that must fail"


def test_a_first_page_that_is_refused_a_fabric_handle_gets_a_descriptor(emulated, fabric) -> None:
    source = bfc.CUDASubAllocator(handle_type="fabric")
    emulated.fail("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY")
    assert source.create(PAGE) is None
    assert source.handle_type == "fabric", "a lack of memory decides nothing"
    emulated.fail("cuMemCreate", "CUDA_ERROR_NOT_PERMITTED")
    assert handle_of(source) == 1
    assert source.handle_type == "posix"
    emulated.fail("cuMemCreate", "CUDA_ERROR_NOT_PERMITTED")
    with pytest.raises(bfc.DriverError, match='try: handle_type="none"'):
        source.create(PAGE)


def test_a_later_page_is_not_given_another_handle(emulated, fabric) -> None:
    source = bfc.CUDASubAllocator(handle_type="fabric")
    assert handle_of(source) == 8
    emulated.fail("cuMemCreate", "CUDA_ERROR_NOT_PERMITTED")
    with pytest.raises(bfc.DriverError, match="NOT_PERMITTED"):
        source.create(PAGE)
    assert handle_of(source) == 8


def test_handles_that_are_not_to_be_had_are_told_at_once(emulated) -> None:
    with pytest.raises(
        ValueError, match="handle_type is one of 'none', 'posix', 'fabric', not 'x'"
    ):
        bfc.CUDASubAllocator(handle_type="x")
    emulated.set_attribute(0, raw_cuda.HAS_DESCRIPTORS, 0)
    try:
        for wanted in ("posix", "fabric"):
            with pytest.raises(
                ValueError, match="no handles for other processes: take handle_type="
            ):
                bfc.CUDASubAllocator(handle_type=wanted)
    finally:
        emulated.set_attribute(0, raw_cuda.HAS_DESCRIPTORS, 1)
    with pytest.raises(bfc.SubAllocatorError, match="cannot map"):
        bfc.CUDASubAllocator(kind="pinned", handle_type="posix")


@pytest.mark.parametrize("possible", [0, 1])
def test_pages_are_made_for_rdma_where_that_is_possible(emulated, possible: int) -> None:
    emulated.set_attribute(0, raw_cuda.HAS_RDMA, possible)
    try:
        source = bfc.CUDASubAllocator()
        page = source.create(PAGE)
        assert properties(page).allocFlags.gpuDirectRDMACapable == possible
        source.release(page)
    finally:
        emulated.set_attribute(0, raw_cuda.HAS_RDMA, 1)


# -- peers -----------------------------------------------------------------------------------------


def test_peers_get_access_in_the_same_call(emulated) -> None:
    source = bfc.CUDASubAllocator(peers=[2, 1])
    assert source.peers == (2, 1)
    emulated.clear()
    with Mapped(source, 3) as here:
        assert emulated.count("cuMemSetAccess") == 1
        assert [access(here.at(2), device) for device in range(3)] == [3, 3, 3]
        raw_cuda.fill(here.at(0), 4, 100, device=1)
        assert raw_cuda.read(here.at(0), 100, device=2) == b"\x04" * 100


def test_a_peer_that_comes_later_gets_what_is_mapped(source, emulated) -> None:
    with Mapped(source, 3) as here, Mapped(source, 0) as other:
        source.map(here.at(5), here.pages[:2])
        source.set_access(here.at(5), PAGE)  # the second has no access yet
        source.map(other.at(0), here.pages[:1])
        source.set_access(other.at(0), PAGE)
        emulated.clear()
        source.enable_peer(1)
        sizes = [call.nbytes for call in emulated.calls if call.name == "cuMemSetAccess"]
        assert sizes == [3 * PAGE, PAGE, PAGE]
        assert [access(here.at(slot), 1) for slot in (0, 1, 2, 5, 6)] == [3, 3, 3, 3, 0]
        assert access(other.at(0), 1) == 3
        source.set_access(here.at(6), PAGE)
        assert access(here.at(6), 1) == 3
        emulated.clear()
        source.enable_peer(1)
        source.enable_peer(0)
        assert emulated.count("cuMemSetAccess") == 0
        assert source.peers == (1,)
        source.unmap(other.at(0), PAGE)


def test_a_peer_that_fails_midway_has_nothing(source, emulated) -> None:
    with Mapped(source, 2) as here:
        source.map(here.at(4), here.pages)
        source.set_access(here.at(4), 2 * PAGE)
        emulated.fail("cuMemSetAccess", "CUDA_ERROR_NOT_SUPPORTED", at=2)
        with pytest.raises(bfc.DriverError, match=r"NOT_SUPPORTED(.|\n)*try: fewer peers"):
            source.enable_peer(1)
        assert source.peers == ()
        assert [access(here.at(slot), 1) for slot in (0, 1, 4, 5)] == [0] * 4
        assert [access(here.at(slot)) for slot in (0, 1, 4, 5)] == [3] * 4
        emulated.fail("cuMemSetAccess", "CUDA_ERROR_NOT_SUPPORTED", at=2, times=2)
        with pytest.raises(bfc.DriverError) as caught:
            source.enable_peer(1)
        assert (
            f"device 1 keeps access to {2 * PAGE} bytes at {here.address:#x}"
            in (caught.value.__notes__[0])
        )


def test_a_device_that_cannot_be_a_peer_is_told(source, emulated) -> None:
    emulated.library.emu_set_peers(0)
    try:
        with pytest.raises(
            bfc.SubAllocatorError, match="device 1 cannot access memory of device 0"
        ):
            source.enable_peer(1)
        with pytest.raises(bfc.SubAllocatorError, match="cannot access"):
            bfc.CUDASubAllocator(peers=[1])
    finally:
        emulated.library.emu_set_peers(1)
    with pytest.raises(bfc.DriverError, match="CUDA_ERROR_INVALID_DEVICE"):
        source.enable_peer(9)


# -- failures --------------------------------------------------------------------------------------


def a_life(source: bfc.CUDASubAllocator) -> None:
    """Every kind of call, some several times; whatever fails, everything is given back after."""
    with Mapped(source, 3) as here:
        source.unmap(here.at(1), PAGE)
        source.map(here.at(1), here.pages[:1])
        source.map(here.at(3), here.pages)
        source.set_access(here.at(1), 5 * PAGE)
        source.wait(0)
        source.unmap(here.at(1), 3 * PAGE)


def sweep(source: bfc.CUDASubAllocator) -> None:
    """Give everything back that the books still have."""
    books = source._pages.books
    for at, _page in list(books.mappings()):
        source.unmap(at, PAGE)
    for page in list(books.pages):
        source.release(page)
    for address, nbytes in books.reservations.items():
        source.unreserve(address, nbytes)


@pytest.mark.parametrize("error", ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_UNKNOWN"])
@pytest.mark.parametrize(
    "name", [*MAPPING, "cuCtxGetId", "cuCtxPushCurrent", "cuStreamSynchronize"]
)
def test_each_call_fails_at_each_place(emulated, name: str, error: str) -> None:
    """A clear error or None; the books know of all that is left, and nothing is lost."""
    before = emulated.live(), emulated.reservations(), emulated.live_handles()
    source = bfc.CUDASubAllocator()
    a_life(source)
    problems: list[Exception] = []
    for place in range(1, 60):
        emulated.clear()
        emulated.fail(name, error, at=place)
        try:
            a_life(source)
        except (bfc.SubAllocatorError, AssertionError) as problem:
            problems.append(problem)
        reached = emulated.count(name) >= place
        assert emulated.complaints == []
        emulated.clear()
        sweep(source)
        assert source.live_bytes == 0
        assert (emulated.live(), emulated.reservations(), emulated.live_handles()) == before
        if not reached:
            break
    assert place > 1
    refusals = error.endswith("MEMORY") and name in ("cuMemAddressReserve", "cuMemCreate")
    if not refusals and name in MAPPING:
        assert len(problems) == place - 1
        assert all(problem.name == error and name in str(problem) for problem in problems)
    assert not reached


VERBS: dict[str, Callable[[Mapped], object]] = {
    "reserve": lambda g: g.source.reserve(2 * PAGE),
    "create": lambda g: g.source.create(PAGE),
    "map": lambda g: g.source.map(g.at(4), g.pages),
    "set_access": lambda g: g.source.set_access(g.at(0), 2 * PAGE),
    "unmap": lambda g: g.source.unmap(g.at(0), 2 * PAGE),
    "release": lambda g: g.source.release(g.pages[0]),
}
MAPPED_AFTER = {"map": 4, "unmap": 0}
PAGES_AFTER = {"create": 3, "release": 1}


@pytest.mark.usefixtures("quiet_collector")
@pytest.mark.parametrize("verb", VERBS)
def test_a_call_without_host_memory_is_done_or_not(source, emulated, verb: str) -> None:
    """The books agree with the driver, and a page or addresses that nobody knows of are back."""
    pytest.importorskip("_testcapi")
    books = source._pages.books
    others = set(emulated.live()), set(emulated.reservations()), emulated.live_handles()
    for n in range(80):
        here = Mapped(source, 2)
        done, _ = call_without_memory(n, VERBS[verb], here)
        mapped = dict(books.mappings())
        assert set(emulated.live()) - others[0] == set(mapped)
        assert set(emulated.reservations()) - others[1] == set(books.reservations)
        assert emulated.live_handles() - others[2] == len(books.pages)
        assert len(mapped) == (MAPPED_AFTER.get(verb, 2) if done else 2)
        assert len(books.pages) == (PAGES_AFTER.get(verb, 2) if done else 2)
        sweep(source)
    assert done


def test_a_map_that_cannot_be_undone_says_what_is_left(source, emulated) -> None:
    others = set(emulated.live())
    with Mapped(source, 3) as here:
        emulated.fail("cuMemMap", "CUDA_ERROR_UNKNOWN", at=3)
        emulated.fail("cuMemUnmap", "CUDA_ERROR_UNKNOWN")
        with pytest.raises(bfc.DriverError, match="undoing it failed, too") as caught:
            source.map(here.at(4), here.pages)
        assert caught.value.lost == ((here.at(4), 2 * PAGE),)
        assert caught.value.call.startswith("cuMemMap")
        assert set(emulated.live()) - others == {here.at(slot) for slot in (0, 1, 2, 4, 5)}
        source.unmap(*caught.value.lost[0])
        source.map(here.at(4), here.pages)


def test_what_is_wrong_is_told_before_the_driver_is_asked(source, emulated) -> None:
    with Mapped(source, 2) as here:
        emulated.clear()
        for call in (
            lambda: source.map(here.at(1), here.pages),
            lambda: source.unmap(here.at(1), 2 * PAGE),
            lambda: source.set_access(here.at(2), PAGE),
            lambda: source.release(12345),
            lambda: source.unreserve(here.address, here.nbytes),
            lambda: source.create(PAGE + 1),
            lambda: source.reserve(MIB),
        ):
            with pytest.raises(bfc.SubAllocatorError):
                call()
        assert mapping_calls(emulated) == []


def test_a_context_that_is_reset_keeps_nothing_of_ours(emulated) -> None:
    source = bfc.CUDASubAllocator(1)
    before = emulated.live_handles(), emulated.reservations()
    with Mapped(source, 2):
        raw_cuda.call("cuDevicePrimaryCtxReset", 1)
        with pytest.raises(bfc.DriverError, match=r"was reset(.|\n)*make another"):
            source.create(PAGE)
        source.wait(0)
    assert source.live_bytes == 0
    assert (emulated.live_handles(), emulated.reservations()) == before


def test_a_forked_child_gives_back_what_is_its_parents_for_nothing(source, emulated) -> None:
    with Mapped(source, 2) as here:
        emulated.clear()
        child = os.fork()
        if child == 0:
            try:
                with pytest.raises(bfc.DriverError, match="forked"):
                    source.create(PAGE)
                here.leave()
                assert source.live_bytes == 0
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert len(emulated.live()) >= 2


def test_threads_that_come_first_share_the_books(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(CUDAPages):
        def __init__(self, *arguments: Any) -> None:
            time.sleep(0.01)
            super().__init__()  # __cinit__ has taken them

    monkeypatch.setattr("bfc.suballocators.cuda.CUDAPages", Slow)
    for _ in range(3):
        source = bfc.CUDASubAllocator()
        if not source.supports_virtual_memory:
            pytest.skip(str(source.supports_virtual_memory))
        gate, found = threading.Barrier(4), []

        def ask(source=source, gate=gate, found=found) -> None:
            gate.wait()
            found.append(source._pages)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(map(id, found))) == 1


def test_threads_map_side_by_side(source) -> None:
    def work(seed: int) -> None:
        rng = random.Random(seed)
        size = source.mapping_granularity
        address = source.reserve(8 * size)
        pages = [source.create(size) for _ in range(4)]
        for _ in range(50):
            count = rng.randrange(1, 5)
            source.map(address, pages[:count])
            source.set_access(address, count * size)
            source.unmap(address, count * size)
        for page in pages:
            source.release(page)
        source.unreserve(address, 8 * size)

    assert run_all([partial(work, seed) for seed in range(6)]) == []
    assert source.live_bytes == 0


def test_an_export_is_the_sources_own_page(source: bfc.CUDASubAllocator) -> None:
    """A page's number is the driver's handle: any call of the driver takes it."""
    page = source.create(source.mapping_granularity)
    assert int(properties(page).location.id) == 0
    source.release(page)
