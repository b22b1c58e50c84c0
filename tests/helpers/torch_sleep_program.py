"""A random program of PyTorch's tensors, tags and graphs that sleep and wake, while calls fail.

    python torch_sleep_program.py SEED STEPS

With the environment of `torch_runtime.environment` that repeats a run. Contents are compared
whenever something has woken, and at the end nothing is left.
"""

from __future__ import annotations

import gc
import os
import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import bfc
from bfc.testing import cuda_emulator

MIB = 1 << 20
TAGS = ("a", "b")
#: Those by which tags fall asleep and wake, and what a request asks.
CALLS = (
    *("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuMemcpyAsync"),
    "cuMemsetD8Async",
    *("cuStreamSynchronize", "cuCtxSynchronize", "cuEventQuery", "cuEventRecord"),
    *("cuCtxPushCurrent", "cuMemAddressReserve", "cuMemAddressFree", "cuMemHostAlloc"),
)
#: Those of a capture after which PyTorch can end it.
CALLS_OF_CAPTURE = ("cuMemCreate", "cuMemMap", "cuMemSetAccess")
driver = cuda_emulator.load()


class Row(NamedTuple):
    """A tensor; what each of its bytes is, in a list, or None where that is not known; its tag."""

    x: Any
    value: list[int | None]
    tag: str | None


class Graph(NamedTuple):
    """Copies `given`, which has no tag, to `out.x`, by way of memory that it has freed."""

    graph: Any
    given: Any
    out: Row


class Program:
    """The steps, and what must be true of them."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.pool: Any = bfc.integrations.torch.pool()
        self.side = torch.cuda.Stream()
        self.live: list[Row] = []
        self.graphs: list[Graph] = []
        self.counts: Counter[str] = Counter()
        self.dropped: set[str] = set()  # tags that sleep without their contents

    def bytes_of(self, value: int, nbytes: int) -> Any:
        return torch.full((nbytes,), value, dtype=torch.uint8)

    def empty(self, nbytes: int) -> Any:
        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def failing(self, call: Callable[[], Any], calls: tuple[str, ...] = CALLS) -> Any:
        """What a call returns, one of whose calls of the driver may fail; None if it raised."""
        fails = self.draw.random() < 0.3
        if fails:
            driver.fail(self.draw.choice(calls), "CUDA_ERROR_UNKNOWN", at=self.draw.randrange(1, 6))
        try:
            return call()
        except Exception as error:
            if not fails and not re.search("sleeps|memory", str(error)):
                raise
            self.counts["faults"] += fails
            return None
        finally:
            driver.clear()

    # -- steps -------------------------------------------------------------------------------------

    def make(self) -> None:
        tag = self.draw.choice([*TAGS, None])
        stream = self.draw.choice([self.side, torch.cuda.default_stream()])
        nbytes = self.draw.choice([500, 5000, MIB, 5 * MIB])

        def make() -> Any:
            with self.pool.tag(tag), torch.cuda.stream(stream):
                return self.empty(nbytes)

        x = self.failing(make)
        if x is None:
            return
        assert tag not in self.pool.asleep
        value = self.draw.randrange(256)
        with torch.cuda.stream(stream):
            x.copy_(self.bytes_of(value, nbytes))
        if self.draw.random() < 0.3:
            x.record_stream(self.side)
        self.live.append(Row(x, [value], tag))

    def free(self) -> None:
        if self.live:
            self.live.pop(self.draw.randrange(len(self.live)))

    def capture(self) -> None:
        tag = self.draw.choice(TAGS)
        if tag in self.pool.asleep or len(self.graphs) > 4:
            return
        given = self.empty(1 << 16)
        graph = torch.cuda.CUDAGraph()
        others = [it for it in self.graphs if it.out.tag == tag]
        shared = (
            self.draw.choice(others).graph.pool() if others and self.draw.random() < 0.5 else None
        )
        size = self.draw.choice([1 << 16, 3 * MIB])

        def capture() -> Any:
            with (
                self.pool.tag(tag),
                torch.cuda.graph(
                    graph, pool=shared, stream=self.side, capture_error_mode="thread_local"
                ),
            ):
                scratch, out = self.empty(size), self.empty(size)
                scratch[: given.numel()].copy_(given)
                out[: given.numel()].copy_(scratch[: given.numel()])
                del scratch
            return out[: given.numel()]

        torch.cuda.synchronize()
        out = self.failing(capture, CALLS_OF_CAPTURE)
        if out is not None:
            self.graphs.append(Graph(graph, given, Row(out, [None], tag)))
            self.counts["captures"] += 1

    def replay(self) -> None:
        if not self.graphs:
            return
        graph, given, out = self.draw.choice(self.graphs)
        value = self.draw.randrange(256)
        given.copy_(self.bytes_of(value, given.numel()))
        try:
            graph.replay()
        except bfc.AsleepError:
            assert out.tag in self.pool.asleep
            self.counts["refused"] += 1
        else:
            assert out.tag not in self.pool.asleep
            out.value[0] = value
            self.counts["replays"] += 1

    def sleep(self) -> None:
        known = {row.tag for row in self.rows()} & set(TAGS)
        keep = {tag: self.draw.choice(["host", "pinned"]) for tag in sorted(known)}
        drop = [tag for tag in keep if self.draw.random() < 0.4]
        keep = {
            tag: way for tag, way in keep.items() if tag not in drop and self.draw.random() < 0.7
        }
        for row in self.rows():
            if row.tag in drop and row.tag not in self.pool.asleep:
                row.value[0] = None
        awake = set(TAGS) - self.pool.asleep
        self.failing(lambda: self.pool.sleep(keep=keep, drop=drop))
        self.dropped |= self.pool.asleep & awake & set(drop)
        self.counts["sleeps"] += 1

    def wake(self) -> None:
        tags = [tag for tag in sorted(self.pool.asleep) if self.draw.random() < 0.7]
        if tags:
            fill = self.draw.choice([None, self.draw.randrange(256)])
            self.failing(lambda: self.pool.wake(*tags, fill=fill))
            awake = self.dropped - self.pool.asleep
            for row in self.rows() if fill is not None else ():
                if row.tag in awake:
                    row.value[0] = fill
            self.dropped -= awake
            self.counts["wakes"] += 1
            self.check()

    def beside(self, call: Callable[[], None]) -> None:
        """Takes a step while another thread allocates and frees, in tags and outside of them."""
        seed, wrong = self.draw.random(), []

        def work() -> None:
            draw = random.Random(seed)
            for _ in range(8):
                tag = draw.choice([*TAGS, None, None])
                try:
                    with self.pool.tag(tag):
                        x = self.empty(draw.choice([500, MIB]))
                    if tag is None:  # another one may fall asleep
                        value = draw.randrange(256)
                        x.copy_(self.bytes_of(value, x.numel()))
                        if not bool((x.cpu() == value).all()):
                            wrong.append(x.numel())
                except RuntimeError:
                    self.counts["refused elsewhere"] += 1

        thread = threading.Thread(target=work)
        thread.start()
        try:
            call()
        finally:
            thread.join()
        assert not wrong, wrong
        self.counts["beside"] += 1

    # -- what must be true -------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        return [*self.live, *(it.out for it in self.graphs)]

    def check(self) -> None:
        for x, (value,), tag in self.rows():
            if tag not in self.pool.asleep and value is not None:
                assert bool((x.cpu() == value).all()), (tag, value, x.numel())
                self.counts["compared"] += 1

    def step(self) -> None:
        what = self.draw.random()
        if what < 0.36 and len(self.live) < 16:
            self.make()
        elif what < 0.62:
            self.free()
        elif what < 0.66:
            self.capture()
        elif what < 0.72:
            self.replay()
        elif what < 0.74 and self.graphs:
            self.graphs.pop(self.draw.randrange(len(self.graphs)))
        else:
            call = self.sleep if what < 0.86 else self.wake
            if self.draw.random() < 0.25:
                self.beside(call)
                self.check()
            else:
                call()

    def end(self) -> None:
        self.pool.wake()
        self.check()
        self.live.clear()
        self.graphs.clear()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.pool.check()
        stats = self.pool.stats()
        assert stats.bytes_in_use == stats.pool_bytes == stats.bytes_asleep == 0, stats


def main(seed: int, steps: int) -> None:
    driver.reset(devices=1)
    torch.set_num_threads(1)  # what has several waits for them, on a busy machine
    sys.unraisablehook = lambda unraisable: (
        None
    )  # what a callback of the driver's failing calls says
    bfc.integrations.torch.install(
        lambda device: bfc.CachingAllocator(
            bfc.CUDASubAllocator(device), memory_limit="160 MiB", stitch=True
        )
    )
    program = Program(seed)
    for number in range(1, steps + 1):
        try:
            program.step()
        except BaseException as error:
            raise AssertionError(f"torch_sleep_program.py {seed} {number}") from error
    program.end()
    print(dict(program.counts), flush=True)
    os._exit(0)  # whatever the interpreter's end would do to PyTorch's threads


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
