"""What a framework's OpenCL back end asks for, on both policies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from waiting import joined

import bfc
from bfc.opencl import DeviceAllocator, DeviceStats
from bfc.policies import device_allocator

MIB = 1 << 20


@pytest.fixture(params=["caching", "bfc"])
def memory(request: pytest.FixtureRequest, cl: Any, context: Any) -> Iterator[DeviceAllocator]:
    """Of two devices: the halves of one, or the same one twice."""
    whole = context.devices[0]
    try:
        parts = whole.create_sub_devices([cl.device_partition_property.EQUALLY, 1])[:2]
    except cl.Error:
        parts = [whole]
    devices = (parts * 2)[:2]
    options = {"allow_growth": True} if request.param == "bfc" else {}
    with DeviceAllocator(
        request.param, devices=devices, memory_limit="64 MiB", **options
    ) as memory:
        yield memory
        for device in range(memory.device_count()):
            memory.allocator(device).check()


def write(memory: DeviceAllocator, handle: int, content: bytes) -> None:
    import pyopencl as cl

    region, offset = memory.locate(handle)
    queue = memory.allocator(memory.device_of(handle)).sub_allocator.queue
    cl.enqueue_copy(queue, region, np.frombuffer(content, np.uint8), dst_offset=offset)


def content(memory: DeviceAllocator, handle: int, nbytes: int) -> bytes:
    import pyopencl as cl

    out = np.empty(nbytes, np.uint8)
    queue = memory.allocator(memory.device_of(handle)).sub_allocator.queue
    cl.enqueue_copy(queue, out, memory.mem(handle))
    return out.tobytes()


def test_nothing_is_opened_before_it_is_used(memory) -> None:
    assert memory.initialized()
    assert memory.device_count() == 2
    assert "0 device(s) in use" in repr(memory)
    assert memory.device_stats(1) == DeviceStats()
    assert memory.empty_cache() == 0
    assert "0 device(s) in use" in repr(memory)
    memory.raw_delete(memory.allocate(100, 1))
    assert "1 device(s) in use" in repr(memory)


def test_zero_bytes_are_an_empty_handle_and_count_nothing(memory) -> None:
    assert memory.allocate(0) == 0
    memory.raw_delete(0)
    memory.raw_deleter()(0)
    memory.record_stream(0, 0)
    assert memory.device_stats() == DeviceStats()


def test_the_deleter_takes_the_handle_alone(memory) -> None:
    handles = [memory.allocate(1000, device) for device in (0, 1, 0, 1)]
    assert len(set(handles)) == 4
    assert [memory.device_of(handle) for handle in handles] == [0, 1, 0, 1]
    assert [memory.allocator(i).device.ordinal for i in (0, 1)] == [0, 1]
    assert [memory.mem(handle).size for handle in handles] == [1000] * 4, "not all of its block"
    delete = memory.raw_deleter()
    assert delete is memory.raw_deleter()
    for handle in handles:
        delete(handle)
    for device in (0, 1):
        stats = memory.device_stats(device)
        assert (stats.allocations, stats.frees, stats.current_bytes) == (2, 2, 0)


def test_data_is_copied_when_it_returns(memory) -> None:
    first, second = memory.allocate(5000), memory.allocate(6000)
    expected = bytes(range(250)) * 20
    write(memory, first, expected)
    memory.copy_data(second, first, 5000)
    assert content(memory, second, 5000) == expected
    memory.copy_data(second, second, 5000)
    memory.copy_data(second, first, 0)
    for nbytes in (5001, -1):
        with pytest.raises(ValueError, match="cannot be copied"):
            memory.copy_data(second, first, nbytes)
    elsewhere = memory.allocate(5000, 1)
    with pytest.raises(ValueError, match="devices 1 and 0"):
        memory.copy_data(elsewhere, first, 100)
    empty = memory.allocate(0)
    for ends in ((empty, empty), (empty, first), (first, empty)):
        memory.copy_data(*ends, 0)
        with pytest.raises(ValueError, match="handle 0 has none"):
            memory.copy_data(*ends, 1)
    memory.raw_delete(first)
    with pytest.raises(bfc.InvalidPointerError):
        memory.copy_data(second, first, 10)


def test_a_copy_is_behind_both_handles_queues(memory, cl, hold) -> None:
    memory.raw_delete(memory.allocate(1))
    where = memory.allocator().sub_allocator.context
    queues = [cl.CommandQueue(where) for _ in range(2)]
    for held_one in queues:
        handles = [memory.allocate(1000, 0, queue) for queue in queues]
        with hold(held_one) as held:
            done = threading.Event()

            def copy(to: int = handles[0], start: int = handles[1], done: Any = done) -> None:
                memory.copy_data(to, start, 1000)
                done.set()

            thread = threading.Thread(target=copy)
            thread.start()
            assert not done.wait(0.05)
            held.let_go()
            thread.join()
            assert done.is_set()
        for handle in handles:
            memory.raw_delete(handle)


def test_the_counts_are_exact_and_the_resets_independent(memory) -> None:
    kept = memory.allocate(1000)
    block = memory.allocator().allocated_size(kept)
    memory.raw_delete(memory.allocate(1000))
    with pytest.raises(bfc.OutOfMemoryError):
        memory.allocate(65 * MIB)
    with pytest.raises(TypeError):
        memory.allocate("lots")
    stats = memory.device_stats()
    assert (stats.current_bytes, stats.peak_bytes) == (block, 2 * block)
    assert (stats.allocations, stats.frees, stats.failures) == (2, 1, 1)
    assert (stats.allocated_bytes, stats.freed_bytes) == (2 * block, block)
    assert stats.reserved_bytes == memory.allocator().sub_allocator.live_bytes
    memory.reset_accumulated_stats()
    assert memory.allocator().stats().num_allocs == 0, "the pool's own start again, too"
    stats = memory.device_stats()
    assert (stats.allocations, stats.frees, stats.failures, stats.allocated_bytes) == (0, 0, 0, 0)
    assert (stats.current_bytes, stats.peak_bytes) == (block, 2 * block)
    memory.raw_delete(memory.allocate(1000))
    memory.reset_peak_stats()
    stats = memory.device_stats()
    assert (stats.current_bytes, stats.peak_bytes) == (block, block)
    assert (stats.allocations, stats.frees) == (1, 1)
    assert memory.device_stats(1) == DeviceStats()
    memory.raw_delete(kept)
    assert memory.empty_cache() == stats.reserved_bytes
    assert memory.device_stats().reserved_bytes == 0


class Counts:
    """What a device's statistics must say, by the plainest sums over all that ever happened."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.history = [0]  # current bytes, from the last reset of the peak
        self.allocated: list[int] = []
        self.freed: list[int] = []
        self.reserved = [0]
        self.failures = 0

    def note(self, pool: bfc.Allocator | None) -> None:
        self.history.append(sum(self.live.values()))
        self.reserved.append(pool.sub_allocator.live_bytes if pool else 0)

    def expected(self) -> DeviceStats:
        return DeviceStats(
            sum(self.live.values()),
            max(self.history),
            self.reserved[-1],
            max(self.reserved),
            len(self.allocated),
            len(self.freed),
            self.failures,
            sum(self.allocated),
            sum(self.freed),
        )


def test_random_use_counts_as_the_plainest_sums_do(memory, dice, cl) -> None:
    """Two devices; some blocks are used by a second queue, and some frees have to wait for it."""
    models = [Counts(), Counts()]
    opened = [False, False]
    for _ in range(1500):
        device = dice.randrange(2)
        model, action = models[device], dice.random()
        if action < 0.45:
            size = dice.choice([0, 1, 256, 1000, 70_000, 5 * MIB, 90 * MIB])
            opened[device] = True
            try:
                handle = memory.allocate(size, device)
            except bfc.OutOfMemoryError:
                model.failures += 1
                handle = 0
            if handle:
                model.live[handle] = memory.allocator(device).allocated_size(handle)
                model.allocated.append(model.live[handle])
        elif action < 0.85 and model.live:
            handle = dice.choice(list(model.live))
            if dice.random() < 0.2:
                source = memory.allocator(device).sub_allocator
                memory.record_stream(handle, cl.CommandQueue(source.context))
            memory.raw_delete(handle)
            model.freed.append(model.live.pop(handle))
        elif action < 0.90:
            with pytest.raises(bfc.InvalidPointerError):
                memory.raw_delete(dice.randrange(1, 1 << 62) | 1)
        elif action < 0.93:
            memory.reset_accumulated_stats(device)
            model.allocated, model.freed, model.failures = [], [], 0
        elif action < 0.96:
            memory.reset_peak_stats(device)
            model.history, model.reserved = [], []
        elif opened[device]:
            memory.empty_cache(device)
        model.note(memory.allocator(device) if opened[device] else None)
        assert [memory.device_stats(i) for i in (0, 1)] == [model.expected() for model in models]


def test_a_failure_is_the_devices_and_no_wrong_argument(memory, cl, faulty) -> None:
    """The first allocation opens the device, which may fail, too."""
    faulty.fail("CommandQueue", -6)
    with pytest.raises(bfc.DriverError, match="CL_OUT_OF_HOST_MEMORY"):
        memory.allocate(1000)
    assert memory.device_stats().failures == 1
    faulty.patch.undo()
    faulty.fail("Buffer", -34)
    with pytest.raises(bfc.DriverError, match="CL_INVALID_CONTEXT"):
        memory.allocate(1000)
    faulty.patch.undo()
    with pytest.raises(bfc.OutOfMemoryError):
        memory.allocate(65 * MIB)
    assert memory.device_stats().failures == 3
    faulty.patch.setattr(memory.allocator().sub_allocator, "alloc", lambda *_arguments: 1 / 0)
    with pytest.raises(bfc.SubAllocatorError, match="ZeroDivisionError"):
        memory.allocate(1000)
    faulty.patch.undo()
    foreign = cl.CommandQueue(cl.Context(memory.allocator().sub_allocator.context.devices))
    for wrong in ((-1, 0), ("lots", 0), (1000, 0, 7), (1000, 0, foreign), (1000, 0, "queue")):
        with pytest.raises((ValueError, TypeError, bfc.SubAllocatorError)):
            memory.allocate(*wrong)
    assert memory.device_stats() == DeviceStats(
        failures=4,
        reserved_bytes=memory.allocator().stats().pool_bytes,
        peak_reserved_bytes=memory.allocator().stats().pool_bytes,
    )


def test_a_recorded_queue_is_waited_for_and_the_same_one_is_not(memory, cl, hold) -> None:
    handle = memory.allocate(1000)
    source = memory.allocator().sub_allocator
    other = cl.CommandQueue(source.context)
    with hold(other) as held:
        memory.record_stream(handle, other)
        memory.raw_delete(handle)
        assert memory.device_stats().current_bytes == 0
        second = memory.allocate(1000)
        assert second != handle
        held.let_go()
        other.finish()
        assert memory.allocate(1000) == handle
    with pytest.raises(bfc.SubAllocatorError, match="not a command queue"):
        memory.record_stream(second, 7)
    memory.record_stream(second, source.queue)
    memory.raw_delete(second)
    assert memory.allocate(1000) == second


def test_an_unordered_queue_is_respected(memory, cl, hold) -> None:
    memory.raw_delete(memory.allocate(1))
    where = memory.allocator().sub_allocator.context
    properties = cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE
    unordered = cl.CommandQueue(where, properties=properties)
    handle = memory.allocate(1000, 0, unordered)
    with hold(unordered) as held:
        memory.raw_delete(handle)
        assert memory.allocate(1000, 0, unordered) != handle
        held.let_go()
        unordered.finish()
        assert memory.allocate(1000, 0, unordered) == handle


@pytest.mark.parametrize("policy", ["caching", "bfc"])
def test_who_names_no_queue_gets_the_pools(policy, context, queue, hold) -> None:
    with DeviceAllocator(policy, devices=[context], memory_limit="64 MiB", stream=queue) as memory:
        handle = memory.allocate(1000)
        live = memory.allocator().snapshot().live_chunks()
        assert [chunk.stream for chunk in live] == [queue.int_ptr]
        with hold(memory.allocator().sub_allocator.queue):
            memory.raw_delete(handle)
            assert memory.allocate(1000) == handle, "it waits for a queue that was not named"


def test_who_names_no_queue_gets_that_of_the_scope(memory, cl, hold) -> None:
    memory.raw_delete(memory.allocate(1))
    other = cl.CommandQueue(memory.allocator().sub_allocator.context)
    with bfc.use_stream(other):
        handle = memory.allocate(1000)
    with hold(other):
        memory.raw_delete(handle)
        assert memory.allocate(1000) != handle, "its queue has not finished"


def test_what_is_no_handle_is_an_error(memory) -> None:
    handle = memory.allocate(1000)
    for wrong in (handle + 1, handle + 256, -1, 7, "handle", None):
        for call in (memory.raw_delete, memory.locate, memory.mem, memory.device_of):
            with pytest.raises(bfc.InvalidPointerError):
                call(wrong)
    memory.raw_delete(handle)
    for call in (memory.raw_delete, memory.locate, memory.mem):
        with pytest.raises(bfc.InvalidPointerError):
            call(handle)
    assert memory.device_stats().frees == 1
    for device in (-1, 2):
        with pytest.raises(bfc.DeviceUnavailableError, match="counted from 0"):
            memory.allocate(10, device)


def test_a_free_that_the_driver_fails_leaves_the_handle_live(memory, cl, monkeypatch) -> None:
    handle = memory.allocate(1000)
    other = cl.CommandQueue(memory.allocator().sub_allocator.context)
    memory.record_stream(handle, other)
    record = cl._cl._ErrorRecord(msg="told to", code=-36, routine="clEnqueueMarker")

    def fails(*_arguments: Any) -> None:
        raise cl.LogicError(record)

    monkeypatch.setattr(cl, "enqueue_marker", fails)
    with pytest.raises(bfc.DriverError, match="CL_INVALID_COMMAND_QUEUE"):
        memory.raw_delete(handle)
    stats = memory.device_stats()
    assert (stats.frees, stats.current_bytes > 0) == (0, True)
    monkeypatch.undo()
    memory.raw_delete(handle)
    assert memory.device_stats().frees == 1


@pytest.mark.parametrize("name", ["count_allocation", "count_free", "count_failure", "stats"])
def test_a_finaliser_may_free_a_handle_wherever_something_is_counted(memory, interrupt, name):
    """A garbage collection runs it in the same thread."""
    counting = getattr(device_allocator._Place, name)
    faults: list[BaseException] = []

    def use() -> None:
        memory.raw_delete(memory.allocate(1000))
        with pytest.raises(bfc.OutOfMemoryError):
            memory.allocate(1 << 40)
        memory.device_stats()

    def count() -> None:
        for number, line in enumerate(interrupt.lines_of(counting), 1):
            other = memory.allocate(1000)
            try:
                with interrupt(counting, line, lambda other=other: memory.raw_delete(other)):
                    use()
            except BaseException as error:
                faults.append(error)
            stats = memory.device_stats()
            expected = (2 * number, 2 * number, number, 0)
            found = (stats.allocations, stats.frees, stats.failures, stats.current_bytes)
            assert found == expected, (name, line)

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    joined(thread)
    assert not faults


def test_threads_count_exactly(memory) -> None:
    def work() -> None:
        for _ in range(200):
            memory.raw_delete(memory.allocate(1000, 1))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = memory.device_stats(1)
    assert (stats.allocations, stats.frees, stats.current_bytes) == (1600, 1600, 0)


def test_closed_is_closed(memory) -> None:
    memory.allocate(1000)
    memory.allocate(1000, 1)
    pools = [memory.allocator(device) for device in (0, 1)]
    memory.close()
    memory.close()
    assert not memory.initialized()
    assert all(pool.sub_allocator.live_bytes == 0 for pool in pools)
    for device in (0, 1):
        stats = memory.device_stats(device)
        assert (stats.current_bytes, stats.reserved_bytes, stats.allocations) == (0, 0, 1)
    with pytest.raises(bfc.ClosedError):
        memory.allocate(10)


def test_a_device_that_fails_to_close_keeps_no_other_open(memory, monkeypatch) -> None:
    handles = [memory.allocate(1000, device) for device in (0, 1)]
    sources = [memory.allocator(device).sub_allocator for device in (0, 1)]

    def fails(*_block: int) -> None:
        raise bfc.SubAllocatorError("the device does not answer")

    monkeypatch.setattr(sources[0], "free", fails)
    with pytest.raises(bfc.SubAllocatorError, match="does not answer"):
        memory.close()
    assert [source.live_bytes > 0 for source in sources] == [True, False]
    with pytest.raises(bfc.InvalidPointerError):
        memory.raw_delete(handles[1])
    monkeypatch.undo()
    memory.close()
    assert sources[0].live_bytes == 0


def test_memory_that_another_object_views_stays(memory) -> None:
    handles = [memory.allocate(1000, device) for device in (0, 1)]
    view = memory.allocator(0).allocate(1000).__dlpack__()
    with pytest.raises(BufferError, match="view"):
        memory.close()
    assert memory.device_stats(0).current_bytes > 0
    assert memory.device_stats(1).current_bytes == 0
    memory.raw_delete(handles[0])
    del view
    memory.close()


def test_options_that_are_none_are_refused(cl) -> None:
    with pytest.raises(ValueError, match="policy"):
        DeviceAllocator("best")
    with pytest.raises(ValueError, match="caching"):
        DeviceAllocator("bfc", settings="max_split_size_mb:64")
    with pytest.raises(TypeError, match=r"pyopencl\.Device"):
        DeviceAllocator(devices=[0])
    with pytest.raises(bfc.SettingsError):
        DeviceAllocator(settings="nonsense:1").allocate(10)


def test_svm_handles_are_addresses(cl, context) -> None:
    with DeviceAllocator(svm=True, devices=[context]) as memory:
        first, second = memory.allocate(1000), memory.allocate(1000)
        memory.copy_data(second, first, 1000)
        with pytest.raises(bfc.SubAllocatorError, match="real addresses"):
            memory.locate(first)


def test_options_of_the_wrong_kind_are_errors_in_words(context) -> None:
    with pytest.raises(ValueError, match=r"policy is 'caching' or 'bfc', not \['bfc'\]"):
        DeviceAllocator(["bfc"])
    for single in (context, context.devices[0]):
        with pytest.raises(TypeError, match=f"a list .* not one {type(single).__name__}"):
            DeviceAllocator(devices=single)
