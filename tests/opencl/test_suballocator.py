"""OpenCL's own side of a source: residency, limits, alignment, queues, copies, and failures."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pocl
import pytest
from interrupts import struck

import bfc
from bfc.drivers.opencl import platform as _opencl
from bfc.drivers.opencl import queues as _queues
from bfc.suballocators import opencl as opencl_source
from bfc_tools.cli import main

MIB = 1 << 20
HOME = Path(bfc.__file__).parent.parent
NO_ROOM = (-4, -5, -6, -61)


def address_of(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(HOME), str(HOME / "tests" / "helpers")])
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"PYTHONPATH": path} | environment,
    )


# -- regions ---------------------------------------------------------------------------------------


def test_a_region_is_resident_before_alloc_returns(source, monkeypatch, cl) -> None:
    """Both calls, in their order: a migration that is only queued would fail later."""
    calls: list[str] = []
    name = "enqueue_svm_migrate_mem" if source.svm else "enqueue_migrate_mem_objects"
    migrate = getattr(cl, name)

    def noted(queue: Any, memory: list, flags: int) -> Any:
        assert flags == cl.mem_migration_flags.CONTENT_UNDEFINED
        calls.append("migrate")
        return migrate(queue, memory, flags)

    class Queue:
        def __init__(self, queue: Any) -> None:
            self.queue = queue

        def finish(self) -> None:
            calls.append("finish")
            self.queue.finish()

    own = source.queue
    monkeypatch.setattr(cl, name, lambda queue, *rest: noted(own, *rest))
    source.queue = Queue(own)
    block = source.alloc(256, MIB)
    assert calls == ["migrate", "finish"]
    source.free(*block)


def test_threads_take_turns_at_making_memory_resident(source, monkeypatch) -> None:
    """NVIDIA's driver crashes otherwise."""
    inside: list[int] = []
    seen: list[int] = []
    make_resident = source._make_resident

    def slow(memory: Any) -> None:
        inside.append(1)
        time.sleep(0.002)
        make_resident(memory)
        seen.append(len(inside))
        inside.pop()

    monkeypatch.setattr(source, "_make_resident", slow)
    blocks: list[tuple[int, int]] = []
    threads = [
        threading.Thread(target=lambda: blocks.append(source.alloc(256, 4096))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1] * 6
    for block in blocks:
        source.free(*block)


def test_an_alloc_that_raises_at_any_line_has_kept_nothing(source) -> None:
    line = 1
    while struck(line, source.alloc, 256, MIB):
        assert source.live_bytes == 0
        assert source._regions == ((), ())
        line += 1
    assert line > 10
    ((address,), _) = source._regions
    source.free(address, MIB)


def test_svm_is_made_resident_where_it_cannot_be_migrated(context, cl, monkeypatch) -> None:
    """OpenCL 2.0 has no such call: then it is filled."""
    monkeypatch.delattr(cl, "enqueue_svm_migrate_mem", raising=False)
    source = bfc.OpenCLSubAllocator(context, svm=True)
    address, received = source.alloc(256, MIB)
    array = np.ones(MIB, np.uint8)
    source.copy(address_of(array), address, MIB, 0)
    assert not array.any()
    source.free(address, received)


@pytest.mark.parametrize("code", NO_ROOM)
@pytest.mark.parametrize("call", ["make", "migrate"])
def test_a_full_device_shows_in_alloc_as_no_room(source, faulty, cl, call, code) -> None:
    names = ("SVMAllocation", "enqueue_svm_migrate_mem")
    if not source.svm:
        names = ("Buffer", "enqueue_migrate_mem_objects")
    name = names[call == "migrate"]
    faulty.fail(name, code)
    assert source.alloc(256, MIB) is None
    assert faulty.calls == [name]
    assert source.live_bytes == 0
    faulty.patch.undo()
    source.free(*source.alloc(256, MIB))


@pytest.mark.parametrize("call", ["make", "migrate"])
def test_what_else_fails_in_alloc_is_an_error_in_words(source, faulty, call) -> None:
    names = ("SVMAllocation", "enqueue_svm_migrate_mem")
    if not source.svm:
        names = ("Buffer", "enqueue_migrate_mem_objects")
    faulty.fail(names[call == "migrate"], -34)
    with pytest.raises(bfc.DriverError, match=r"1048576 bytes.*CL_INVALID_CONTEXT") as caught:
        source.alloc(256, MIB)
    assert caught.value.code == -34
    assert "make another" in str(caught.value)
    assert source.live_bytes == 0


@pytest.mark.parametrize("code", [-4, -34])
def test_memory_that_is_not_made_resident_goes_back_at_once(source, faulty, cl, code) -> None:
    """Not when the error that says so has gone."""
    released: list[Any] = []

    class Memory:
        svm_ptr = 1 << 20

        def release(self) -> None:
            released.append(self)

    faulty.patch.setattr(cl, "Buffer", lambda *_arguments: Memory())
    faulty.patch.setattr(cl, "SVMAllocation", lambda *_arguments: Memory())
    faulty.fail("enqueue_svm_migrate_mem" if source.svm else "enqueue_migrate_mem_objects", code)
    with contextlib.suppress(bfc.DriverError):
        assert source.alloc(256, MIB) is None
    assert len(released) == 1


def test_a_failing_free_leaves_the_block_live(source) -> None:
    block = source.alloc(256, MIB)
    region = source._region_at(block[0], 1)
    memory, region.memory = region.memory, Released()
    with pytest.raises(bfc.DriverError, match="CL_INVALID_MEM_OBJECT"):
        source.free(*block)
    assert source.live_bytes == MIB
    region.memory = memory
    source.free(*block)


class Released:
    """Memory that the driver does not take back."""

    def release(self) -> None:
        import pyopencl as cl

        raise cl.LogicError(cl._cl._ErrorRecord(msg="no", code=-38, routine="release"))


def test_a_finaliser_may_free_a_region_while_another_is_noted(context, interrupt) -> None:
    """An allocator in a cycle is closed wherever Python collects garbage, in the same thread."""
    call = bfc.OpenCLSubAllocator._change_regions
    for line in interrupt.lines_of(call)[:-2]:  # Python does nothing between "is" and a store
        source = bfc.OpenCLSubAllocator(context)
        old = source.alloc(256, 1000)
        with interrupt(call, line, lambda source=source, old=old: source.free(*old)):
            new = source.alloc(256, 2000)
        assert source.live_bytes == 2000
        assert source.locate(new[0])[1] == 0
        with pytest.raises(bfc.SubAllocatorError, match="lies in no region"):
            source.locate(old[0])
        source.free(*new)


def test_made_up_addresses_are_nobodys_else(context, cl) -> None:
    """Not the process's, not another source's, not those of a region that was given back."""
    sources = [bfc.OpenCLSubAllocator(context) for _ in range(2)]
    seen: list[tuple[int, int]] = []
    for _ in range(3):
        blocks = [(source, source.alloc(256, 1000)) for source in sources]
        seen += [block for _, block in blocks]
        for source, block in blocks:
            source.free(*block)
    assert min(address for address, _ in seen) >= 1 << 56, "no process has such addresses"
    seen.sort()
    assert all(a + size < b for (a, size), (b, _) in itertools.pairwise(seen))


def test_an_address_leads_to_buffer_and_offset(context, cl) -> None:
    source = bfc.OpenCLSubAllocator(context)
    address, received = source.alloc(256, MIB)
    other = source.alloc(256, MIB)
    memory, offset = source.locate(address + 5000)
    assert (memory.size, offset) == (MIB, 5000)
    assert source.locate(address)[0] is source.locate(address + MIB - 1)[0]
    assert source.locate(other[0])[0] is not memory
    part = source.sub_buffer(address + 4096, 100)
    assert (part.offset, part.size) == (4096, 100)
    for wrong in (0, address - 1, address + MIB, 1 << 63, -5):
        with pytest.raises(bfc.SubAllocatorError, match="lies in no region"):
            source.locate(wrong)
    with pytest.raises(bfc.SubAllocatorError, match="reach past the region's end"):
        source.sub_buffer(address + 4096, MIB)
    if not pocl.is_of_nvidia(context.devices[0]):
        with pytest.raises(bfc.DriverError, match=r"CL_MISALIGNED_SUB_BUFFER_OFFSET[^$]*alignment"):
            source.sub_buffer(address + 1, 100)
    source.free(address, received)
    source.free(*other)
    with pytest.raises(bfc.SubAllocatorError, match="lies in no region"):
        source.locate(address)


def test_svm_has_addresses_and_no_buffers(context) -> None:
    source = bfc.OpenCLSubAllocator(context, svm=True)
    block = source.alloc(256, MIB)
    assert block[0] < 1 << 56
    with pytest.raises(bfc.SubAllocatorError, match="real addresses"):
        source.locate(block[0])
    source.free(*block)


# -- limits and alignment --------------------------------------------------------------------------


def test_a_request_above_the_largest_allocation_says_what_is_the_largest(make, context) -> None:
    source = bfc.OpenCLSubAllocator(context)
    source.largest_block = 8 * MIB
    allocator = make(source, memory_limit="64 MiB")
    with pytest.raises(bfc.OutOfMemoryError) as caught:
        allocator.allocate(9 * MIB)
    assert "several smaller requests" in str(caught.value)
    assert "8.00 MiB (8388608 bytes)" in str(caught.value)
    buffers = [allocator.allocate(7 * MIB) for _ in range(3)]  # growth takes what it can get
    assert all(buffer.ptr for buffer in buffers)
    assert allocator.stats().peak_pool_bytes >= 21 * MIB


@pytest.mark.parametrize("svm", [False, True])
def test_the_largest_block_is_one_that_the_device_gives(context, cl, monkeypatch, svm) -> None:
    """SVM is asked for more than a block's size, to start where blocks start."""
    most = context.devices[0].max_mem_alloc_size
    name = "SVMAllocation" if svm else "Buffer"
    real = getattr(cl, name)
    asked: list[int] = []

    def small(context: Any, *rest: Any) -> Any:
        place = 0 if svm else 1  # (size, alignment, flags) or (flags, size)
        asked.append(rest[place])
        return real(context, *(256 if i == place else value for i, value in enumerate(rest)))

    monkeypatch.setattr(cl, name, small)
    source = bfc.OpenCLSubAllocator(context, svm=svm, capacity=most)
    block = source.alloc(256, source.largest_block)
    assert asked[0] == most
    assert source.alloc(256, source.largest_block + 1) is None
    source.free(*block)


@pytest.mark.parametrize("alignment", [256, 512, 4096, 1 << 20])
def test_svm_starts_at_the_alignment_and_ends_inside(context, cl, alignment) -> None:
    source = bfc.OpenCLSubAllocator(context, svm=True)
    blocks = [source.alloc(alignment, 1000) for _ in range(20)]
    for address, nbytes in blocks:
        region = source._region_at(address, nbytes)
        assert address % alignment == 0
        assert region.memory.svm_ptr <= address
        assert address + nbytes <= region.memory.svm_ptr + region.memory.size
    for block in blocks:
        source.free(*block)


def test_the_drivers_own_limit_is_no_room_at_once(source) -> None:
    source.total_bytes = 1 << 62
    assert source.alloc(256, source.largest_block + 1) is None
    source.largest_block = 1 << 61  # the driver is asked
    assert source.alloc(256, 1 << 60) is None
    assert source.live_bytes == 0


@pytest.fixture
def coarse(context, monkeypatch) -> bfc.OpenCLSubAllocator:
    """A device that wants sub-buffers to start at multiples of 4096 bytes."""
    monkeypatch.setattr(opencl_source, "_power_of_two", lambda _number: 4096)
    return bfc.OpenCLSubAllocator(context, capacity=64 * MIB)


def test_a_coarse_device_gets_every_block_at_its_alignment(make, coarse, dice) -> None:
    assert coarse.granularity == 4096
    allocator = make(coarse)
    live: list[int] = []
    for _ in range(500):
        if live and dice.random() < 0.4:
            allocator.deallocate_raw(live.pop(dice.randrange(len(live))))
        else:
            live.append(allocator.allocate_raw(dice.choice([1, 300, 5000, 70_000])))
            assert coarse.locate(live[-1])[1] % 4096 == 0
    allocator.check()
    assert all(chunk.ptr % 4096 == 0 for chunk in allocator.snapshot().live_chunks())
    op = [0] * 200
    sizes = [dice.randrange(1, 9000) for _ in op]
    replayed = bfc.Trace(op, range(200), sizes).replay(allocator)
    assert all(coarse.locate(int(address))[1] % 4096 == 0 for address in replayed.addresses)
    allocator.deallocate_many(replayed.addresses.tolist())
    allocator.deallocate_many(live)


@pytest.mark.parametrize("divisions", ["", "roundup_power2_divisions:8"])
def test_pytorchs_rounding_keeps_the_alignment_too(coarse, divisions) -> None:
    with bfc.CachingAllocator(coarse, settings=divisions) as allocator:
        for size in (1, 511, 513, 4095, 4097, 5000, 1_300_000, 9_000_001):
            block = allocator.allocated_size(allocator.allocate_raw(size))
            assert (block >= size, block % 4096) == (True, 0)


@pytest.mark.parametrize("granularity", [0, -256, 300, "256", None, 1 << 40])
def test_a_granularity_that_is_none_is_refused(simulated, granularity) -> None:
    device = simulated()
    device.granularity = granularity
    with pytest.raises(ValueError, match="power of two"):
        bfc.BFCAllocator(device)


# -- copies ----------------------------------------------------------------------------------------


def test_bytes_go_to_the_device_and_back(source, make, dice) -> None:
    allocator = make(source)
    values = np.frombuffer(dice.randbytes(100_003), np.uint8)
    buffers = [allocator.allocate(values.nbytes) for _ in range(2)]
    buffers[0].from_host(values)
    source.copy(buffers[1].ptr, buffers[0].ptr, values.nbytes, 0)
    assert (buffers[1].to_host() == values).all()
    part = np.zeros(1000, np.uint8)
    source.copy(address_of(part), buffers[1].ptr + 77, 1000, 0)
    assert (part == values[77:1077]).all()
    source.copy(0, 0, 0, 0)


def test_a_copy_is_behind_what_is_queued(source, make, cl, out_of_order, queue, hold) -> None:
    """Also on a queue that runs its work in any order."""
    for on in (queue, out_of_order):
        allocator = make(source)
        buffer = allocator.allocate(1000, on)
        with hold(on) as held:
            done = threading.Event()
            copying = threading.Thread(target=lambda b=buffer, d=done: (b.to_host(), d.set()))
            copying.start()
            assert not done.wait(0.05)
            held.let_go()
            copying.join()
            assert done.is_set()
        buffer.free()
        allocator.close()


def test_a_copy_on_an_unordered_queue_is_behind_kernels_that_wait_alone(
    make, cl, context, out_of_order
) -> None:
    """No barrier holds the queue: what writes the buffer waits, and another command need not."""
    allocator = make()
    buffer = allocator.allocate(1000, out_of_order).from_host(bytes(1000))
    memory, offset = allocator.sub_allocator.locate(buffer.ptr)
    gate = cl.UserEvent(context)
    cl.enqueue_fill_buffer(out_of_order, memory, np.uint8(7), offset, 1000, wait_for=[gate])
    out_of_order.flush()
    copied: list[bytes] = []
    thread = threading.Thread(target=lambda: copied.append(bytes(buffer.to_host())))
    thread.start()
    thread.join(0.1)
    assert copied == []
    gate.set_status(cl.command_execution_status.COMPLETE)
    thread.join()
    assert copied == [b"\7" * 1000]
    buffer.free()


def test_copies_of_foreign_memory_are_errors(source, context) -> None:
    other = bfc.OpenCLSubAllocator(context)
    theirs, ours = other.alloc(256, MIB), source.alloc(256, MIB)
    array = np.zeros(100, np.uint8)
    with pytest.raises(bfc.SubAllocatorError, match="lies in no region"):
        source.copy(address_of(array), theirs[0], 100, 0)
    with pytest.raises(bfc.SubAllocatorError, match="reach past the region's end"):
        source.copy(address_of(array), ours[0] + MIB - 50, 100, 0)
    with pytest.raises(bfc.SubAllocatorError, match="neither"):
        source.copy(address_of(array), address_of(array), 100, 0)
    source.free(*ours)
    other.free(*theirs)
    with pytest.raises(bfc.SubAllocatorError):
        source.copy(theirs[0], address_of(array), 100, 0)


# -- every call fails once -------------------------------------------------------------------------

CALLS = {
    "enqueue_marker": lambda source, queue, block: source.fence(queue.int_ptr),
    "enqueue_barrier": lambda source, queue, block: source.order(0, queue.int_ptr),
    "enqueue_copy": lambda source, queue, block: source.copy(
        block[0], address_of(np.zeros(100, np.uint8)), 100, 0
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("code", [-2, -5, -34, -36, -9999])
def test_a_failing_call_is_an_error_in_words(source, queue, faulty, name, code) -> None:
    block = source.alloc(256, MIB)
    source.is_ordered(queue.int_ptr)
    faulty.fail(name, code)
    with pytest.raises(bfc.SubAllocatorError) as caught:
        CALLS[name](source, queue, block)
    assert caught.value.code == code
    assert len(str(caught.value)) > 20
    faulty.patch.undo()
    source.free(*block)


@pytest.mark.parametrize("svm", [False, True])
def test_a_source_that_cannot_be_opened_says_why(context, faulty, svm) -> None:
    faulty.fail("CommandQueue", -2)
    with pytest.raises(bfc.DriverError, match="clCreateCommandQueue: CL_DEVICE_NOT_AVAILABLE"):
        bfc.OpenCLSubAllocator(context, svm=svm)


class Dead:
    """A queue that the driver has lost."""

    handle, is_ordered = 0, True
    queue = property(lambda self: self)

    def __init__(self, error: Exception) -> None:
        self.error = error

    def finish(self) -> None:
        raise self.error


def test_a_queue_that_does_not_finish_is_an_error_in_words(source, faulty) -> None:
    """SVM stays live then: work may still use it. A buffer goes by itself when its work ends."""
    block = source.alloc(256, MIB)
    error = faulty.cl.LogicError(faulty.error_record("clFinish", -36))
    source._queues._known[9] = Dead(error)
    with pytest.raises(bfc.DriverError, match="CL_INVALID_COMMAND_QUEUE"):
        source.synchronize()
    if source.svm:
        with pytest.raises(bfc.DriverError, match="CL_INVALID_COMMAND_QUEUE"):
            source.free(*block)
        assert source.live_bytes == MIB
    del source._queues._known[9]
    source.free(*block)


def test_a_fence_that_cannot_be_asked_keeps_the_memory(make, queue, faulty) -> None:
    allocator = make()
    kept = allocator.allocate_raw(1000)
    allocator.record_stream(kept, queue)
    faulty.fail("enqueue_marker", -36)
    with pytest.raises(bfc.DriverError, match="CL_INVALID_COMMAND_QUEUE"):
        allocator.deallocate_raw(kept)
    assert allocator.requested_size(kept) == 1000
    faulty.patch.undo()
    allocator.deallocate_raw(kept)
    allocator.sub_allocator.synchronize()
    allocator.release_free_regions()
    assert allocator.stats().bytes_in_use == 0


class EndedBadly:
    """An event whose command failed. PoCL itself ends the process over one."""

    command_execution_status = -5

    def __init__(self, error: Exception) -> None:
        self.error = error

    def wait(self) -> None:
        raise self.error


@pytest.mark.parametrize("ask", ["done", "wait"])
def test_an_event_that_ended_badly_has_ended(source, faulty, ask) -> None:
    error = faulty.cl.Error(faulty.error_record("clWaitForEvents", -14))
    fence = _queues.MarkerFence(source._home, source._queues.own, EndedBadly(error))
    assert getattr(fence, ask)() in (True, None)
    assert fence.done()


def test_a_wait_that_fails_is_an_error_in_words(source, faulty) -> None:
    error = faulty.cl.Error(faulty.error_record("clWaitForEvents", -2))
    fence = _queues.MarkerFence(source._home, source._queues.own, EndedBadly(error))
    with pytest.raises(bfc.DriverError, match="CL_DEVICE_NOT_AVAILABLE"):
        fence.wait()


# -- what is not there -----------------------------------------------------------------------------


def test_without_pyopencl_it_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    for call in (bfc.OpenCLSubAllocator, bfc.opencl.DeviceAllocator().allocator):
        with pytest.raises(bfc.DeviceUnavailableError, match=r"bfc-allocator\[opencl\]"):
            call()
    usable = bfc.opencl.is_available()
    assert not usable
    assert "pip install" in str(usable)
    assert bfc.opencl.device_count() == 0


def test_without_a_driver_it_says_where_to_get_one(cl) -> None:
    code = "import bfc; print(bfc.opencl.is_available(), bfc.opencl.device_count())"
    run = run_python(code, OCL_ICD_VENDORS="/nonexistent", OCL_ICD_FILENAMES="")
    assert run.returncode == 0, run.stderr
    assert "pip install pocl-binary-distribution" in run.stdout
    assert run.stdout.rstrip().endswith("0")


class Silent:
    """A device that answers no question."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getattr__(self, _name: str) -> Any:
        raise self.error


def test_a_device_that_does_not_answer_hides_no_other(cl, faulty, monkeypatch, capsys) -> None:
    silent = Silent(cl.Error(faulty.error_record("clGetDeviceInfo", -2)))
    monkeypatch.setattr(_opencl, "devices", lambda: [silent, pocl.devices()[0]])
    usable = bfc.opencl.is_available()
    assert usable
    assert "2 devices, the first does not tell its name" in str(usable)
    assert main(["devices"]) == 0
    printed = capsys.readouterr().out
    assert "opencl:0  cannot be asked: clGetDeviceInfo failed: DEVICE_NOT_AVAILABLE" in printed
    assert f"opencl:1  {pocl.devices()[0].name}" in printed


def test_a_part_of_a_part_of_a_device_counts_as_the_device(cl, monkeypatch) -> None:
    class Part:
        def __init__(self, whole: Part | None) -> None:
            self.parent_device = whole

    listed = [Part(None), Part(None)]
    monkeypatch.setattr(_opencl, "devices", lambda: listed)
    half = Part(listed[1])
    for device in (listed[1], half, Part(half)):
        assert _opencl.ordinal_of(device) == 1
    assert _opencl.ordinal_of(Part(None)) == 0


def test_odd_arguments_are_refused(context, cl, monkeypatch) -> None:
    with pytest.raises(TypeError, match=r"pyopencl\.Context"):
        bfc.OpenCLSubAllocator("gpu")
    for wrong in (-1, 99):
        with pytest.raises(bfc.DeviceUnavailableError, match="counted from 0"):
            bfc.OpenCLSubAllocator(index=wrong)
    for wrong in ("0", 1.0):
        with pytest.raises(TypeError, match="integer"):
            bfc.OpenCLSubAllocator(index=wrong)
    with pytest.raises(ValueError, match="size"):
        bfc.OpenCLSubAllocator(context, capacity="plenty")
    monkeypatch.setattr(cl.device_svm_capabilities, "COARSE_GRAIN_BUFFER", 0)
    with pytest.raises(bfc.DeviceUnavailableError, match="svm=False"):
        bfc.OpenCLSubAllocator(context, svm=True)


def test_whoever_names_no_context_shares_one(cl) -> None:
    first, second = bfc.OpenCLSubAllocator(), bfc.OpenCLSubAllocator()
    assert first.context == second.context
    assert first.queue != second.queue


@pytest.mark.long
def test_a_process_ends_well_with_memory_live(cl) -> None:
    run = run_python(
        "import bfc, pyopencl.array, numpy as np\n"
        "for svm in (False, True):\n"
        "    source = bfc.OpenCLSubAllocator(svm=svm)\n"
        "    a = bfc.CachingAllocator(source)\n"
        "    make = bfc.integrations.pyopencl.allocator(a)\n"
        "    array = pyopencl.array.to_device(source.queue, np.arange(9), allocator=make)\n"
        "    buffer, raw = a.allocate(1000), a.allocate_raw(1000)\n"
        "    globals()[f'kept{svm}'] = [source, a, make, array, buffer]\n"
        "print('end')"
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "end\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_in_a_forked_child_freeing_does_nothing_and_the_rest_says_why(cl) -> None:
    run = run_python(
        "import os, bfc\n"
        "a = bfc.BFCAllocator(bfc.OpenCLSubAllocator(capacity='64 MiB'))\n"
        "b = a.allocate(1000)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    b.free()\n"
        "    try:\n"
        "        a.allocate(1000).to_host()\n"
        "    except bfc.SubAllocatorError as error:\n"
        "        print('spawn' in str(error), flush=True)\n"
        "    a.close()\n"
        "    os._exit(0)\n"
        "print(os.waitpid(child, 0)[1], flush=True)\n"
    )
    assert (run.returncode, run.stdout) == (0, "True\n0\n"), run.stderr


FORKED = """
import os, signal, threading
import bfc
memory = bfc.opencl.DeviceAllocator(memory_limit="64 MiB")
unused = bfc.opencl.DeviceAllocator()
handle = memory.allocate(1000)
source = memory.allocator().sub_allocator
locks = memory._lock, memory._places[0].lock, source._lock
taken, go = threading.Event(), threading.Event()

def hold():
    with locks[0], locks[1], locks[2]:
        taken.set()
        go.wait()

threading.Thread(target=hold).start()
taken.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)
    for call in (bfc.OpenCLSubAllocator, unused.allocator):
        try:
            call()
        except bfc.DeviceUnavailableError as error:
            print("spawn" in str(error), flush=True)
    print(bool(bfc.opencl.is_available()), bfc.opencl.device_count(), flush=True)
    memory.raw_delete(handle)
    print(memory.device_stats().frees, flush=True)
    memory.close()
    os._exit(0)
status = os.waitpid(child, 0)[1]
go.set()
print(status, flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_waits_for_no_thread_of_its_parents(cl) -> None:
    """Not for one that had a lock, and not for the driver's, which would run its queues."""
    run = run_python(FORKED)
    assert (run.returncode, run.stdout) == (0, "True\nTrue\nFalse 0\n1\n0\n"), run.stderr


FORKED_AMID_COPIES = """
import os, signal
import numpy, pyopencl, pyopencl.array
import bfc
context = pyopencl.Context(pyopencl.get_platforms()[0].get_devices()[:1])
array = pyopencl.array.zeros(pyopencl.CommandQueue(context), 8, "f4")
bfc.copy(array, numpy.arange(8))
pinned = bfc.PinnedAllocator(bfc.HostSubAllocator("1 MiB"))
buffer = pinned.allocate(32)
bfc.copy(array, buffer.view("f4"), non_blocking=True)
bfc.copy(array, numpy.arange(8))
child = os.fork()
if child == 0:
    signal.alarm(30)
    address = buffer.ptr
    buffer.free()
    assert pinned.allocate(32).ptr == address
    pinned.close()
    for ends in ((array, numpy.zeros(8)), (numpy.zeros(8), array), (array, array[::-1])):
        for options in ({}, {"non_blocking": True}, {"stream": array.queue}):
            try:
                bfc.copy(*ends, **options)
            except bfc.DeviceUnavailableError as error:
                assert "spawn" in str(error), error
            else:
                print(ends, options, flush=True)
    print(bfc.copy(numpy.zeros(2), [1, 2]), flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1], array.get()[-1], flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_copy_in_a_forked_child_is_told_and_waits_for_no_queue(cl) -> None:
    run = run_python(FORKED_AMID_COPIES)
    assert (run.returncode, run.stdout) == (0, "[1. 2.]\n0 7.0\n"), run.stderr


def test_the_interpreter_ends_once_transfers_are_done(cl) -> None:
    """Their memory would go before."""
    run = run_python(
        "import bfc, numpy, pyopencl, pyopencl.array\n"
        "queue = pyopencl.CommandQueue(bfc.OpenCLSubAllocator().context)\n"
        "there = pyopencl.array.empty(queue, 1 << 25, 'u1')\n"
        "pinned = bfc.PinnedAllocator(bfc.HostSubAllocator('64 MiB'))\n"
        "sides = numpy.ones(1 << 25, 'u1'), pinned.allocate(1 << 25)\n"
        "for number in range(100):\n"
        "    pyopencl.enqueue_fill(queue, there.base_data, numpy.uint8(number), 1 << 25)\n"
        "for side in sides:\n"
        "    bfc.copy(side, there, non_blocking=True)\n"
        "print('end')"
    )
    assert (run.returncode, run.stdout) == (0, "end\n"), run.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_ends_while_its_parents_transfers_are_queued(cl) -> None:
    run = run_python(
        "import bfc, numpy, os, pyopencl, pyopencl.array, signal, sys\n"
        "queue = pyopencl.CommandQueue(bfc.OpenCLSubAllocator().context)\n"
        "there = pyopencl.array.zeros(queue, 64, 'u1')\n"
        "gate = pyopencl.UserEvent(queue.context)\n"
        "pyopencl.enqueue_barrier(queue, wait_for=[gate])\n"
        "bfc.copy(numpy.zeros(64, 'u1'), there, non_blocking=True)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(20)\n"
        "    sys.exit()\n"
        "print(os.waitpid(child, 0)[1])\n"
        "gate.set_status(pyopencl.command_execution_status.COMPLETE)\n"
    )
    assert (run.returncode, run.stdout) == (0, "0\n"), run.stderr


def test_handles_freed_while_the_interpreter_ends_ask_no_driver(cl) -> None:
    run = run_python(
        "import builtins, bfc, pyopencl\n"
        "memory = bfc.opencl.DeviceAllocator(memory_limit='64 MiB')\n"
        "class Tensor:\n"
        "    def __init__(self):\n"
        "        self.handle, self.delete = memory.allocate(1000), memory.raw_deleter()\n"
        "        queue = pyopencl.CommandQueue(memory.allocator().sub_allocator.context)\n"
        "        memory.record_stream(self.handle, queue)\n"
        "    def __del__(self):\n"
        "        self.delete(self.handle)\n"
        "kept = builtins.kept = [Tensor() for _ in range(3)]\n"
        "kept.append(kept)\n"
        "print('end')"
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "end\n", "")


@pytest.mark.long
def test_handles_freed_as_the_interpreter_ends_can_be_allocated_again(cl) -> None:
    """`raw_delete` did nothing once the functions of `atexit` ran, and memory ran out."""
    run = run_python(
        "import atexit\n"
        "@atexit.register\n"  # it runs after all that bfc registers
        "def allocate_and_free():\n"
        "    for _ in range(100):\n"
        "        memory.raw_delete(memory.allocate(3 << 20))\n"
        "import bfc\n"
        "memory = bfc.opencl.DeviceAllocator(memory_limit='64 MiB')\n"
        "print('end')"
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "end\n", "")


def test_every_device_is_counted_and_has_memory_of_its_own(cl) -> None:
    run = run_python(
        "import pocl; n = len(pocl.devices())  # two of each driver that is installed\n"
        "import bfc\n"
        "assert bfc.opencl.device_count() == n >= 2, bfc.opencl.is_available()\n"
        "sources = [bfc.OpenCLSubAllocator(index=i, capacity='64 MiB') for i in range(n)]\n"
        "assert [s.device.ordinal for s in sources] == list(range(n))\n"
        "assert sources[0].context != sources[1].context\n"
        "m = bfc.opencl.DeviceAllocator(memory_limit='64 MiB')\n"
        "handles = [m.allocate(1000, i) for i in range(n)]\n"
        "assert [m.device_of(h) for h in handles] == list(range(n))\n"
        "m.close()\n"
        "print('end')",
        POCL_DEVICES="pthread pthread",
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "end\n", "")


def test_random_blocks_keep_their_bytes(source, make) -> None:
    """Every block is filled, and read back when it is freed: none may lie under another."""
    seed = random.randrange(1 << 32)
    dice = random.Random(seed)
    allocator = make(source)
    live: list[tuple[bfc.Buffer, bytes]] = []
    for _ in range(300):
        if live and dice.random() < 0.45:
            buffer, expected = live.pop(dice.randrange(len(live)))
            assert bytes(buffer.to_host()) == expected, f"random.Random({seed})"
            buffer.free()
        else:
            content = dice.randbytes(dice.choice([1, 100, 5000, 200_000]))
            live.append((allocator.allocate(len(content)).from_host(content), content))
    for buffer, expected in live:
        assert bytes(buffer.to_host()) == expected, f"random.Random({seed})"
        buffer.free()


def test_what_is_no_size_is_an_error_and_counts_nothing(source) -> None:
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="1 byte or more"):
            source.alloc(256, wrong)
    with pytest.raises(TypeError):
        source.alloc(256, 1.5)
    assert source.live_bytes == 0
