"""The table of C functions of `bfc_allocator.h`, called as a back end of PyTorch calls it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pocl
import pytest
import torch_table
import waiting
from cpp import built_library
from own_interpreter import run
from torch_table import FAILED, NOT_LIVE, OK, OUT_OF_MEMORY, Table

import bfc
from bfc.testing import Misbehaving

MIB = 1 << 20
HERE = Path(__file__).parent
POLICIES = {
    "bfc": partial(bfc.BFCAllocator, allow_growth=True),
    "caching": bfc.CachingAllocator,
    "stitching": partial(bfc.CachingAllocator, stitch=True),
    "pages": partial(bfc.BFCAllocator, virtual_memory=True),
    "expandable": partial(bfc.CachingAllocator, settings="expandable_segments:True"),
}
Make = Callable[..., Any]
#: For what no thread may do without the GIL: a recount needs it.
unless_it_recounts = pytest.mark.skipif(
    os.environ.get("BFC_DEBUG") == "2", reason="it checks after each change"
)


@pytest.fixture(params=["bfc", "caching"])
def make(request: pytest.FixtureRequest) -> Make:
    policy: Make = POLICIES[request.param]
    return policy


@pytest.fixture
def pool(make: Make) -> Any:
    return make(bfc.HostSubAllocator("1 GiB"))


def allocated(pool: Any) -> int:
    """The bytes that the pool counts as in use."""
    found: int = pool.stats().bytes_in_use
    return found


# -- requests --------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [2**63, 2**64 - 255, 2**64 - 1])
def test_a_size_that_would_be_rounded_up_to_0_is_refused(pool: Any, nbytes: int) -> None:
    table = Table(pool)
    table.free(table.allocate(1000))  # so that a free block might serve it
    result, why, ptr = table.try_allocate(nbytes)
    assert (result, ptr) == (FAILED, 0)
    assert "2**63 - 1" in why
    assert allocated(pool) == 0


def test_a_hit_on_the_default_stream_is_served_at_once(make: Make) -> None:
    calls = []

    class Watched(type(make(bfc.HostSubAllocator("1 MiB")))):  # type: ignore[misc]
        def allocate_raw(self, *arguments: Any, **named: Any) -> int:
            calls.append(arguments)
            ptr: int = super().allocate_raw(*arguments, **named)
            return ptr

    options = make.keywords if isinstance(make, partial) else {}
    table = Table(Watched(bfc.HostSubAllocator("64 MiB"), **options))
    for _ in range(10):
        table.free(table.allocate(1000))
    assert len(calls) == 1


@unless_it_recounts
@pytest.mark.parametrize("policy", ["bfc", "caching"])
def test_a_hit_and_its_free_take_no_gil(harness: Path, policy: str) -> None:
    """Another thread makes them while this one holds the GIL and waits: it would wait for ever."""
    name = "BFCAllocator" if policy == "bfc" else "CachingAllocator"
    run(
        IN_A_PROCESS
        + f"""
pool = bfc.{name}(bfc.HostSubAllocator("64 MiB"))
table = Table(pool)
table.free(table.allocate(1000))
library = ctypes.PyDLL({str(harness)!r})    # which holds the GIL, unlike CDLL
assert library.harness_pairs_elsewhere(table.address, 1000, ctypes.c_size_t(1000), 0) == 0
pool.check()
"""
    )


@pytest.mark.sampled(1)
@unless_it_recounts
@pytest.mark.skipif(not pocl.devices(), reason=str(bfc.opencl.is_available()))
@pytest.mark.parametrize("on", ["the default stream", "a stream"])
def test_a_hit_on_opencl_takes_no_gil(harness: Path, on: str) -> None:
    """Also on a queue that was noted to be in order."""
    run(
        IN_A_PROCESS
        + f"""
import pocl
pocl.start()
import pyopencl as cl
import torch_table
from bfc.integrations import _torch_table
source = bfc.OpenCLSubAllocator(capacity="64 MiB")
pool = bfc.CachingAllocator(source)
queue = cl.CommandQueue(source.context)
stream = queue.int_ptr if {on == "a stream"} else 0
table = _torch_table.Table(lambda device: pool, 1)
table.note_ordered(0, queue.int_ptr)
capsule = table.capsule()
address = ctypes.c_void_p(ctypes.addressof(torch_table.at(capsule)))
arguments = address, ctypes.c_int64(1000), ctypes.c_size_t(1000), ctypes.c_int64(stream)
assert ctypes.CDLL({str(harness)!r}).harness_pairs_elsewhere(*arguments) == 0
assert ctypes.PyDLL({str(harness)!r}).harness_pairs_elsewhere(*arguments) == 0
pool.check()
"""
    )


def test_there_are_as_many_devices_as_pools() -> None:
    pools = [bfc.CachingAllocator(bfc.HostSubAllocator("64 MiB")) for _ in range(64)]
    table = Table(*pools)
    ptrs = [table.allocate(1000, device=device) for device in range(64)]
    assert [table.device_of(ptr + 999) for ptr in ptrs] == list(range(64))
    for device in (-1, 64):
        result, why, _ptr = table.try_allocate(1000, device=device)
        assert (result, why) == (FAILED, f"there is no device {device}: this back end has 64")
    assert {table.free(ptr) for ptr in ptrs} == {OK}
    assert [allocated(pool) for pool in pools] == [0] * 64
    for wrong in (pools + pools[:1], []):
        with pytest.raises(ValueError, match="1 to 64 devices"):
            Table(*wrong)


def test_a_stream_is_noted_for_a_device_that_there_is(pool: Any) -> None:
    from bfc.integrations import _torch_table

    made = _torch_table.Table([pool].__getitem__, 1)
    made.note_ordered(0, 7)
    for device in (-1, 1, 1000):
        with pytest.raises(ValueError, match="there is no device"):
            made.note_ordered(device, 7)


def test_memory_that_runs_out_is_told_and_can_be_had_again(pool: Any) -> None:
    table = Table(pool)
    large = table.allocate(768 * MIB)
    result, why, ptr = table.try_allocate(768 * MIB)
    assert (result, ptr) == (OUT_OF_MEMORY, 0)
    assert "768.00 MiB" in why
    table.free(large)
    assert table.ask("empty") == (OK, "")
    table.free(table.allocate(768 * MIB))


# -- words that fit --------------------------------------------------------------------------------


def room_used(room: int, text: str) -> bytes:
    """What was written, of a room with a fence behind it."""
    source = Misbehaving(bfc.HostSubAllocator("1 GiB"))
    source.on("alloc", raises=RuntimeError(text))
    table = Table(bfc.CachingAllocator(source))
    ptr = ctypes.c_void_p()
    why = ctypes.create_string_buffer(b"\xff" * 8192, 8192)
    result = table.call("allocate", 0, 1000, 0, ctypes.byref(ptr), why, room)
    assert result == FAILED
    assert set(why.raw[room:]) == {0xFF}, "it wrote behind its room"
    return why.raw[:room]


@pytest.mark.parametrize("room", [0, 1, 2, 3, 50, 51, 4095, 4096])
def test_a_text_is_cut_between_characters(room: int) -> None:
    written = room_used(room, "ü" * 3000)
    if room:
        said, end, _rest = written.partition(b"\0")
        assert end
        said.decode("utf-8")
        assert room - len(said) <= 3


def test_a_text_that_utf8_does_not_know_is_told_all_the_same() -> None:
    def unopened(device: int) -> Any:
        raise RuntimeError("odd \udc80 name")

    table = Table(opened=unopened)
    assert table.try_allocate(1000)[:2] == (FAILED, "odd ? name")


# -- frees -----------------------------------------------------------------------------------------


def test_memory_that_is_freed_twice_is_counted_and_nothing_changes(pool: Any) -> None:
    table = Table(pool)
    ptr, other = table.allocate(1000), table.allocate(1000)
    assert table.free(ptr) == OK
    before = pool.stats()
    for count, wrong in enumerate((ptr, other + 1, 12345), 1):
        with pytest.warns(RuntimeWarning, match=f"{wrong:#x} was freed, and is not live"):
            assert table.free(wrong) == NOT_LIVE
        assert table.stats()["invalid_frees"] == count
    assert pool.stats() == before


def test_a_warning_that_is_an_error_stays_inside(pool: Any, monkeypatch: Any) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    table = Table(pool)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert table.free(12345) == NOT_LIVE
    assert [said.exc_type for said in told] == [RuntimeWarning]
    assert table.stats()["invalid_frees"] == 1


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_library(HERE / "table_harness.cpp", tmp_path_factory.mktemp("table"))


@pytest.mark.parametrize("reason", ["a history", "another stream", "freed before"])
def test_a_free_keeps_the_exception_that_is_raised_at_the_moment(
    harness: Path, reason: str
) -> None:
    """A tensor goes while an exception unwinds the frame that held it."""
    pool = bfc.CachingAllocator(bfc.HostSubAllocator("1 GiB"))
    table = Table(pool)
    ptr = table.allocate(1000)
    if reason == "a history":
        pool.record_history()
    elif reason == "another stream":
        table.record_stream(ptr, 7)
    else:
        table.free(ptr)
    library = ctypes.PyDLL(str(harness))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert library.harness_free_while_raising(table.address, ctypes.c_void_p(ptr))
    assert len(said) == (reason == "freed before")
    pool.empty_cache()
    assert allocated(pool) == 0


def interrupted(call: Callable[[int], object], argument: int) -> None:
    """Makes a call, and goes on until the Ctrl-C that came meanwhile is raised."""
    call(argument)
    waiting.until(lambda: False)


@pytest.mark.parametrize("policy", ["bfc", "caching"])
def test_a_free_that_the_device_fails_is_made_later(policy: str, monkeypatch: Any) -> None:
    """Nobody would free the memory again: its tensor is gone."""
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    source = Misbehaving("64 MiB", asynchronous=True)
    pool = POLICIES[policy](source)
    table = Table(pool)
    ptr = table.allocate(1000)
    assert table.record_stream(ptr, 7) == (OK, "")
    source.on("fence", 1, raises=RuntimeError("the device is gone"))
    assert table.free(ptr) == OK
    table.free(table.allocate(1000))
    pool.release_free_regions()
    assert allocated(pool) == 0
    assert source.counts["fence"] > 1
    assert all("the device is gone" in str(said.exc_value) for said in told)


def test_a_ctrl_c_during_a_free_is_raised_afterwards() -> None:
    source = Misbehaving("64 MiB", asynchronous=True)
    pool = bfc.BFCAllocator(source)
    table = Table(pool)
    ptr = table.allocate(1000)
    table.record_stream(ptr, 7)
    source.on("fence", 1, raises=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupted(table.free, ptr)
    pool.release_free_regions()
    assert allocated(pool) == 0


# -- failures --------------------------------------------------------------------------------------


def test_a_ctrl_c_in_a_miss_is_raised_where_python_goes_on(make: Make) -> None:
    source = Misbehaving(bfc.HostSubAllocator("64 MiB"))
    source.on("alloc", first=lambda: signal.raise_signal(signal.SIGINT))
    pool = make(source)
    table = Table(pool)
    with pytest.raises(KeyboardInterrupt):
        interrupted(table.try_allocate, 1000)
    assert allocated(pool) == 0
    pool.check()


def test_a_call_with_the_stack_full_fails_in_words(make: Make) -> None:
    pool = make(bfc.SimulatedSubAllocator("1 TiB"))
    table = Table(pool)
    found: list[tuple[int, str, int]] = []

    def deeper() -> None:
        found.append(table.try_allocate(3 * MIB))
        deeper()

    with pytest.raises((RecursionError, ctypes.ArgumentError)):
        deeper()
    assert found[0][0] == OK
    for result, why, ptr in found:
        if result == OK:
            table.free(ptr)
        else:
            assert "recursion" in why
    pool.check()
    assert allocated(pool) == 0


@pytest.mark.usefixtures("quiet_collector")
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("stream", [0, 7])
def test_a_host_without_memory_loses_no_allocation(
    make: Make, harness: Path, recorded: bool, stream: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda said: None)
    hooks = pytest.importorskip("_testcapi")
    remove = ctypes.py_object(hooks.remove_mem_hooks)
    library = ctypes.PyDLL(str(harness))
    allocate, free = library.harness_allocate_without_memory, library.harness_free_without_memory
    results = set()
    for n in range(60):
        pool = make(bfc.HostSubAllocator("64 MiB"))
        if recorded:
            pool.record_history()
        table = Table(pool)
        ptr, why = ctypes.c_void_p(), ctypes.create_string_buffer(4096)
        which = (ctypes.py_object(hooks.set_nomemory), ctypes.py_object((n, n + 1)), remove)
        size, room = ctypes.c_size_t(MIB), ctypes.c_size_t(4096)
        on = ctypes.c_int64(stream)
        place = ctypes.byref(ptr)
        results.add(allocate(table.address, *which, size, on, place, why, room))
        if ptr.value is None:
            assert b"memory" in why.value
            ptr.value = table.allocate(MIB, stream)
        assert free(table.address, *which, ptr) == OK
        pool.release_free_regions()  # makes what was left to a later call
        assert allocated(pool) == 0, f"n={n}"
        assert table.stats()["invalid_frees"] == 0
        pool.check()
    assert results == {OK, OUT_OF_MEMORY}


# -- closing, and other threads --------------------------------------------------------------------


def test_a_closed_pool_refuses_and_its_frees_do_nothing(pool: Any) -> None:
    table = Table(pool)
    ptr = table.allocate(1000)
    pool.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert table.free(ptr) == OK
    result, why, _ptr = table.try_allocate(1000)
    assert (result, why) == (FAILED, "this allocator is closed")
    assert table.device_of(ptr) == -1
    assert table.stats()["invalid_frees"] == 0


def test_one_pool_that_fails_keeps_no_other_from_being_emptied(make: Make) -> None:
    source = Misbehaving(bfc.HostSubAllocator("64 MiB"))
    source.on("free", raises=RuntimeError("it keeps what it gave"))
    first, second = make(source), make(bfc.HostSubAllocator("64 MiB"))
    table = Table(first, second)
    for device in (0, 1):
        table.free(table.allocate(1000, device=device))
    result, why = table.ask("empty")
    assert result == FAILED
    assert "it keeps what it gave" in why
    assert second.stats().pool_bytes == 0
    source.off()


@pytest.mark.parametrize("policy", POLICIES)
def test_threads_without_the_gil_beside_all_that_python_does(harness: Path, policy: str) -> None:
    pools = [POLICIES[policy](bfc.HostSubAllocator("256 MiB")) for _ in range(2)]
    table = Table(*pools)
    library = ctypes.CDLL(str(harness))
    library.harness_hammer.restype = ctypes.c_int64
    lost: list[int] = []
    hammer = partial(
        library.harness_hammer,
        *(table.address, 3, ctypes.c_int64(20_000), ctypes.c_uint64(7), ctypes.c_size_t(MIB)),
    )
    thread = threading.Thread(target=lambda: lost.append(hammer()))
    thread.start()
    rounds = 0
    while thread.is_alive() or rounds == 0:
        rounds += 1
        for device, pool in enumerate(pools):
            meddle(table, device, pool)
    waiting.joined(thread)
    assert lost == [0]
    for pool in pools:
        pool.check()
        pool.empty_cache()
        assert allocated(pool) == 0
    assert table.stats()["invalid_frees"] == 0


def meddle(table: Table, device: int, pool: Any) -> None:
    table.stats(device)
    pool.snapshot()
    table.ask("reset_peak_stats", device)
    table.ask("reset_accumulated_stats", device)
    with bfc.owner("meddler"):
        table.free(table.allocate(1000, 3 * device, device))
    ptr = table.allocate(5000, 0, device)
    table.record_stream(ptr, 7)
    table.free(ptr)
    if hasattr(pool, "set_settings"):
        pool.set_settings("roundup_power2_divisions:4")
        with bfc.use_mem_pool(bfc.MemPool(pool)):
            table.free(table.allocate(3000, 0, device))
        pool.set_settings("")
    pool.record_history()
    table.free(table.allocate(1000, 0, device))
    pool.history()
    pool.record_history(None)
    table.ask("empty")


# -- processes -------------------------------------------------------------------------------------

IN_A_PROCESS = f"""
sys.path.insert(0, {str(Path(torch_table.__file__).parent)!r})
import ctypes
from torch_table import *
"""


def test_scopes_that_were_entered_before_the_table_was_made_count() -> None:
    """Also those around the innermost one, once that is left."""
    run(
        IN_A_PROCESS
        + """
pool = bfc.CachingAllocator(bfc.HostSubAllocator("64 MiB"))
with bfc.owner("outer"):
    with bfc.owner("inner"):
        table = Table(pool)
        table.free(table.allocate(1000))     # from now on a free block serves it
        inner = table.allocate(1000)
        assert pool.stats().by_owner["inner"] > 0
        table.free(inner)
    outer = table.allocate(1000)
    assert pool.stats().by_owner["outer"] > 0
table.free(outer)
"""
    )


def test_a_fork_goes_on_with_memory_of_the_host() -> None:
    run(
        IN_A_PROCESS
        + """
pool = bfc.CachingAllocator(bfc.HostSubAllocator("64 MiB"))
table = Table(pool)
ptr = table.allocate(1000)

def child():
    assert table.free(ptr) == OK and pool.stats().bytes_in_use == 0
    table.free(table.allocate(3 << 20))
    assert table.ask("empty") == (OK, "")

in_child(child)()
assert table.free(ptr) == OK
"""
    )


def test_a_fork_refuses_memory_of_a_device_in_words() -> None:
    run(
        IN_A_PROCESS
        + """
from bfc.testing import Misbehaving

device = bfc.HostSubAllocator("1 MiB").device._replace(kind="opencl")
used, fresh = (Table(bfc.CachingAllocator(Misbehaving("64 MiB", device=device))) for _ in range(2))
ptr = used.allocate(1000)

def child():
    for table in (used, fresh):
        result, why, _ptr = table.try_allocate(1000)
        assert result == FAILED and "forked" in why and "spawn" in why, why
    assert used.free(ptr) == OK and used.stats()["allocation.all.current"] == 1
    for name, arguments in {
        "record_stream": (ptr, 7), "copy": (ptr, ptr, 8, 0), "empty": (),
        "memory_info": (0, ctypes.byref(ctypes.c_size_t()), ctypes.byref(ctypes.c_size_t())),
    }.items():
        result, why = used.ask(name, *arguments)
        assert result == FAILED and "forked" in why, (name, result, why)

in_child(child)()
used.free(used.allocate(1000))
"""
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", ["bfc", "caching"])
@pytest.mark.parametrize("most", [1 << 12, 1 << 22])
def test_threads_may_go_on_as_the_interpreter_ends(harness: Path, policy: str, most: int) -> None:
    """One that asks for the GIL then must not be unwound, which a destructor cannot be."""
    options = ", allow_growth=True" if policy == "bfc" else ""
    name = "BFCAllocator" if policy == "bfc" else "CachingAllocator"
    for _ in range(2):
        run(
            IN_A_PROCESS
            + f"""
pools = [bfc.{name}(bfc.HostSubAllocator("64 MiB"){options}) for _ in range(2)]
table = Table(*pools)
table.call("retain")
if {policy == "caching"}:
    pools[0].record_history(max_entries=100)
library = ctypes.CDLL({str(harness)!r})
library.harness_never_ends(table.address, 4, ctypes.c_size_t({most}))
while library.harness_rounds() < 1000:
    time.sleep(0.001)
"""
        )
