"""Memory that other streams use: recorded, allocated there, and closed meanwhile."""

from __future__ import annotations

import contextlib
import threading

import pytest
from waiting import joined

import bfc
from bfc.testing import Misbehaving

MIB = 1 << 20
SIDE = 7


class CudaStream:
    """Knows its own handle, as streams of other libraries do."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.asked = 0

    def __cuda_stream__(self) -> object:
        self.asked += 1
        return self.answers[min(self.asked, len(self.answers)) - 1]


@pytest.fixture
def device(simulated) -> bfc.SimulatedSubAllocator:
    return simulated("1 MiB")


@pytest.fixture
def allocator(make_allocator, device) -> bfc.BFCAllocator:
    return make_allocator(device)


def test_a_recorded_block_comes_back_when_its_stream_has_finished(allocator, device) -> None:
    ptr, _rest = allocator.allocate_raw(1000), allocator.allocate_raw(1000)
    allocator.record_stream(ptr, SIDE)
    device.hold(SIDE)
    allocator.deallocate_raw(ptr)
    assert allocator.allocate_raw(1000) != ptr
    device.finish(SIDE)
    assert allocator.allocate_raw(1000) == ptr


def test_a_stream_with_nothing_pending_holds_nothing_back(allocator, device) -> None:
    ptr = allocator.allocate_raw(1000)
    allocator.record_stream(ptr, SIDE)
    device.hold(SIDE + 1)
    allocator.deallocate_raw(ptr)
    assert allocator.stats().bytes_in_use == 0
    assert allocator.allocate_raw(1000) == ptr


def test_only_what_was_queued_at_the_free_counts(allocator, device) -> None:
    ptr = allocator.allocate_raw(1000)
    allocator.record_stream(ptr, SIDE)
    device.hold(SIDE)
    allocator.deallocate_raw(ptr)
    device.finish(SIDE)
    device.hold(SIDE)
    assert allocator.allocate_raw(1000) == ptr


def test_every_recorded_stream_must_finish(allocator, device) -> None:
    ptr = allocator.allocate_raw(1000)
    for stream in (SIDE, SIDE + 1, SIDE):
        allocator.record_stream(ptr, stream)
        device.hold(stream)
    allocator.deallocate_raw(ptr)
    device.finish(SIDE)
    assert allocator.allocate_raw(1000) != ptr
    device.finish(SIDE + 1)
    assert allocator.allocate_raw(1000) == ptr


def test_a_waiting_block_is_counted_and_seen(allocator, device) -> None:
    ptr = allocator.allocate_raw(1000)
    allocator.record_stream(ptr, SIDE)
    device.hold(SIDE)
    allocator.deallocate_raw(ptr)
    stats, chunk = allocator.stats(), allocator.snapshot().live_chunks()[0]
    assert stats.bytes_in_use == stats.bytes_waiting_for_streams == 1024
    assert (chunk.state, chunk.ptr, chunk.allocation_id) == ("waiting", ptr, -1)
    allocator.check()


def test_a_waiting_block_is_nobodys_address(allocator, device) -> None:
    ptr = allocator.allocate_raw(1000)
    allocator.record_stream(ptr, SIDE)
    device.hold(SIDE)
    allocator.deallocate_raw(ptr)
    for ask in (allocator.deallocate_raw, allocator.requested_size, allocator.allocation_id):
        with pytest.raises(bfc.InvalidPointerError, match="waits"):
            ask(ptr)
    with pytest.raises(bfc.InvalidPointerError):
        allocator.record_stream(ptr, SIDE)


def test_waiting_neighbours_merge_once_they_are_done(allocator, device) -> None:
    ptrs = [allocator.allocate_raw(1000) for _ in range(5)]
    for ptr in ptrs:
        allocator.record_stream(ptr, SIDE)
    device.hold(SIDE)
    for ptr in ptrs:
        allocator.deallocate_raw(ptr)
    device.finish(SIDE)
    assert allocator.release_free_regions() == MIB
    allocator.check()


def test_the_allocators_own_stream_needs_no_record(make_allocator, device) -> None:
    allocator = make_allocator(device, stream=SIDE)
    device.hold(SIDE)
    ptr = allocator.allocate_raw(1000, stream=SIDE)
    allocator.record_stream(ptr, SIDE)
    allocator.deallocate_raw(ptr)
    assert allocator.stats().bytes_waiting_for_streams == 0
    assert allocator.stream == allocator.allocate(1).stream == SIDE


@pytest.mark.parametrize("method", ["allocate_raw", "allocate", "allocate_many"])
def test_an_allocation_on_another_stream_counts_as_recorded_there(
    allocator, device, method: str
) -> None:
    sizes = [1000] if method == "allocate_many" else 1000
    made = getattr(allocator, method)(sizes, stream=SIDE)
    device.hold(SIDE)
    if method == "allocate":
        made.free()
    elif method == "allocate_raw":
        allocator.deallocate_raw(made)
    else:
        allocator.deallocate_many(made)
    assert allocator.stats().bytes_waiting_for_streams == 1024
    device.finish(SIDE)


def test_a_block_used_again_forgets_the_streams_before(allocator, device) -> None:
    ptr = allocator.allocate_raw(1000, stream=SIDE)
    allocator.deallocate_raw(ptr)
    assert allocator.allocate_raw(1000) == ptr
    device.hold(SIDE)
    allocator.deallocate_raw(ptr)
    assert allocator.stats().bytes_in_use == 0


def test_running_out_of_memory_waits_for_streams_first(allocator, device) -> None:
    ptr = allocator.allocate_raw(MIB)
    allocator.record_stream(ptr, SIDE)
    device.hold(SIDE)
    allocator.deallocate_raw(ptr)
    assert allocator.allocate_raw(MIB) == ptr, "waiting lets a simulated stream finish"
    assert not device.asynchronous


def test_a_recorded_buffer_is_held_back_like_an_address(allocator, device) -> None:
    buffer = allocator.allocate(1000)
    ptr = buffer.ptr
    allocator.record_stream(buffer, SIDE)
    device.hold(SIDE)
    del buffer
    assert allocator.allocate_raw(1000) != ptr
    assert allocator.stats().bytes_waiting_for_streams == 1024
    device.finish(SIDE)
    assert allocator.allocate_raw(1000) == ptr


def test_a_view_can_be_recorded_too(allocator, device) -> None:
    buffer = allocator.allocate(1024)
    allocator.record_stream(buffer.view("f4"), SIDE)
    device.hold(SIDE)
    buffer.free()
    assert allocator.stats().bytes_waiting_for_streams == 1024


def test_a_freed_buffer_does_not_record_for_who_came_after(allocator, device) -> None:
    buffer = allocator.allocate(1000)
    address = buffer.ptr
    buffer.free()
    ptr = allocator.allocate_raw(1000)
    assert ptr == address
    with pytest.raises((bfc.InvalidPointerError, bfc.ClosedError)):
        allocator.record_stream(buffer, SIDE)
    device.hold(SIDE)
    allocator.deallocate_raw(ptr)
    assert allocator.stats().bytes_waiting_for_streams == 0


def test_a_buffer_of_another_allocator_is_refused(allocator, make_allocator) -> None:
    buffer = make_allocator("1 MiB").allocate(1000)
    assert allocator.allocate_raw(1000) == buffer.ptr, "simulated devices start at the same base"
    with pytest.raises(bfc.InvalidPointerError):
        allocator.record_stream(buffer, SIDE)


# -- streams as objects ----------------------------------------------------------------------------


def test_a_stream_may_know_its_own_handle(allocator, device) -> None:
    buffer = allocator.allocate(1000, stream=CudaStream((0, SIDE)))
    assert buffer.stream == SIDE
    allocator.record_stream(buffer, CudaStream((0, SIDE + 1)))
    device.hold(CudaStream((0, SIDE + 1)))
    buffer.free()
    assert allocator.stats().bytes_waiting_for_streams == 1024


def test_a_stream_is_asked_for_its_handle_once(allocator) -> None:
    stream = CudaStream((0, SIDE), (0, SIDE + 1), None)
    buffer = allocator.allocate(1000, stream=stream)
    assert buffer.stream == SIDE
    assert stream.asked == 1


def test_a_stream_that_fails_allocates_nothing(allocator) -> None:
    for answers in ((None,), ((0, SIDE), None), ((0, SIDE), (0, "x"))):
        with contextlib.suppress(TypeError):
            allocator.allocate(1000, stream=CudaStream(*answers))
        allocator.release_free_regions()  # takes in what the dropped buffer left behind
        assert allocator.stats().bytes_in_use == 0


@pytest.mark.parametrize(
    "stream", ["0", 1.5, b"", [], CudaStream(None), CudaStream((1,)), CudaStream(5)]
)
def test_what_is_no_stream_is_a_type_error(allocator, stream: object) -> None:
    ptr = allocator.allocate_raw(1000)
    for ask in (
        lambda: allocator.allocate_raw(1000, stream=stream),
        lambda: allocator.allocate(1000, stream=stream),
        lambda: allocator.record_stream(ptr, stream),
    ):
        with pytest.raises(TypeError):
            ask()
    assert allocator.stats().num_allocs == 1


@pytest.mark.parametrize("stream", [-1, 2**64, CudaStream((0, -1)), CudaStream((0, 2**64))])
def test_a_handle_outside_64_bits_is_a_value_error(allocator, stream: object) -> None:
    with pytest.raises(ValueError, match="stream handle"):
        allocator.allocate_raw(1000, stream=stream)


def test_the_highest_handle_is_a_stream_like_any_other(allocator, device) -> None:
    ptr = allocator.allocate_raw(1000, stream=2**64 - 1)
    device.hold(2**64 - 1)
    allocator.deallocate_raw(ptr)
    assert allocator.stats().bytes_waiting_for_streams == 1024


# -- closing ---------------------------------------------------------------------------------------


def test_close_waits_for_the_streams_that_hold_freed_memory(allocator, device) -> None:
    ptr = allocator.allocate_raw(1000, stream=SIDE)
    device.hold(SIDE)
    allocator.deallocate_raw(ptr)
    allocator.close()
    assert not device.asynchronous
    assert device.live == {}


def test_close_waits_for_what_a_finaliser_freed(allocator, device) -> None:
    buffer = allocator.allocate(1000, stream=SIDE)
    device.hold(SIDE)
    del buffer
    allocator.close()
    assert not device.asynchronous, "the memory went back while a stream may still have used it"


def test_releasing_regions_leaves_those_that_wait(allocator, device) -> None:
    ptr = allocator.allocate_raw(1000, stream=SIDE)
    device.hold(SIDE)
    allocator.deallocate_raw(ptr)
    assert allocator.release_free_regions() == 0
    device.finish(SIDE)
    assert allocator.release_free_regions() == MIB


# -- fences that fail, or take their time ----------------------------------------------------------


class Mark:
    """A fence that does what a test tells it to."""

    pending = True
    fault: Exception | None = None
    on_done = staticmethod(lambda: None)

    def done(self) -> bool:
        self.on_done()
        if self.fault:
            raise self.fault
        return not self.pending

    def wait(self) -> None:
        self.pending = False


@pytest.fixture
def fences(make_allocator) -> bfc.BFCAllocator:
    device = Misbehaving("1 MiB", asynchronous=True)
    device.mark = Mark()
    device.on("fence", returns=device.mark)
    return make_allocator(device)


def test_a_fence_that_fails_at_the_free_leaves_the_block_live(fences) -> None:
    ptr = fences.allocate_raw(1000, stream=SIDE)
    fences.sub_allocator.mark.fault = bfc.SubAllocatorError("query failed")
    with pytest.raises(bfc.SubAllocatorError):
        fences.deallocate_raw(ptr)
    assert fences.requested_size(ptr) == 1000
    fences.check()
    fences.sub_allocator.mark.fault, fences.sub_allocator.mark.pending = None, False
    fences.deallocate_raw(ptr)
    assert fences.stats().bytes_in_use == 0


def test_a_buffer_whose_free_failed_can_be_freed_again(fences) -> None:
    buffer = fences.allocate(1000, stream=SIDE)
    fences.sub_allocator.mark.fault = bfc.SubAllocatorError("query failed")
    with pytest.raises(bfc.SubAllocatorError):
        buffer.free()
    assert not buffer.freed
    fences.sub_allocator.mark.fault, fences.sub_allocator.mark.pending = None, False
    buffer.free()
    assert fences.stats().bytes_in_use == 0


def come_back_to_nothing(allocator: bfc.BFCAllocator) -> None:
    allocator.sub_allocator.mark.fault, allocator.sub_allocator.mark.pending = None, False
    assert allocator.release_free_regions() == MIB, "memory was lost"
    allocator.check()


def try_to_allocate(allocator: bfc.BFCAllocator) -> None:
    with contextlib.suppress(bfc.SubAllocatorError):
        allocator.deallocate_raw(allocator.allocate_raw(256))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_fence_that_fails_later_loses_no_memory(fences) -> None:
    for ptr in [fences.allocate_raw(1000, stream=SIDE) for _ in range(3)]:
        fences.deallocate_raw(ptr)
    assert fences.stats().bytes_waiting_for_streams == 3 * 1024
    fences.sub_allocator.mark.fault = bfc.SubAllocatorError("query failed")
    try_to_allocate(fences)
    come_back_to_nothing(fences)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_fence_that_fails_for_a_dropped_buffer_loses_no_memory(fences) -> None:
    buffers = [fences.allocate(1000, stream=SIDE) for _ in range(3)]
    buffers.clear()
    fences.sub_allocator.mark.fault = bfc.SubAllocatorError("query failed")
    try_to_allocate(fences)
    come_back_to_nothing(fences)


def test_closing_while_a_fence_is_asked_corrupts_nothing(fences) -> None:
    ptr = fences.allocate_raw(1000, stream=SIDE)
    fences.deallocate_raw(ptr)
    fences.sub_allocator.mark.pending = False
    fences.sub_allocator.mark.on_done = fences.close
    with contextlib.suppress(bfc.ClosedError):
        fences.allocate_raw(256)
    fences.check()
    assert fences.snapshot().regions == ()
    assert fences.stats().largest_free_block_bytes == 0, "a chunk of no region stands in a bin"


def test_closing_while_a_block_is_freed_corrupts_nothing(fences) -> None:
    ptr = fences.allocate_raw(1000, stream=SIDE)
    fences.sub_allocator.on("fence", first=fences.close, returns=fences.sub_allocator.mark)
    fences.sub_allocator.mark.pending = False
    with contextlib.suppress(bfc.ClosedError):
        fences.deallocate_raw(ptr)
    fences.check()
    assert fences.stats().largest_free_block_bytes == 0, "a chunk of no region stands in a bin"


def test_freeing_the_same_block_while_its_fence_is_made_frees_once(fences) -> None:
    ptr = fences.allocate_raw(1000, stream=SIDE)
    faults: list[BaseException] = []

    def free_again() -> None:
        try:
            fences.deallocate_raw(ptr)
        except bfc.InvalidPointerError as fault:
            faults.append(fault)

    fences.sub_allocator.on("fence", first=free_again, returns=fences.sub_allocator.mark)
    fences.deallocate_raw(ptr)
    assert len(faults) == 1
    fences.check()
    come_back_to_nothing(fences)


def test_allocating_while_a_fence_is_asked_does_not_deadlock(fences) -> None:
    ptr = fences.allocate_raw(1000, stream=SIDE)
    fences.deallocate_raw(ptr)
    inner: list[int] = []

    def allocate_inside() -> None:
        if len(inner) < 3:
            inner.append(0)
            inner.append(fences.allocate_raw(256))

    fences.sub_allocator.mark.on_done = allocate_inside
    thread = threading.Thread(target=fences.allocate_raw, args=(256,), daemon=True)
    thread.start()
    joined(thread)
    fences.sub_allocator.mark.on_done = lambda: None
    fences.check()
