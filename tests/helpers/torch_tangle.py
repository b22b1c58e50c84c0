"""Threads that ask PyTorch's allocator for all that they can at once, again and again.

    python torch_tangle.py KIND TRIES [SEED]

Each try starts threads that are chosen anew, and waits for all of them: one that takes longer than
PATIENCE ends the process with the stacks of all threads, and the line that repeats the try was the
last one printed. Threads fork, load data by other processes, raise errors where it hurts, and have
a call of the driver fail once, which whoever made it may be told of by PyTorch's own error. Nothing
may be lost either: each tenth try all memory goes back. In the end the process exits with live
tensors, some of them in use on a stream, while threads allocate.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

import bfc
from bfc.testing import cuda_emulator

PATIENCE = 300  # as much as a busy machine may need
MIB = 1 << 20
STEPS = 8
LIMIT = 32
#: Calls that fail once: those for memory, those by which frees wait, and those of captures.
FAIL = (
    "cuMemAlloc",
    "cuMemFree",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuCtxSynchronize",
    "cuStreamIsCapturing",
    "cuMemGetInfo",
)
driver = cuda_emulator.load()
holding_python = ctypes.PyDLL(None)  # its calls keep the GIL


class OwnError(Exception):
    """Raised on purpose."""


class Refusing(torch.autograd.Function):
    """Raises while a thread of autograd's goes backwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        torch.empty(MIB, device="cuda")
        raise OwnError


def some(draw: random.Random) -> torch.Tensor:
    nbytes = draw.choice((512, 9000, MIB, 3 * MIB, 5 * MIB, 11 * MIB))
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


class Tangle:
    def __init__(self, kind: str) -> None:
        self.streams = [torch.cuda.Stream() for _ in range(3)]
        self.pool = bfc.integrations.torch.pool()
        self.capturing = threading.Lock()
        self.seen: Counter[str] = Counter()
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
            self.fail_a_call,
            self.fork,
        ]
        self.rare = [self.load_data]  # starts a process
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
        if draw.random() < 0.3:
            Refusing.apply(x).sum().backward()

    def load_data(self, draw: random.Random) -> None:
        """Its process is forked after CUDA was used, and a thread pins what that sends."""
        rows = [torch.zeros(1000) for _ in range(4)]
        loader: DataLoader[torch.Tensor] = DataLoader(rows, 2, num_workers=1, pin_memory=True)
        for number, batch in enumerate(loader):
            batch.to("cuda", non_blocking=True)
            if number == 0 and draw.random() < 0.3:
                raise OwnError  # the process and the thread end with the loader
        self.seen["loaders"] += 1

    def fork(self, draw: random.Random) -> None:
        """The child may use no CUDA, as with PyTorch's own, but let go of what it has inherited."""
        live = [some(draw) for _ in range(3)]
        live[0].record_stream(draw.choice(self.streams))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                some(draw)
            except RuntimeError as error:
                code = 0 if "fork" in str(error) else 2
            live.clear()
            gc.collect()
            os._exit(code)
        self.wait_for(child)
        self.seen["forks"] += 1

    @staticmethod
    def wait_for(child: int) -> None:
        until = time.monotonic() + PATIENCE / 2
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > until:
                os.kill(child, signal.SIGABRT)  # its stack is printed
                ended = os.waitpid(child, 0)
                break
            time.sleep(0.002)
        assert ended[1] == 0, f"the child ended with {os.waitstatus_to_exitcode(ended[1])}"

    def fail_a_call(self, draw: random.Random) -> None:
        """Whichever thread makes it."""
        driver.fail(draw.choice(FAIL), "CUDA_ERROR_UNKNOWN", at=draw.randrange(1, 8))
        self.allocate(draw)

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
                if draw.random() < 0.2:
                    raise OwnError
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
        if draw.random() < 0.05:
            chosen.append(draw.choice(self.rare))
        print(f"{seed} {number}: {', '.join(it.__name__ for it in chosen)}", file=sys.stderr)
        wrong: list[BaseException] = []
        starts = threading.Barrier(len(chosen))

        def run(role: Callable[[random.Random], None], own: random.Random) -> None:
            starts.wait()
            try:
                role(own)
            except BaseException as error:
                if not self.expects(error, chosen):
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
        driver.clear()
        if number % 10 == 0:
            self.check()
        faulthandler.cancel_dump_traceback_later()

    def expects(self, error: BaseException, chosen: list[Callable[[random.Random], None]]) -> bool:
        """Whether a thread may be told that. What a capture in another thread makes of a call is
        not our concern."""
        if isinstance(error, (OwnError, torch.OutOfMemoryError)):
            self.seen["refused"] += isinstance(error, torch.OutOfMemoryError)
            return True
        told = isinstance(error, RuntimeError) and "unknown" in str(error).lower()
        if told and self.fail_a_call in chosen:
            self.seen["told of a failed call"] += 1
            return True
        return isinstance(error, RuntimeError) and "captur" in str(error)

    def check(self) -> None:
        driver.release_all()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.pool.check()
        # A thread of autograd's lets go of what it has some milliseconds after who waits for it is
        # told of an error: under PyTorch's own allocator, too.
        until = time.monotonic() + PATIENCE / 2
        while torch.cuda.memory_allocated() and time.monotonic() < until:
            time.sleep(0.001)
        assert torch.cuda.memory_allocated() == 0, torch.cuda.memory_summary()


def main(kind: str, tries: int, seed: int) -> None:
    faulthandler.enable()
    sys.unraisablehook = lambda it: None  # a free that failed is told there
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
    counts = (f", {many} {what}" for what, many in sorted(tangle.seen.items()))
    print(f"{tries} tries{''.join(counts)}", flush=True)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    leave(tangle, seed)


kept: list[torch.Tensor] = []


def leave(tangle: Tangle, seed: int) -> None:
    """Has threads allocate for as long as there are threads, and lets go of nothing."""
    side = tangle.streams[0]
    driver.hold(side.cuda_stream)
    kept.extend(torch.empty(MIB, device="cuda", requires_grad=True) for _ in range(3))
    kept[0].detach().record_stream(side)

    def work(draw: random.Random) -> None:
        while True:
            for role in (tangle.allocate, tangle.use_on_streams, tangle.go_backwards):
                try:
                    role(draw)
                except (OwnError, RuntimeError):
                    pass

    for number in range(3):
        draw = random.Random(f"{seed} leaves {number}")
        threading.Thread(target=work, args=(draw,), daemon=True).start()
    time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1)
