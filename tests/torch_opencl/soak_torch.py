"""Random programs of tensors on opencl beside the same ones on the CPU, for as long as it is told:
`SOAK_SECONDS=3600 make soak-torch`. Contents are compared.

Each round is a process of its own with several threads, two devices and little memory. Depending on
its seed, OpenCL's calls fail now and then, Ctrl-C comes at any time, the process forks, or it ends
with tensors alive. `python tests/torch_opencl/soak_torch.py --round SEED` repeats one.
"""

from __future__ import annotations

import copy
import faulthandler
import gc
import io
import os
import pickle
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "helpers"), str(Path(__file__).parents[2])]
# Two devices. PoCL 3.0's device "basic" will not do: with several threads on a queue, its
# clFinish returns too early.
os.environ["POCL_DEVICES"] = "pthread pthread"

import pocl  # noqa: E402
import pyopencl as cl  # noqa: E402
import torch  # noqa: E402

from bfc.integrations import torch_opencl  # noqa: E402

LIMIT, KEPT, STEPS, THREADS = "48 MiB", 12, 600, 4
ROUND_SECONDS = 120
KINDS = ("plain", "failing", "interrupted", "forking", "ending")
#: The calls of OpenCL that fail in rounds of that kind, one in so many.
FAILING = ("enqueue_copy", "enqueue_nd_range_kernel", "enqueue_marker", "enqueue_barrier")
ONE_IN = 40
SIZES = ((1, 1), (1, 7), (3, 128), (64, 7), (64, 128), (200, 1), (200, 128), (300, 1200))
SPAN = 100_000  # items, where a tensor grows
TYPES = (torch.float32, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)

Pair = tuple[torch.Tensor, torch.Tensor]  # on opencl, and what it must hold


class FailedOnPurposeError(Exception):
    """A call of OpenCL that failed on purpose."""


def same(there: torch.Tensor, here: torch.Tensor) -> bool:
    """Whether two tensors hold the same values."""
    return there.dtype == here.dtype and torch.equal(there.detach().cpu(), here.detach())


class Worker:
    """One thread's tensors, each with its twin on the CPU, and what it does with them."""

    def __init__(self, seed: int, shared: list[Pair], kind: str) -> None:
        self.dice = random.Random(seed)
        self.shared = shared
        self.kind = kind
        self.pairs: list[Pair] = []
        self.streams = [torch.Stream(f"opencl:{i % 2}") for i in range(4)]
        self.operations = 0

    def step(self) -> None:
        action = self.dice.choice(ACTIONS)
        if len(self.pairs) >= KEPT or not self.pairs:
            action = Worker.make if not self.pairs else Worker.drop
        action(self)
        self.operations += 1

    def run(self, steps: int) -> None:
        for _ in range(steps):
            try:
                self.step()
            except (torch.OutOfMemoryError, KeyboardInterrupt):
                self.rescue()
            except Exception as error:
                if not is_on_purpose(error):
                    raise
                self.rescue()

    def rescue(self) -> None:
        """What a program does that goes on: it drops half of what it has."""
        del self.pairs[len(self.pairs) // 2 :]

    def pick(self) -> Pair:
        return self.dice.choice(self.pairs)

    def keep(self, there: torch.Tensor, here: torch.Tensor) -> None:
        assert same(there, here), "other contents"
        self.pairs.append((there, here))

    def take(self, there: torch.Tensor, here: torch.Tensor) -> None:
        """The same of a computation, which may round otherwise; its twin is then what came out."""
        found = there.detach().cpu()
        assert torch.allclose(found, here, rtol=1e-4, atol=1e-4), "another result"
        self.pairs.append((there, found))

    def place(self) -> str:
        return self.dice.choice(("opencl:0", "opencl:1"))

    # -- what it does ------------------------------------

    def make(self) -> None:
        rows, columns = self.dice.choice(SIZES)
        here = torch.randint(0, 9, (rows, columns)).to(self.dice.choice(TYPES))
        pinned = here.pin_memory() if self.dice.random() < 0.3 else here
        there = pinned.to(self.place(), non_blocking=True)
        self.keep(there, here)

    def drop(self) -> None:
        there, here = self.pairs.pop(self.dice.randrange(len(self.pairs)))
        assert same(there, here), "other contents"

    def move(self) -> None:
        there, here = self.pick()
        kind = self.dice.choice(TYPES)
        self.keep(there.to(self.place(), kind), here.to(kind))

    def compute(self) -> None:
        there, here = self.pick()
        function = self.dice.choice(FUNCTIONS)
        there, here = there.float().remainder(9), here.float().remainder(9)
        self.take(function(there), function(here))

    def view(self) -> None:
        there, here = self.pick()
        function = self.dice.choice(VIEWS)
        self.keep(function(there).clone(), function(here).clone())

    def write(self) -> None:
        """Writes into a slice. Where that is broken off, nobody knows what was written."""
        at = self.dice.randrange(len(self.pairs))
        there, here = self.pairs.pop(at)
        there, here = there.clone(), here.clone()
        number = self.dice.randrange(9)
        for side in (there, here):
            side[::2].fill_(number)
            side.t()[:1].copy_(side.t()[-1:].clone())
        self.keep(there, here)

    def on_a_stream(self) -> None:
        there, here = self.pick()
        if here.dtype != torch.float32:
            return
        stream = self.dice.choice([s for s in self.streams if s.device == there.device])
        home = torch.opencl.current_stream(there.device)
        stream.wait_stream(home)
        with stream:
            found = there + there
            there.record_stream(stream)
        home.wait_stream(stream)
        found.record_stream(home)
        self.take(found, here + here)

    def back_without_waiting(self) -> None:
        there, here = self.pick()
        room = torch.empty_like(here).pin_memory()
        room.copy_(there, non_blocking=True)
        torch.opencl.synchronize(there.device)
        assert torch.equal(room, here), "other contents"

    def give_away(self) -> None:
        self.shared.append(self.pairs.pop(self.dice.randrange(len(self.pairs))))

    def receive(self) -> None:
        try:
            there, here = self.shared.pop()
        except IndexError:
            return
        self.keep(there, here)

    def serialise(self) -> None:
        there, here = self.pick()
        way = self.dice.randrange(3)
        if way == 0:
            twin = pickle.loads(pickle.dumps(there))
        elif way == 1:
            twin = copy.deepcopy(there)
        else:
            file = io.BytesIO()
            torch.save(there, file)
            file.seek(0)
            twin = torch.load(file, map_location=self.place())
        self.keep(twin, here)

    def differentiate(self) -> None:
        there, here = (side.float().remainder(9) for side in self.pick())
        there.requires_grad_()
        here.requires_grad_()
        if self.dice.random() < 0.5:
            there.register_hook(fail_on_purpose)
            try:
                (there * there).relu().sum().backward()
            except FailedOnPurposeError:
                return
            raise AssertionError("the hook's exception is gone")
        for side in (there, here):
            (side * side).relu().sum().backward()
        assert there.grad is not None
        assert here.grad is not None
        self.take(there.grad, here.grad)

    def ask_for_too_much(self) -> None:
        """The snippet that everyone writes."""
        nbytes = 64 << 20
        while True:
            try:
                big = torch.empty(nbytes, dtype=torch.uint8, device=self.place())
                break
            except torch.opencl.OutOfMemoryError:
                torch.opencl.empty_cache()
                nbytes //= 2
        number = self.dice.randrange(256)
        big[-1000:].fill_(number)
        assert big[-1000:].cpu().eq(number).all()

    def look(self) -> None:
        found = torch.opencl.memory_stats(self.place())
        assert found["invalid_frees"] == 0
        way = self.dice.randrange(4)
        if way == 0:
            torch.opencl.memory_summary(self.place())
        elif way == 1:
            torch.opencl._snapshot(self.place())
        elif way == 2:
            torch.opencl.reset_peak_memory_stats(self.place())
        else:
            torch.opencl.empty_cache()

    def grow(self) -> None:
        there, here = (side.flatten().clone() for side in self.pick())
        for side in (there, here):
            kept = side.numel()
            side.resize_(2 * kept + 3)
            side[kept:].fill_(1)
        self.keep(there[None, :SPAN], here[None, :SPAN])

    def share(self) -> None:
        try:
            self.pick()[0].share_memory_()
        except (RuntimeError, NotImplementedError):
            return

    def fork(self) -> None:
        if self.kind != "forking" or self.dice.random() < 0.7:
            return
        there, _ = self.pick()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            code = 1
            try:
                there.cpu()
            except RuntimeError as error:
                code = 0 if "forked" in str(error) else 2
            del there
            self.pairs.clear()
            self.shared.clear()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "in the child"


ACTIONS: list[Callable[[Worker], None]] = [
    *(Worker.make, Worker.make, Worker.drop, Worker.move, Worker.compute, Worker.compute),
    *(Worker.view, Worker.write, Worker.on_a_stream, Worker.back_without_waiting),
    *(Worker.give_away, Worker.receive, Worker.serialise, Worker.differentiate),
    *(Worker.ask_for_too_much, Worker.look, Worker.grow, Worker.share, Worker.fork),
]
FUNCTIONS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x + x,
    lambda x: x * 3 - x,
    lambda x: (x / 2).relu(),
    lambda x: x[:20] @ x[:20].t(),
    lambda x: x.sum(1),
    lambda x: x.softmax(1),
    lambda x: x.cumsum(0),
    lambda x: x.sort(1).values,
    lambda x: torch.cat([x, x.relu()]),
]
VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x.t(),
    lambda x: x[::2],
    lambda x: x[-1:].expand(3, -1),
    lambda x: x.flatten()[1:],
    lambda x: x.diagonal(),
]
# All have two dimensions again, for the next step.
VIEWS = [lambda x, view=view: torch.atleast_2d(view(x)) for view in VIEWS]  # type: ignore[misc]
FUNCTIONS = [lambda x, f=f: torch.atleast_2d(f(x)) for f in FUNCTIONS]  # type: ignore[misc]


def fail_on_purpose(gradient: torch.Tensor) -> None:
    raise FailedOnPurposeError


# -- what goes wrong outside ---------------------------------------------------------------------


def is_on_purpose(error: BaseException | None) -> bool:
    while error is not None:
        if "on purpose" in str(error) or isinstance(error, FailedOnPurposeError):
            return True
        error = error.__cause__ or error.__context__
    return False


def let_calls_fail(seed: int) -> None:
    dice = random.Random(seed)

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if dice.randrange(ONE_IN) == 0:
                raise cl.RuntimeError("clSomething failed on purpose: OUT_OF_RESOURCES")
            return function(*arguments, **named)

        return call

    for name in FAILING:
        setattr(cl, name, failing(getattr(cl, name)))


def interrupt(seed: int, until: threading.Event) -> None:
    dice = random.Random(seed)
    while not until.wait(dice.random() * 0.05):
        os.kill(os.getpid(), signal.SIGINT)


# -- rounds ---------------------------------------------------------------------


def play(seed: int) -> None:
    kind = KINDS[seed % len(KINDS)]
    faulthandler.dump_traceback_later(ROUND_SECONDS, exit=True)
    torch.set_num_threads(1)
    pocl.start()
    torch.manual_seed(seed)
    policy: Any = "bfc" if seed % 7 == 0 else "caching"
    torch_opencl.enable(LIMIT, policy=policy)
    shared: list[Pair] = []
    workers = [Worker(seed * 100 + i, shared, kind) for i in range(THREADS)]
    if kind == "failing":
        let_calls_fail(seed)
    faults = play_in_threads(workers, kind, seed)
    print(sum(worker.operations for worker in workers), "operations", flush=True)
    if faults:
        os._exit(1)
    if kind == "ending":
        return  # tensors live on
    finish(workers, shared, kind)


def play_in_threads(workers: list[Worker], kind: str, seed: int) -> list[str]:
    faults: list[str] = []

    def work(worker: Worker) -> None:
        try:
            worker.run(STEPS)
        except BaseException:
            faults.append(traceback.format_exc())
            print(faults[-1], file=sys.stderr, flush=True)

    others = workers[1:] if kind == "interrupted" else workers
    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in others]
    for thread in threads:
        thread.start()
    if kind == "interrupted":
        play_interrupted(workers[0], seed)
    for thread in threads:
        thread.join()
    return faults


def play_interrupted(worker: Worker, seed: int) -> None:
    over = threading.Event()
    killer = threading.Thread(target=interrupt, args=(seed, over), daemon=True)
    killer.start()
    while worker.operations < STEPS:
        try:
            worker.run(STEPS - worker.operations)
        except KeyboardInterrupt:  # while it took the last one
            continue
    while killer.is_alive():
        try:
            over.set()
            killer.join()
        except KeyboardInterrupt:
            continue


def finish(workers: list[Worker], shared: list[Pair], kind: str) -> None:
    """What is left holds what it must, and nothing is allocated once it is dropped."""
    for worker in workers:
        for there, here in [*worker.pairs, *shared]:
            try:
                assert same(there, here), "other contents"
            except Exception as error:
                if not is_on_purpose(error):
                    raise
        worker.pairs.clear()
        worker.streams.clear()
    shared.clear()
    there = here = None
    gc.collect()
    for device in range(2):
        torch.opencl.pool(device).check()
        held = torch.opencl.memory_allocated(device)
        assert held == 0, f"{held} bytes are still allocated on opencl:{device}"


def main() -> int:
    if sys.argv[1:2] == ["--round"]:
        play(int(sys.argv[2]))
        return 0
    seed = secrets.randbelow(1 << 30)
    print("from seed", seed, flush=True)
    until = time.monotonic() + float(os.environ.get("SOAK_SECONDS", "3600"))
    rounds = operations = failed = 0
    while time.monotonic() < until:
        command = [sys.executable, "-X", "faulthandler", __file__, "--round", str(seed)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=2 * ROUND_SECONDS, check=False
            )
            code, said = done.returncode, done.stdout + done.stderr
            count = done.stdout.split()
            operations += int(count[0]) if count and count[0].isdigit() else 0
        except subprocess.TimeoutExpired as error:
            code, said = -1, f"it hangs: {error.stderr!r}"
        if code:
            failed += 1
            print(f"\n{' '.join(command[3:])} ({KINDS[seed % len(KINDS)]}): {code}\n{said[-4000:]}")
        rounds, seed = rounds + 1, seed + 1
        print(rounds, "rounds,", operations, "operations", file=sys.stderr, flush=True)
    print(f"{rounds} rounds, {failed} failed\n{operations} operations")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
