"""Host memory that is mapped: contents through two addresses, what may not be touched, and what is
left when the system refuses."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import bfc
from bfc.suballocators import host_pages

MIB = 1 << 20
PAGE = 2 * MIB

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="files in memory are Linux's"
)


@pytest.fixture
def host() -> bfc.HostSubAllocator:
    return bfc.HostSubAllocator("64 MiB")


def mapped(host: bfc.HostSubAllocator, slots: int = 8) -> tuple[int, int]:
    """Addresses, and a page that is mapped at the first."""
    address, page = host.reserve(slots * PAGE), host.create(PAGE)
    assert address is not None
    assert page is not None
    host.map(address, [page])
    return address, page


def protection(address: int) -> str:
    """What the system lets this process do at an address, such as "rw-s"; "" for nothing there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode = line.split()[:2]
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return mode
    return ""


def dies_of(work: Callable[[], object]) -> int:
    """The signal that a child which does this ends with; 0 if it ends well."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1] & 0x7F


def test_what_is_written_at_one_address_is_read_at_all_others(host) -> None:
    address, page = mapped(host)
    host.map(address + 3 * PAGE, [page, page])
    host.set_access(address, PAGE)
    host.set_access(address + 3 * PAGE, 2 * PAGE)
    ctypes.memset(address, 7, PAGE)
    ctypes.memset(address + 4 * PAGE - 1, 9, 1)
    for start in (address, address + 3 * PAGE, address + 4 * PAGE):
        assert ctypes.string_at(start, 2) == b"\x07\x07"
        assert ctypes.string_at(start + PAGE - 2, 2) == b"\x07\x09"


def test_memory_can_be_touched_only_while_it_is_mapped_and_has_access(host) -> None:
    address, _page = mapped(host)

    def touch() -> None:
        ctypes.memset(address, 1, 1)

    assert protection(address) == "---s"
    assert dies_of(touch) == signal.SIGSEGV
    host.set_access(address, PAGE)
    assert protection(address) == "rw-s"
    assert dies_of(touch) == 0
    host.unmap(address, PAGE)
    assert protection(address) == "---p", "the addresses stay reserved"
    assert dies_of(touch) == signal.SIGSEGV
    host.unreserve(address, 8 * PAGE)
    assert protection(address) == ""


def test_nobody_else_gets_reserved_addresses(host) -> None:
    address, _page = mapped(host)
    host.unmap(address, PAGE)
    others = [mmap.mmap(-1, PAGE) for _ in range(50)]
    starts = [ctypes.addressof(ctypes.c_char.from_buffer(other)) for other in others]
    assert not any(address - PAGE < start < address + 8 * PAGE for start in starts)


@pytest.mark.parametrize("order", ["release first", "unmap first"])
def test_memory_goes_back_to_the_system(order: str) -> None:
    host = bfc.HostSubAllocator("1 GiB")
    address = host.reserve(64 * PAGE)
    pages = [host.create(PAGE) for _ in range(64)]
    before = in_files(host)
    host.map(address, pages)
    host.set_access(address, 64 * PAGE)
    ctypes.memset(address, 1, 64 * PAGE)
    assert in_files(host) - before == 64 * PAGE
    if order == "unmap first":
        host.unmap(address, 64 * PAGE)
    for page in pages:
        host.release(page)
    if order == "release first":
        assert in_files(host) - before == 64 * PAGE
        host.unmap(address, 64 * PAGE)
    assert in_files(host) == before
    assert host.live_bytes == 0


def in_files(host: bfc.HostSubAllocator) -> int:
    """The memory that the source's file has taken."""
    file = host._pages._file
    return 0 if file is None else os.fstat(file.number).st_blocks * 512


def test_a_dropped_source_gives_addresses_memory_and_file_back() -> None:
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        host = bfc.HostSubAllocator("1 GiB")
        address, _page = mapped(host)
        host.set_access(address, PAGE)
        ctypes.memset(address, 1, PAGE)
        del host
        assert protection(address) == ""
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_source_that_never_maps_opens_no_file(host) -> None:
    files = len(os.listdir("/proc/self/fd"))
    host.free(*host.alloc(256, MIB))
    assert host._own_pages is None
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_forked_child_gives_back_without_hurting_its_parent(host) -> None:
    address, page = mapped(host)
    host.set_access(address, PAGE)
    ctypes.memset(address, 5, PAGE)

    def live_on() -> None:
        host.unmap(address, PAGE)
        host.release(page)
        own = host.create(PAGE)
        assert own is not None
        host.map(address, [own])
        host.set_access(address, PAGE)
        assert ctypes.string_at(address, 1) == b"\0"
        ctypes.memset(address, 6, PAGE)

    child = os.fork()
    if child == 0:
        try:
            live_on()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert ctypes.string_at(address + PAGE - 1, 1) == b"\x05"
    ctypes.memset(address, 7, PAGE)


def test_addresses_that_are_not_to_be_had_are_a_refusal(host) -> None:
    assert host.reserve(1 << 50) is None
    assert host.reserve(1 << 62) is None


def test_elsewhere_it_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    host_pages.availability.cache_clear()
    try:
        host = bfc.HostSubAllocator("64 MiB")
        assert not host.supports_virtual_memory
        with pytest.raises(bfc.SubAllocatorError, match=r"cannot map memory: .*memfd_create"):
            host.create(PAGE)
        host.free(*host.alloc(256, MIB))
    finally:
        host_pages.availability.cache_clear()


# -- when the system refuses -----------------------------------------------------------------------


class Failing(host_pages.System):
    """The system, whose n-th call of a name is refused."""

    def __init__(self, name: str = "", at: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.log: list[str] = []
        self.faults = {(name, n) for n in at}

    def check(self, name: str) -> None:
        self.log.append(name)
        if (name, self.log.count(name)) in self.faults:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    def reserve(self, *arguments: int) -> int:
        self.check("reserve")
        return super().reserve(*arguments)

    def hide(self, *arguments: int) -> None:
        self.check("hide")
        super().hide(*arguments)

    def map(self, *arguments: int) -> None:
        self.check("map")
        super().map(*arguments)

    def protect(self, *arguments: int) -> None:
        self.check("protect")
        super().protect(*arguments)

    def punch(self, *arguments: int) -> None:
        self.check("punch")
        super().punch(*arguments)


def use(host: bfc.HostSubAllocator) -> None:
    """Every kind of call, some more than once; whatever fails, all is given back."""
    address = host.reserve(8 * PAGE)
    if address is None:
        raise bfc.SubAllocatorError("no addresses")
    pages = [host.create(PAGE) for _ in range(3)]
    try:
        host.map(address, pages)
        host.set_access(address, PAGE)
        host.set_access(address, 3 * PAGE)
        ctypes.memset(address, 1, 3 * PAGE)
        host.unmap(address + PAGE, PAGE)
        host.map(address + PAGE, pages[2:])
    finally:
        for at, _number in list(host._pages.books.mappings()):
            host.unmap(at, PAGE)
        for page in pages:
            host.release(page)
        host.unreserve(address, 8 * PAGE)


def faulty(name: str, *at: int) -> tuple[bfc.HostSubAllocator, Failing]:
    host = bfc.HostSubAllocator("64 MiB")
    host._pages.system = system = Failing(name, at)
    return host, system


@pytest.mark.parametrize("name", ["reserve", "map", "protect"])
def test_every_call_refused_once_at_every_place_loses_nothing(name: str) -> None:
    host, system = faulty("")
    use(host)
    count = system.log.count(name)
    assert count
    for n in range(1, count + 1):
        host, system = faulty(name, n)
        with pytest.raises(bfc.SubAllocatorError):
            use(host)
        assert host.live_bytes == 0
        assert host._pages.books.reservations == {}
        use(host)


def test_an_unmapping_that_is_refused_leaves_all_mapped() -> None:
    host, _system = faulty("hide", 1)
    address, page = mapped(host)
    host.set_access(address, PAGE)
    with pytest.raises(
        bfc.SubAllocatorError, match=r"unmap.*Cannot allocate memory\n  try: larger"
    ):
        host.unmap(address, PAGE)
    ctypes.memset(address, 1, PAGE)
    host.unmap(address, PAGE)
    host.release(page)
    assert host.live_bytes == 0


def test_a_map_that_cannot_be_undone_says_what_is_left() -> None:
    host, system = faulty("map", 3)
    system.faults.add(("hide", 1))
    address = host.reserve(8 * PAGE)
    pages = [host.create(PAGE) for _ in range(3)]
    with pytest.raises(bfc.SubAllocatorError, match="undoing it failed, too") as caught:
        host.map(address, pages)
    assert caught.value.lost == ((address, 2 * PAGE),)
    assert protection(address) == "---s"
    for page in pages:
        host.release(page)
    assert host.live_bytes == 2 * PAGE
    host.unmap(*caught.value.lost[0])
    assert host.live_bytes == 0
    host.unreserve(address, 8 * PAGE)


def test_access_that_is_refused_is_as_it_was_before() -> None:
    host, _system = faulty("protect", 2)
    address, page = mapped(host)
    host.map(address + PAGE, [page])
    host.set_access(address, PAGE)
    with pytest.raises(bfc.SubAllocatorError, match="set_access"):
        host.set_access(address, 2 * PAGE)
    assert (protection(address), protection(address + PAGE)) == ("rw-s", "---s")


def test_memory_that_could_not_go_back_goes_with_the_next() -> None:
    host, _system = faulty("punch", 1)
    address, page = mapped(host)
    host.set_access(address, PAGE)
    ctypes.memset(address, 1, PAGE)
    host.unmap(address, PAGE)
    host.release(page)
    assert in_files(host) == PAGE
    host.release(host.create(PAGE))
    assert in_files(host) == 0
