"""Queues as streams: which there are, what they wait for, and what is none."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import pocl
import pytest
from waiting import DEADLINE

import bfc
from bfc.drivers.opencl import queues as _queues


def test_a_fence_is_done_when_what_was_queued_has_finished(source, queue, hold) -> None:
    with hold(queue) as held:
        fence = source.fence(queue.int_ptr)
        other = source.fence(0)
        other.wait()
        assert (fence.done(), other.done()) == (False, True)
        held.let_go()
        fence.wait()
        assert fence.done()
        assert fence.done()


class Watched:
    """A queue that notes what it is told, in one list with what is queued there."""

    def __init__(self, queue: Any, calls: list[str]) -> None:
        self.queue, self.calls = queue, calls

    def flush(self) -> None:
        self.calls.append("flush")
        self.queue.flush()


def test_what_another_queue_or_the_host_waits_for_is_submitted(
    source, queue, cl, monkeypatch
) -> None:
    """OpenCL may keep commands until a flush, and a wait on another queue is none. PoCL does not,
    so the calls are looked at."""
    calls: list[str] = []

    def noted(name: str) -> Any:
        real = getattr(cl, name)

        def call(queue: Any, **options: Any) -> Any:
            calls.append(name)
            return real(getattr(queue, "queue", queue), **options)

        return call

    monkeypatch.setattr(cl, "enqueue_marker", noted("enqueue_marker"))
    monkeypatch.setattr(cl, "enqueue_barrier", noted("enqueue_barrier"))
    source.is_ordered(queue.int_ptr)
    known = source._queues._known[queue.int_ptr]
    real, known.queue = known.queue, Watched(queue, calls)
    source.fence(queue.int_ptr).wait()
    assert calls == ["enqueue_marker", "flush"]
    source.order(queue.int_ptr, 0)
    assert calls[2:] == ["enqueue_marker", "flush", "enqueue_barrier"]
    known.queue = real


def test_a_queue_outlives_its_fence(source, context, cl, hold) -> None:
    queue = cl.CommandQueue(context)
    with hold(queue) as held:
        fence = source.fence(queue.int_ptr)
        del queue
        gc.collect()
        assert not fence.done()
        held.let_go()
        fence.wait()


def test_one_queue_waits_for_another(source, context, queue, cl, hold) -> None:
    other = cl.CommandQueue(context)
    with hold(queue) as held:
        source.order(queue.int_ptr, other.int_ptr)
        after = source.fence(other.int_ptr)
        assert not after.done()
        held.let_go()
        after.wait()


def test_an_ordered_queue_need_not_wait_for_itself(source, queue, cl, faulty) -> None:
    source.is_ordered(queue.int_ptr)
    faulty.fail("enqueue_marker", -36)
    source.order(queue.int_ptr, queue.int_ptr)
    source.order(0, source.queue.int_ptr)
    assert faulty.calls == []


def test_it_knows_which_queues_run_in_any_order(source, queue, out_of_order) -> None:
    assert source.is_ordered(0)
    assert source.is_ordered(queue.int_ptr)
    assert not source.is_ordered(out_of_order.int_ptr)


def test_no_two_queues_have_one_id(source, context, cl) -> None:
    """Also where the driver gives the handle of a queue that has gone to a new one."""
    ids = []
    for _ in range(3 * _queues.Queues.MANY):
        queue = cl.CommandQueue(context)
        ids.append(source.stream_id(queue.int_ptr))
    assert len(set(ids)) == len(ids)
    assert len(source._queues._known) <= _queues.Queues.MANY + 1, "queues are let go"


def test_queues_that_somebody_holds_are_not_let_go(source, context, cl) -> None:
    queues = [cl.CommandQueue(context) for _ in range(2 * _queues.Queues.MANY)]
    ids = [source.stream_id(queue.int_ptr) for queue in queues]
    assert [source.stream_id(queue.int_ptr) for queue in queues] == ids


class Lost:
    """A queue that nobody else holds, and that does something else than to finish."""

    reference_count = 1

    def __init__(self, finish: Any) -> None:
        self.finish = finish


def test_letting_a_queue_go_stops_at_no_lost_one_and_at_no_finaliser(
    source, context, cl, faulty
) -> None:
    def fails() -> None:
        raise faulty.cl.LogicError(faulty.error_record("clFinish", -36))

    late = [cl.CommandQueue(context) for _ in range(2)]
    done = threading.Event()
    source.is_ordered(late[0].int_ptr)
    known = source._queues._known
    finalisers = [lambda: source.is_ordered(late[1].int_ptr)]
    finishes = fails, lambda: finalisers and finalisers.pop()()
    for number, finish in enumerate(finishes, 1):
        known[number] = _queues.Queue(source.queue, number)
        known[number].queue = Lost(finish)
    others = [cl.CommandQueue(context) for _ in range(_queues.Queues.MANY)]

    def name() -> None:
        assert all(source.is_ordered(queue.int_ptr) for queue in others)
        done.set()

    threading.Thread(target=name, daemon=True).start()
    assert done.wait(DEADLINE), "it failed, or waits for a lock that its own thread has"
    assert 1 in known, "what a lost queue still runs is unknown"
    assert 2 not in known
    assert late[1].int_ptr in known
    del known[1]


@pytest.mark.parametrize("wrong", [7, 1, 2**64 - 1, 2**47 - 4096, 1 << 60])
def test_a_number_that_is_no_queue_is_an_error_not_a_crash(source, make, wrong) -> None:
    for call in (source.fence, source.is_ordered, source.stream_id):
        with pytest.raises(bfc.SubAllocatorError, match="not a command queue"):
            call(wrong)
    allocator = make(source)
    with pytest.raises(bfc.SubAllocatorError, match="not a command queue"):
        allocator.allocate(1000, wrong)
    assert allocator.stats().bytes_in_use == 0


def test_another_contexts_queue_and_no_queue_at_all_are_errors(source, make, cl, context) -> None:
    theirs = cl.CommandQueue(cl.Context([pocl.devices()[0]]))
    with pytest.raises(bfc.SubAllocatorError, match="another context"):
        source.fence(theirs.int_ptr)
    memory = cl.Buffer(context, cl.mem_flags.READ_WRITE, 100)
    allocator = make(source)
    for wrong in (memory, context, object(), "queue"):
        with pytest.raises(TypeError, match=r"pyopencl\.CommandQueue"):
            allocator.allocate(100, wrong)


def test_an_int_that_leads_to_another_object_is_an_error_not_a_crash(make, cl, context) -> None:
    """PoCL does not tell a queue from what else it made: it would follow what lies there."""
    if pocl.is_of_nvidia(context.devices[0]):
        pytest.skip("NVIDIA's driver ends the process")
    program = cl.Program(context, "kernel void nothing(global int *a) { }").build()
    allocator = make()
    objects = {
        "device": context.devices[0],
        "platform": context.devices[0].platform,
        "context": context,
        "memory": cl.Buffer(context, cl.mem_flags.READ_WRITE, 100),
        "event": cl.enqueue_marker(allocator.sub_allocator.queue),
        "user event": cl.UserEvent(context),
        "program": program,
        "kernel": cl.Kernel(program, "nothing"),
    }
    for wrong in objects.values():
        with pytest.raises(bfc.SubAllocatorError, match="not a command queue"):
            allocator.allocate(100, wrong.int_ptr)
    objects["user event"].set_status(cl.command_execution_status.COMPLETE)


def test_a_queue_of_a_part_of_the_device_is_one_of_the_context(cl, context) -> None:
    """PoCL lists only the whole device as the context's."""
    whole = context.devices[0]
    try:
        parts = whole.create_sub_devices([cl.device_partition_property.EQUALLY, 1])
    except cl.Error:
        pytest.skip("the device has no parts")
    of_parts = cl.Context(parts)
    program = cl.Program(of_parts, "kernel void nothing(global int *a) { }").build()
    queues = [cl.CommandQueue(of_parts, part) for part in parts]
    theirs = cl.CommandQueue(cl.Context(parts), parts[0])
    with bfc.CachingAllocator(bfc.OpenCLSubAllocator(of_parts)) as allocator:
        for queue in queues:
            buffer = allocator.allocate(100, queue)
            allocator.record_stream(buffer, queues[0])
            assert buffer.stream == queue.int_ptr
        with pytest.raises(bfc.SubAllocatorError, match="another context"):
            allocator.allocate(100, theirs)
        objects = [
            *parts, whole, of_parts, program, cl.Kernel(program, "nothing"),
            cl.Buffer(of_parts, cl.mem_flags.READ_WRITE, 100), cl.enqueue_marker(queues[0]),
        ]  # fmt: skip
        for wrong in objects:
            with pytest.raises(bfc.SubAllocatorError, match="not a command queue"):
                allocator.allocate(100, wrong.int_ptr)


@pytest.mark.parametrize("missing", ["the driver's table", "/proc", "the right answer"])
def test_where_no_look_can_be_had_the_driver_is_trusted(context, cl, monkeypatch, missing) -> None:
    """A driver that was linked to, and not found, need not have that table."""
    if missing == "/proc":
        exists = os.path.exists
        monkeypatch.setattr(os.path, "exists", lambda path: "proc" not in path and exists(path))
    elif missing == "the right answer":
        monkeypatch.setattr(_queues, "asked_as_queue", lambda _handle: (0, 0))
    else:
        monkeypatch.setattr(_queues, "ICD", "cl_khr_none")
    source = bfc.OpenCLSubAllocator(context)
    monkeypatch.setattr(_queues, "is_object", lambda *_arguments: False)
    assert source.is_ordered(cl.CommandQueue(context).int_ptr)
    theirs = cl.CommandQueue(cl.Context([pocl.devices()[0]]))
    with pytest.raises(bfc.SubAllocatorError, match="another context"):
        source.is_ordered(theirs.int_ptr)
