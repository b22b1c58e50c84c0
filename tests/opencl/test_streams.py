"""When memory may be used again: one queue, a second queue, and queues without an order."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pocl
import pytest

import bfc

opencl_stream = pytest.importorskip("bfc.copying.opencl_stream")


def test_memory_of_one_ordered_queue_is_used_again_at_once(make, queue, hold) -> None:
    allocator = make(stream=queue)
    with hold(queue):
        first = allocator.allocate_raw(1000, queue)
        allocator.record_stream(first, queue)
        allocator.deallocate_raw(first)
        assert allocator.allocate_raw(1000, queue) == first
        assert allocator.stats().bytes_waiting_for_streams == 0
    allocator.deallocate_raw(first)


def test_the_sources_own_queue_is_stream_0(make) -> None:
    allocator = make()
    own = allocator.sub_allocator.queue
    buffer = allocator.allocate(1000, own)
    assert buffer.stream == 0
    allocator.record_stream(buffer, own)
    place = buffer.ptr
    buffer.free()
    assert allocator.allocate(1000).ptr == place


def test_memory_that_a_second_queue_uses_waits_for_it(make, queue, hold) -> None:
    allocator = make()
    first = allocator.allocate(1000)
    place = first.ptr
    allocator.record_stream(first, queue)
    with hold(queue) as held:
        first.free()
        assert allocator.stats().bytes_waiting_for_streams > 0
        second = allocator.allocate(1000)
        assert second.ptr != place, "the queue still uses it"
        held.let_go()
        queue.finish()
        assert allocator.allocate(1000).ptr == place


def test_memory_of_an_unordered_queue_waits_for_its_own_work(make, out_of_order, hold) -> None:
    """Without an order, what is queued there later may run before what was queued at the free."""
    allocator = make()
    first = allocator.allocate(1000, out_of_order)
    place = first.ptr
    with hold(out_of_order) as held:
        first.free()
        assert allocator.stats().bytes_waiting_for_streams > 0
        second = allocator.allocate(1000, out_of_order)
        assert second.ptr != place
        held.let_go()
        out_of_order.finish()
        third = allocator.allocate(1000, out_of_order)
        assert third.ptr == place
    raw = allocator.allocate_raw(1000, out_of_order.int_ptr)
    allocator.deallocate_raw(raw)
    out_of_order.finish()


def test_an_unordered_queue_waits_for_the_last_use_at_home(make, cl, out_of_order, hold) -> None:
    allocator = make()
    source = allocator.sub_allocator
    allocator.allocate(1000).free()
    with hold(source.queue) as held:
        allocator.allocate(1000).free()
        buffer = allocator.allocate(1000, out_of_order)
        after = cl.enqueue_marker(out_of_order)
        out_of_order.flush()
        assert after.command_execution_status != cl.command_execution_status.COMPLETE
        held.let_go()
        after.wait()
    buffer.free()


def test_an_allocator_cannot_belong_to_an_unordered_queue(make, out_of_order, context) -> None:
    source = bfc.OpenCLSubAllocator(context)
    for policy in (bfc.BFCAllocator, bfc.CachingAllocator):
        with pytest.raises(ValueError, match="any order"):
            policy(source, stream=out_of_order)


def test_a_queue_may_go_before_the_memory_that_it_used(make, context, cl, hold) -> None:
    allocator = make()
    queue = cl.CommandQueue(context)
    buffer = allocator.allocate(1000, queue)
    place = buffer.ptr
    with hold(queue) as held:
        del queue
        buffer.free()
        assert allocator.allocate(1000).ptr != place
        held.let_go()
    allocator.sub_allocator.synchronize()  # it kept the queue
    allocator.release_free_regions()
    assert allocator.stats().bytes_in_use == 0


def test_queues_are_streams_wherever_streams_are(make, queue) -> None:
    allocator = make()
    with bfc.use_stream(queue):
        buffer = allocator.allocate(1000)
    assert buffer.stream == queue.int_ptr
    many = allocator.allocate_many([100, 200], stream=queue)
    allocator.deallocate_many(many.tolist())
    assert bytes(buffer.from_host(b"a" * 1000).to_host()) == b"a" * 1000


def test_what_is_no_queue_of_the_context_is_refused_when_it_is_recorded(make, cl, context) -> None:
    """At the free it would be too late: the memory could never come back."""
    allocator = make()
    buffer = allocator.allocate(1000)
    theirs = cl.CommandQueue(cl.Context(context.devices))
    others = () if pocl.is_of_nvidia(context.devices[0]) else (context.int_ptr,)
    for wrong in (7, theirs, theirs.int_ptr, *others):
        for what in (buffer, buffer.ptr):
            with pytest.raises(bfc.SubAllocatorError, match="queue"):
                allocator.record_stream(what, wrong)
    place = buffer.ptr
    buffer.free()
    assert allocator.allocate(1000).ptr == place


KERNEL = "kernel void add(global int *a, int number) { a[get_global_id(0)] += number; }"


@pytest.mark.parametrize("kind", ["queue", "out_of_order"])
def test_no_block_is_handed_out_before_the_kernels_that_use_it(
    make, cl, context, kind, request
) -> None:
    """Kernels wait on two recorded queues, one behind the other's; what is allocated meanwhile is
    written at home. On the unordered queue no barrier holds other work back."""
    recorded: list[Any] = [request.getfixturevalue(kind), cl.CommandQueue(context)]
    allocator = make()
    source = allocator.sub_allocator
    add = cl.Kernel(cl.Program(context, KERNEL).build(), "add")
    buffer = allocator.allocate(4000).from_host(np.zeros(1000, "i4"))
    place = buffer.ptr
    memory = source.sub_buffer(place, 4000)
    gates, kernels = [cl.UserEvent(context) for _ in recorded], []
    for queue, gate in zip(recorded, gates, strict=True):
        kernels.append(add(queue, (1000,), None, memory, np.int32(1), wait_for=[gate]))
        queue.flush()
        allocator.record_stream(buffer, queue)
        allocator.record_stream(buffer, source.queue)
    buffer.free()
    for gate, kernel in zip(gates, kernels, strict=True):
        taken = [allocator.allocate(4000) for _ in range(5)]
        assert place not in [other.ptr for other in taken]
        for other in taken:
            other.from_host(np.full(1000, 7, "i4"))
        gate.set_status(cl.command_execution_status.COMPLETE)
        kernel.wait()
    for queue in recorded:
        queue.finish()
    again = allocator.allocate(4000)
    assert again.ptr == place
    assert (again.view("i4").to_host() == 2).all(), "something wrote there meanwhile"


def test_a_program_that_is_refused_keeps_nothing_alive(cl, context, monkeypatch) -> None:
    place = opencl_stream.Context(context, context.devices[0])

    class Held:
        pass

    def fails(*_: object) -> None:
        raise cl.RuntimeError("clBuildProgram failed: BUILD_PROGRAM_FAILURE")

    def build() -> weakref.ref[Held]:
        held = Held()
        with pytest.raises(opencl_stream.CompilerRefusedError):
            place.program("key", lambda: "text")
        return weakref.ref(held)

    monkeypatch.setattr(cl, "Program", fails)
    kept = build()
    gc.collect()
    assert kept() is None
