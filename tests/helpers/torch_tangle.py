"""Threads that ask PyTorch's allocator for all that they can at once, again and again.

    python torch_tangle.py KIND TRIES [SEED]

Each try starts threads that are chosen anew, and waits for all of them: one that takes longer than
PATIENCE ends the process with the stacks of all threads, and the line that repeats the try was the
last one printed. Nothing may be lost either: each tenth try all memory goes back.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import random
import sys
import threading
import time
from collections.abc import Callable

import torch

import bfc
from bfc.testing import cuda_emulator

PATIENCE = 300  # as much as a busy machine may need
MIB = 1 << 20
STEPS = 8
LIMIT = 32
driver = cuda_emulator.load()
holding_python = ctypes.PyDLL(None)  # its calls keep the GIL


class OwnError(Exception):
    """Raised on purpose."""


def some(draw: random.Random) -> torch.Tensor:
    nbytes = draw.choice((512, 9000, MIB, 3 * MIB, 5 * MIB, 11 * MIB))
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


class Tangle:
    def __init__(self, kind: str) -> None:
        self.streams = [torch.cuda.Stream() for _ in range(3)]
        self.pool = bfc.integrations.torch.pool()
        self.capturing = threading.Lock()
        self.refused = 0
        self.roles: list[Callable[[random.Random], None]] = [
            self.allocate,
            self.use_on_streams,
            self.hold_a_stream,
            self.go_backwards,
            self.look,
            self.empty,
            self.record,
            self.use_a_pool,
            self.capture,
            self.keep_the_gil,
            self.be_busy,
        ]
        if kind != "caching":
            self.roles += [self.use_a_tag] * 2

    # -- what a thread does ------------------------------------------------------------------------

    def allocate(self, draw: random.Random) -> None:
        live: list[torch.Tensor] = []
        for _ in range(STEPS):
            if live and draw.random() < 0.4:
                live.pop(draw.randrange(len(live)))
            with torch.cuda.stream(draw.choice(self.streams)):
                live.append(some(draw))

    def use_on_streams(self, draw: random.Random) -> None:
        for _ in range(STEPS):
            some(draw).record_stream(draw.choice(self.streams))

    def hold_a_stream(self, draw: random.Random) -> None:
        stream = draw.choice(self.streams).cuda_stream
        driver.hold(stream)
        try:
            time.sleep(draw.random() / 1000)
        finally:
            driver.release(stream)

    def go_backwards(self, draw: random.Random) -> None:
        """Threads of autograd's allocate."""
        x = torch.empty(1 << 18, device="cuda", requires_grad=True)
        for _ in range(2):
            (x * 2 + some(draw)[:1]).sum().backward()

    def look(self, draw: random.Random) -> None:
        torch.cuda.memory_stats()
        torch.cuda.memory_snapshot()
        torch.cuda.mem_get_info()

    def empty(self, draw: random.Random) -> None:
        torch.cuda.empty_cache()

    def record(self, draw: random.Random) -> None:
        torch.cuda.memory._record_memory_history(max_entries=50)
        some(draw)
        torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)

    def use_a_pool(self, draw: random.Random) -> None:
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):  # one pool is used by one thread
            for _ in range(STEPS):
                some(draw)
            if draw.random() < 0.3:
                raise OwnError

    def capture(self, draw: random.Random) -> None:
        with self.capturing:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                kept = [some(draw) for _ in range(3)]
                del kept[1]
            graph.replay()

    def keep_the_gil(self, draw: random.Random) -> None:
        for _ in range(3):
            holding_python.usleep(draw.randrange(1500))
            some(draw)

    def be_busy(self, draw: random.Random) -> None:
        sum(number for number in range(20_000))
        some(draw)

    def use_a_tag(self, draw: random.Random) -> None:
        with self.pool.tag(draw.choice(("weights", "cache"))):
            for _ in range(STEPS):
                some(draw)
            if draw.random() < 0.3:
                raise OwnError

    # -- a try -------------------------------------------------------------------------------------

    def attempt(self, number: int, seed: int) -> None:
        draw = random.Random(f"{seed} {number}")
        chosen = [draw.choice(self.roles) for _ in range(draw.randrange(2, 6))]
        print(f"{seed} {number}: {', '.join(it.__name__ for it in chosen)}", file=sys.stderr)
        wrong: list[BaseException] = []
        starts = threading.Barrier(len(chosen))

        def run(role: Callable[[random.Random], None], own: random.Random) -> None:
            try:
                starts.wait()
                role(own)
            except (OwnError, torch.OutOfMemoryError) as error:
                self.refused += isinstance(error, torch.OutOfMemoryError)
            except RuntimeError as error:
                # what a capture in another thread makes of a call is not our concern
                if "captur" not in str(error):
                    wrong.append(error)
            except BaseException as error:
                wrong.append(error)

        threads = [
            threading.Thread(target=run, args=(role, random.Random(draw.random())))
            for role in chosen
        ]
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if wrong:
            raise wrong[0]
        if number % 10 == 0:
            self.check()
        faulthandler.cancel_dump_traceback_later()

    def check(self) -> None:
        driver.release_all()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.pool.check()
        assert torch.cuda.memory_allocated() == 0, torch.cuda.memory_summary()


def main(kind: str, tries: int, seed: int) -> None:
    driver.reset(devices=1)
    bfc.integrations.torch.install(
        lambda device: bfc.CachingAllocator(
            bfc.CUDASubAllocator(device),
            settings="expandable_segments:True" if kind == "expandable" else "",
            stitch=kind == "stitch",
            memory_limit=LIMIT * MIB,
        )
    )
    tangle = Tangle(kind)
    tangle.record(random.Random(0))  # it imports half of PyTorch when it is first called
    for number in range(1, tries + 1):
        tangle.attempt(number, seed)
    tangle.check()
    print(f"{tries} tries, {tangle.refused} requests refused", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1)
