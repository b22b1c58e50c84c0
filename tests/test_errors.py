"""What bfc says when something goes wrong."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest

import bfc
from bfc.devices import Availability
from bfc.testing import Misbehaving

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
LINES, COLUMNS = 24, 120
SEE = "print(allocator.snapshot()) shows what stands between them"


def refusal(allocator: bfc.BFCAllocator, nbytes: int) -> bfc.OutOfMemoryError:
    with pytest.raises(bfc.OutOfMemoryError) as caught:
        allocator.allocate_raw(nbytes)
    return caught.value


def full(make_allocator: Callable) -> bfc.OutOfMemoryError:
    allocator = make_allocator("1 MiB")
    allocator.allocate_raw(MIB)
    return refusal(allocator, 1000)


def fragmented(make_allocator: Callable) -> bfc.OutOfMemoryError:
    allocator = make_allocator("1 MiB")
    ptrs = [allocator.allocate_raw(4096) for _ in range(256)]
    allocator.deallocate_many(ptrs[::2])
    return refusal(allocator, 8192)


def limited(make_allocator: Callable) -> bfc.OutOfMemoryError:
    return refusal(make_allocator("8 GiB", memory_limit="1 GiB"), 2 * GIB)


def waiting(make_allocator: Callable) -> bfc.OutOfMemoryError:
    allocator = make_allocator(never_done("1 MiB"))
    allocator.deallocate_raw(allocator.allocate_raw(MIB // 2, stream=3))
    return refusal(allocator, MIB)


def refused(make_allocator: Callable, simulated: Callable) -> bfc.OutOfMemoryError:
    return refusal(make_allocator(simulated("8 GiB", max_bytes=1000)), GIB)


def stitched(make_allocator: Callable, **options: object) -> bfc.OutOfMemoryError:
    """Eight pages of small chunks in which 64 KiB are left of each, and eight of large ones."""
    allocator = make_allocator("32 MiB", virtual_memory=True, **options)
    small = [allocator.allocate_raw(64 * KIB) for _ in range(256)]
    large = [allocator.allocate_raw(3 * MIB) for _ in range(5)]
    allocator.deallocate_many([ptr for number, ptr in enumerate(small) if number % 32])
    allocator.deallocate_many(large[::2])
    return refusal(allocator, 20 * MIB)


class Never:
    def done(self) -> bool:
        return False

    def wait(self) -> None:
        pass


def never_done(capacity: str) -> Misbehaving:
    """A device whose streams do not finish, however long anybody waits."""
    device = Misbehaving(capacity, asynchronous=True)
    device.on("fence", returns=Never())
    return device


SITUATIONS = [full, fragmented, limited, stitched]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_text_fits_one_screen(make_allocator, situation: Callable) -> None:
    lines = str(situation(make_allocator)).splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    assert lines[0].startswith("out of memory: asked for ")
    assert any(line.startswith("  try: ") for line in lines)


def test_the_text_fits_one_screen_at_the_worst(make_allocator) -> None:
    source = bfc.SimulatedSubAllocator(2**63 - 1)
    allocator = make_allocator(source, memory_limit=2**62 + 12345 * 256, allow_growth=True)
    allocator.allocate_raw(2**61 + 777)
    error = refusal(allocator, 2**63 - 1)
    assert len(str(error).splitlines()) <= LINES
    assert max(map(len, str(error).splitlines())) <= COLUMNS


def test_a_full_device_says_so(make_allocator) -> None:
    error = full(make_allocator)
    assert (error.requested, error.in_use, error.reserved, error.limit) == (1000, MIB, MIB, MIB)
    assert error.largest_free == 0
    assert math.isnan(error.fragmentation)
    assert str(error).splitlines() == [
        "out of memory: asked for 1000 B (1000 bytes)",
        "  in use        1.00 MiB",
        "  reserved      1.00 MiB of a limit of 1.00 MiB",
        "  free inside   0 B, the largest block 0 B",
        "  refused by    the memory limit, of which 0 B are not taken yet",
        "  try: freeing something first: print(allocator.snapshot()) shows what is live",
    ]


def test_an_unknown_fragmentation_is_not_named() -> None:
    """A pinned allocator does not know it, and has free memory where a thread just freed some."""
    error = bfc.OutOfMemoryError(3 * MIB, 1024, 1536, MIB, 512)
    assert "free inside   512 B" in str(error)
    assert "fragmentation" not in str(error)


def test_fragmentation_is_named_with_its_figure(make_allocator) -> None:
    error = fragmented(make_allocator)
    assert error.largest_free == 4096
    assert error.fragmentation == pytest.approx(127 / 128)
    assert "fragmentation 99.2%" in str(error)
    assert "less fragmentation" in str(error)


def test_pages_are_named_and_what_little_pins_them(make_allocator) -> None:
    error = stitched(make_allocator)
    # Of the large pages, those of the two chunks that are left: 3 to 6 and 9 to 12 MiB.
    assert error.pages == (2 * MIB, 16, 8 + 4, 8)
    assert (error.pages.page_size, error.pages.in_use, error.pages.sparse) == (2 * MIB, 12, 8)
    assert str(error).splitlines() == [
        "out of memory: asked for 20.00 MiB (20971520 bytes)",
        "  in use        6.50 MiB",
        "  reserved      32.00 MiB of a limit of 32.00 MiB",
        "  free inside   25.50 MiB, the largest block 4.00 MiB",
        "  fragmentation 84.3% of what is free lies outside the largest block",
        "  pages         16 of 2.00 MiB, 12 in use",
        "  pinned        16.00 MiB, in pages of which less than a tenth is in use",
        "  refused by    the memory limit, of which 0 B are not taken yet",
        f"  try: less fragmentation: enough is free, but in pieces; {SEE}",
    ]


def test_smaller_pages_are_advised_where_there_are_any(make_allocator) -> None:
    error = stitched(make_allocator, page_size="8 MiB")
    assert error.pages.page_size == 8 * MIB
    assert "a page_size below 8.00 MiB: only pages that are wholly free can be joined" in str(error)


def test_a_page_of_a_view_is_in_use_through_the_view(make_allocator) -> None:
    """Three pages lie apart, of which the view needs 4 MiB and a bit: its last page is pinned."""
    allocator = make_allocator("10 MiB", virtual_memory=True)
    chunks = [allocator.allocate_raw(2 * MIB) for _ in range(5)]
    allocator.deallocate_many(chunks[::2])
    view = allocator.allocate_raw(4 * MIB + 1000)
    assert view not in chunks
    assert refusal(allocator, 2 * MIB).pages == (2 * MIB, 5, 5, 1)
    allocator.deallocate_raw(view)
    assert refusal(allocator, 8 * MIB).pages == (2 * MIB, 5, 2, 0)


def test_what_waits_for_a_stream_is_in_use(make_allocator) -> None:
    allocator = make_allocator(never_done("8 MiB"), virtual_memory=True)
    ptr = allocator.allocate_raw(3 * MIB)
    allocator.record_stream(ptr, 9)
    allocator.deallocate_raw(ptr)
    error = refusal(allocator, 8 * MIB)
    assert error.in_use == 3 * MIB
    assert error.pages == (2 * MIB, 2, 2, 0)


def test_a_plain_allocator_is_told_what_joins_pieces(make_allocator) -> None:
    advice = "  try: virtual_memory=True, which joins such pieces"
    for growth in (True, False):
        allocator = make_allocator("64 MiB", allow_growth=growth)
        ptrs = [allocator.allocate_raw(4 * MIB) for _ in range(16)]
        allocator.deallocate_many(ptrs[::2])
        error = refusal(allocator, 8 * MIB)
        assert error.pages is None
        assert advice in str(error).splitlines()
    assert advice not in str(full(make_allocator))
    assert "virtual_memory" not in str(stitched(make_allocator))


def test_a_caching_allocator_is_told_what_comes_next() -> None:
    """Expandable segments where they are off, and stitching where they do not suffice: here each
    piece of 20 MiB has 9 MiB that are live."""
    advised = {}
    for on in ("False", "True"):
        device = bfc.SimulatedSubAllocator("80 MiB")
        settings = f"expandable_segments:{on}"
        with bfc.CachingAllocator(device, settings=settings) as allocator:
            ptrs = [allocator.allocate_raw(9 * MIB) for _ in range(8)]
            allocator.deallocate_many(ptrs[::2])
            text = str(refusal(allocator, 30 * MIB))
        advised[on] = [line for line in text.splitlines() if "joins such pieces" in line]
    assert advised == {
        "False": ["  try: settings='expandable_segments:True', which joins such pieces"],
        "True": ["  try: stitch=True, which joins such pieces"],
    }


def test_where_virtual_memory_is_impossible_it_is_not_advised(make_allocator) -> None:
    large = bfc.SimulatedSubAllocator("64 MiB")
    small = bfc.SimulatedSubAllocator("1 MiB")  # less than a page
    no = Availability(False, "this one maps nothing")
    plain = Misbehaving("64 MiB", supports_virtual_memory=no)
    for source, options in ((plain, {}), (large, {"strict": True}), (small, {})):
        allocator = make_allocator(source, **options)
        ptrs = [allocator.allocate_raw(source.total_bytes // 16) for _ in range(16)]
        allocator.deallocate_many(ptrs[::2])
        text = str(refusal(allocator, source.total_bytes // 8))
        assert "less fragmentation" in text
        assert "virtual_memory" not in text


def test_a_limit_below_the_device_is_named(make_allocator) -> None:
    text = str(limited(make_allocator))
    assert "above the limit of 1.00 GiB" in text
    assert "a higher memory_limit: the device has 8.00 GiB" in text


def test_waiting_streams_are_named(make_allocator) -> None:
    error = waiting(make_allocator)
    assert "512.0 KiB wait for other streams" in str(error)
    assert error.in_use == MIB // 2


def test_who_refused_is_named(make_allocator, simulated) -> None:
    text = str(refused(make_allocator, simulated))
    assert (
        "refused by    SimulatedSubAllocator(8.00 GiB, 0 B live), asked last for 1.00 GiB" in text
    )


def test_advice_is_about_this_request_and_not_the_one_before(make_allocator) -> None:
    allocator = make_allocator("8 GiB", memory_limit="1 GiB")
    assert "smaller request" in str(refusal(allocator, 2 * GIB))
    allocator.allocate_raw(GIB)
    assert "smaller request" not in str(refusal(allocator, 1000))


def test_buffers_and_many_raise_the_same_error(make_allocator) -> None:
    allocator = make_allocator("1 MiB")
    with pytest.raises(bfc.OutOfMemoryError) as one:
        allocator.allocate("2 MiB")
    with pytest.raises(bfc.OutOfMemoryError) as many:
        allocator.allocate_many([2 * MIB])
    assert one.value.requested == many.value.requested == 2 * MIB


def test_out_of_memory_is_a_memory_error(make_allocator) -> None:
    with pytest.raises(MemoryError):
        make_allocator("1 MiB").allocate_raw(2 * MIB)


FIGURES = ("requested", "in_use", "reserved", "limit", "largest_free")


@pytest.mark.parametrize(
    "again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy]
)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_an_error_survives_pickling_word_for_word(
    make_allocator, again: Callable, situation
) -> None:
    error = situation(make_allocator)
    same = again(error)
    assert type(same) is bfc.OutOfMemoryError
    assert [getattr(same, name) for name in FIGURES] == [getattr(error, name) for name in FIGURES]
    assert same.fragmentation == pytest.approx(error.fragmentation, nan_ok=True)
    assert str(same) == str(error)
    assert same.pages == error.pages


class OutOfMemoryInJobError(bfc.OutOfMemoryError):
    def __init__(self, *args, job: str = "", **facts) -> None:
        super().__init__(*args, **facts)
        self.job = job


def test_an_error_with_more_parameters_is_reported_and_pickled() -> None:
    error = OutOfMemoryInJobError(5, 3, job="training", refused="a limit")
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error), error.reported("")):
        assert type(same) is OutOfMemoryInJobError
        assert str(same) == str(error)


def test_an_error_can_be_made_by_hand() -> None:
    error = bfc.OutOfMemoryError(5)
    assert (error.requested, error.in_use, str(error).count("\n")) == (5, 0, 3)


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (bfc.OutOfMemoryError, MemoryError),
        (bfc.InvalidPointerError, ValueError),
        (bfc.SubAllocatorError, RuntimeError),
        (bfc.DeviceUnavailableError, RuntimeError),
        (bfc.ClosedError, RuntimeError),
        (bfc.InvariantError, AssertionError),
        (bfc.TraceError, ValueError),
    ],
)
def test_every_error_has_a_base_that_callers_know(error: type, base: type) -> None:
    assert issubclass(error, base)
    assert error.__doc__
    assert error.__module__ == "bfc.errors"
    if error is not bfc.OutOfMemoryError:
        assert str(pickle.loads(pickle.dumps(error("why")))) == "why"


def test_an_error_in_a_source_keeps_its_cause(make_allocator) -> None:
    source = Misbehaving("1 MiB")
    source.on("alloc", raises=OSError(5, "the driver fell over"))
    with pytest.raises(bfc.SubAllocatorError, match="fell over") as caught:
        make_allocator(source).allocate_raw(1)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.usefixtures("quiet_collector")
@pytest.mark.parametrize("policy", [bfc.BFCAllocator, bfc.CachingAllocator])
@pytest.mark.parametrize("stream", [None, 7])
@pytest.mark.parametrize("method", ["allocate_raw", "allocate", "allocate_many"])
def test_a_host_without_memory_for_the_answer_loses_no_block(
    policy: type[bfc.Allocator], stream: int | None, method: str
) -> None:
    tools = pytest.importorskip("_testcapi")
    allocator = policy(bfc.SimulatedSubAllocator("64 MiB"))
    allocator.deallocate_raw(allocator.allocate_raw(1000))
    sizes = [1000, 2000] if method == "allocate_many" else 1000
    failures = 0
    for place in range(40):
        answer = None
        tools.set_nomemory(place, place + 1)
        try:
            answer = getattr(allocator, method)(sizes, stream)
        except MemoryError:
            failures += 1
        finally:
            tools.remove_mem_hooks()
        if method == "allocate_many" and answer is not None:
            allocator.deallocate_many(answer)
        elif method == "allocate_raw" and answer is not None:
            allocator.deallocate_raw(answer)
        del answer
        assert allocator.stats().bytes_in_use == 0
    assert failures >= 1
    allocator.check()


@pytest.mark.usefixtures("quiet_collector")
@pytest.mark.parametrize("failures", [1, 2, 3, 0])
@pytest.mark.parametrize("context", ["alloc", "all"])
@pytest.mark.parametrize("stream", [None, 7])
@pytest.mark.parametrize("method", ["allocate_raw", "allocate", "allocate_many"])
def test_a_host_without_memory_for_the_frames_loses_no_block(
    method: str, stream: int | None, context: str, failures: int
) -> None:
    """Also where every request from some point on fails (0), and with it what frees the block."""
    tools = pytest.importorskip("_testcapi")
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("64 MiB"))
    allocator.deallocate_raw(allocator.allocate_raw(1000))
    allocator.record_history(context=context)
    sizes = [1000, 2000] if method == "allocate_many" else 1000
    for place in range(60):
        answer = None
        tools.set_nomemory(place, place + failures if failures else 0)
        try:
            answer = getattr(allocator, method)(sizes, stream)
        except MemoryError:
            pass
        except bfc.SubAllocatorError as error:
            if not isinstance(error.__cause__, MemoryError):  # the source's free had none either
                raise
        finally:
            tools.remove_mem_hooks()
        if method == "allocate_many" and answer is not None:
            allocator.deallocate_many(answer)
        elif method == "allocate_raw" and answer is not None:
            allocator.deallocate_raw(answer)
        del answer
        assert allocator.stats().bytes_in_use == 0
    allocator.check()


@pytest.mark.usefixtures("quiet_collector")
@pytest.mark.parametrize("failures", [1, 0])
@pytest.mark.parametrize("method", ["deallocate_raw", "deallocate_many"])
@pytest.mark.parametrize("policy", [bfc.BFCAllocator, bfc.CachingAllocator])
def test_a_host_without_memory_for_a_free_loses_no_block(
    policy: type[bfc.Allocator], method: str, failures: int
) -> None:
    tools = pytest.importorskip("_testcapi")

    class Fence:
        def done(self) -> bool:
            return True

        def wait(self) -> None:
            pass

    for place in range(60):
        device = Misbehaving("16 MiB", asynchronous=True)
        device.on("fence", returns=Fence())
        allocator = policy(device)
        ptrs = [allocator.allocate_raw(1000) for _ in range(4)]
        for ptr in ptrs[::2]:
            allocator.record_stream(ptr, 9)
            allocator.record_stream(ptr, 10)
        what = ptrs[0] if method == "deallocate_raw" else ptrs
        tools.set_nomemory(place, place + failures if failures else 0)
        try:
            getattr(allocator, method)(what)
        except MemoryError:
            pass
        finally:
            tools.remove_mem_hooks()
        for chunk in allocator.snapshot().live_chunks():
            if chunk.state == "in use":
                allocator.deallocate_raw(chunk.ptr)
        allocator.release_free_regions()
        assert allocator.stats().pool_bytes == 0
        allocator.check()
