"""Recorded runs, replayed in real buffers: every block keeps its bytes until it is freed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bfc

TRACES = Path(__file__).parents[2] / "bench" / "traces"
MIB = 1 << 20

#: A block is filled with words that follow from its number; `check` counts those that do not. One
#: launch writes or checks a range of a region, as a framework's kernels would: by base and offset.
SOURCE = """
kernel void fill(global uint *memory, ulong first, ulong count, uint number) {
    for (size_t i = get_global_id(0); i < count; i += get_global_size(0))
        memory[first + i] = number * 2654435761u + (uint)i;
}
kernel void check(global const uint *memory, ulong first, ulong count, uint number,
                  global int *wrong) {
    for (size_t i = get_global_id(0); i < count; i += get_global_size(0))
        if (memory[first + i] != number * 2654435761u + (uint)i) atomic_inc(wrong);
}
"""
#: Global and local size of each launch: PoCL compiles anew for each local size.
ITEMS = (256,), (64,)


def scaled(name: str, events: int, peak: int) -> bfc.Trace:
    """The start of a trace, its sizes scaled so that its peak of live bytes is `peak`."""
    trace = bfc.Trace.load(TRACES / f"{name}.npz")[:events]
    live, most, sizes = 0, 0, {}
    for op, number, size in zip(trace.op, trace.id, trace.size, strict=True):
        if op == 0:
            sizes[number] = int(size)
            live += int(size)
        else:
            live -= sizes.pop(number, 0)
        most = max(most, live)
    ratio = peak / most
    return bfc.Trace(
        trace.op, trace.id, np.maximum(4, (trace.size * ratio).astype("u8")) // 4 * 4, trace.stream
    )


class Filled:
    """Blocks with a pattern in each, in the regions of an allocator."""

    def __init__(self, cl: Any, allocator: bfc.Allocator) -> None:
        self.cl = cl
        self.source = allocator.sub_allocator
        self.queue = self.source.queue
        program = cl.Program(self.source.context, SOURCE).build()
        self.fill, self.check = cl.Kernel(program, "fill"), cl.Kernel(program, "check")
        self.wrong = cl.Buffer(self.source.context, cl.mem_flags.READ_WRITE, 4)
        cl.enqueue_fill_buffer(self.queue, self.wrong, np.zeros(1, "i4"), 0, 4)

    def write(self, address: int, nbytes: int, number: int) -> None:
        memory, offset = self.source.locate(address, nbytes)
        span = np.uint64(offset // 4), np.uint64(nbytes // 4)
        self.fill(self.queue, *ITEMS, memory, *span, np.uint32(number))

    def compare(self, address: int, nbytes: int, number: int) -> None:
        memory, offset = self.source.locate(address, nbytes)
        span = np.uint64(offset // 4), np.uint64(nbytes // 4)
        self.check(self.queue, *ITEMS, memory, *span, np.uint32(number), self.wrong)

    def wrong_words(self) -> int:
        count = np.empty(1, "i4")
        self.cl.enqueue_copy(self.queue, count, self.wrong)
        return int(count[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["gpu_lm_small", "gpt2m_adam", "resnet50_multiscale"])
def test_a_recorded_run_keeps_every_blocks_bytes(make, cl, context, name) -> None:
    trace = scaled(name, 800, 24 * MIB)
    source = bfc.OpenCLSubAllocator(context, capacity="256 MiB")
    options = {"allow_growth": True} if isinstance(make(), bfc.BFCAllocator) else {}
    allocator = make(source, **options)
    blocks = Filled(cl, allocator)
    live: dict[int, tuple[int, int]] = {}
    for op, number, size in zip(trace.op, trace.id.tolist(), trace.size.tolist(), strict=True):
        if op == 0:
            live[number] = allocator.allocate_raw(size), size
            blocks.write(*live[number], number)
        elif number in live:
            blocks.compare(*live[number], number)
            allocator.deallocate_raw(live.pop(number)[0])
    for number, (address, size) in live.items():
        blocks.compare(address, size, number)
        allocator.deallocate_raw(address)
    assert blocks.wrong_words() == 0
    allocator.check()


def test_the_check_sees_a_block_that_was_overwritten(make, cl) -> None:
    allocator = make()
    blocks = Filled(cl, allocator)
    address = allocator.allocate_raw(4000)
    blocks.write(address, 4000, 1)
    blocks.compare(address, 4000, 1)
    assert blocks.wrong_words() == 0
    blocks.write(address + 2000, 400, 2)
    blocks.compare(address, 4000, 1)
    assert blocks.wrong_words() == 100
    allocator.deallocate_raw(address)


def test_the_compiled_replay_runs_on_real_regions(make) -> None:
    trace = scaled("gpu_lm_small", 62, 24 * MIB)
    allocator = make()
    replayed = trace.replay(allocator)
    assert replayed.failed == 0
    assert replayed.peak_bytes_reserved == allocator.sub_allocator.live_bytes > 0
    for address in replayed.addresses[trace.op == 0].tolist():
        allocator.sub_allocator.locate(address)
    allocator.deallocate_many(live_addresses(trace, replayed))


def live_addresses(trace: bfc.Trace, replayed: bfc.Replay) -> list[int]:
    live: dict[int, int] = {}
    for op, number, address in zip(trace.op, trace.id, replayed.addresses, strict=True):
        if op == 0:
            live[int(number)] = int(address)
        else:
            live.pop(int(number), None)
    return list(live.values())
