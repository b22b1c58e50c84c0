"""Random programs of PyTorch, to be compared between its own allocator and ours.

A script for a process of its own: `python torch_programs.py KIND SEED TURNS [MOVED]` prints what a
program saw as lines of JSON. KIND is "own" or "ours", the caching policy. MOVED streams and pools
are made before, so that those of the program have other numbers. Programs have tensors on three
streams, one of them busy at times, raw memory, MemPools, captures of graphs, limits, histories,
settings and resets. What is printed: each refusal with PyTorch's words, where each block lies in
its segment, every statistic, the segments and their blocks, and what a history has recorded.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 1 << 20
LOOK_EVERY = 50
#: By how much numbers of streams and pools are moved on, to see what hangs on them in PyTorch.
MOVES = (1, 2, 4, 8)
SETTINGS = (
    "max_split_size_mb:64",
    "max_split_size_mb:21,roundup_power2_divisions:4",
    "garbage_collection_threshold:0.6",
    "roundup_power2_divisions:[64:8,256:4,>:1]",
)
Run = Callable[..., str]  #: `torch_runtime.Run`
Act = Callable[["Program"], None]
ACTS: dict[str, tuple[float, Act]] = {}


def act(weight: float) -> Callable[[Act], Act]:
    def keep(function: Act) -> Act:
        ACTS[function.__name__] = weight, function
        return function

    return keep


class Program:
    """A random program, and what it saw."""

    def __init__(self, torch: Any, driver: Any, seed: int) -> None:
        self.torch, self.driver, self.draw = torch, driver, random.Random(seed)
        self.streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
        self.live: list[Any] = []
        self.raw: list[int] = []
        self.pools: list[Any] = []
        self.graphs: list[tuple[Any, list[Any]]] = []
        self.seen: list[Any] = []
        self.records = self.lent = False

    def step(self) -> None:
        names = list(ACTS)
        name = self.draw.choices(names, [ACTS[it][0] for it in names])[0]
        try:
            ACTS[name][1](self)
        except self.torch.cuda.OutOfMemoryError as error:
            self.seen.append([name, str(error).split(" is free.")[0]])
            self.live[:] = self.live[len(self.live) // 2 :]

    def size(self) -> int:
        draw = self.draw
        most = draw.choice([4096, MIB, 2 * MIB, 12 * MIB, 30 * MIB])
        return draw.randrange(1, most)

    def tensor(self) -> Any:
        with self.torch.cuda.stream(self.draw.choice(self.streams)):
            return self.torch.empty(self.size(), dtype=self.torch.uint8, device="cuda")

    def look(self) -> None:
        """Notes all that can be seen of the memory."""
        stats = self.torch.cuda.memory_stats()
        snapshot = self.torch.cuda.memory._snapshot()
        numbers = {stream.cuda_stream: i for i, stream in enumerate(self.streams)}
        ids: dict[tuple[int, int], int] = {(0, 0): 0}  # private pools have numbers of their own
        segments = snapshot["segments"]
        for segment in sorted(segments, key=lambda it: tuple(it["segment_pool_id"])):
            ids.setdefault(tuple(segment["segment_pool_id"]), len(ids))
        plain = []
        for segment in segments:
            row = [ids[tuple(segment["segment_pool_id"])], numbers.get(segment["stream"], -1)]
            row += [segment[key] for key in ("segment_type", "total_size", "allocated_size")]
            row += [segment[key] for key in ("active_size", "requested_size", "is_expandable")]
            blocks = [(it["size"], it["requested_size"], it["state"]) for it in segment["blocks"]]
            plain.append([*row, blocks])
        starts = sorted((it["address"], it["total_size"]) for it in segments)
        lies = [offset(starts, it.data_ptr()) for it in self.live if it.numel()]
        self.seen.append([with_numbers_of_pools(stats)])
        self.seen[-1] += [sorted(plain, key=json.dumps), lies]
        traces = snapshot["device_traces"][0] if self.records else []
        rows = [[it["action"], it["size"], numbers.get(it["stream"], -1)] for it in traces]
        self.seen[-1].append(in_order(rows)[-40:])


def with_numbers_of_pools(stats: dict[str, int]) -> dict[str, int]:
    """Statistics, where private pools have numbers in the place of their ids."""
    prefix = "reserved_bytes_by_private_pools."
    ids = {tuple(map(int, key.split(".")[1].split("_"))) for key in stats if key.startswith(prefix)}
    for number, (first, second) in enumerate(sorted(ids)):
        of_pool, after = f"{prefix}{first}_{second}.", f"{prefix}{number}."
        stats = {key.replace(of_pool, after): stats[key] for key in stats}
    return dict(sorted(stats.items()))


def in_order(rows: list[list[Any]]) -> list[list[Any]]:
    """PyTorch completes frees in the order of a hash of their streams, and empties pools in that of
    a hash of their ids: what comes in one go is sorted."""
    runs = itertools.groupby(rows, key=lambda row: row[0])
    return [
        row
        for action, run in runs
        for row in (sorted(run) if action in ("free_completed", "segment_free") else run)
    ]


def offset(starts: list[tuple[int, int]], address: int) -> int:
    return next(address - at for at, size in starts if at <= address < at + size)


@act(40)
def allocate(it: Program) -> None:
    it.live.append(it.tensor())


@act(36)
def free(it: Program) -> None:
    if it.live:
        it.live.pop(it.draw.randrange(len(it.live)))


@act(1)
def free_many(it: Program) -> None:
    it.draw.shuffle(it.live)
    del it.live[len(it.live) // 3 :]


@act(5)
def use_on_another_stream(it: Program) -> None:
    if it.live:
        it.draw.choice(it.live).record_stream(it.draw.choice(it.streams))


@act(2)
def free_while_a_stream_is_busy(it: Program) -> None:
    """What waits for the stream is looked at, and taken back by a later call."""
    stream = it.draw.choice(it.streams[1:])
    if it.driver is None:  # on a GPU nothing holds a stream back
        return
    it.driver.hold(stream.cuda_stream)
    for _ in range(min(len(it.live), it.draw.randrange(1, 4))):
        it.live.pop(it.draw.randrange(len(it.live))).record_stream(stream)
    it.look()
    it.driver.release(stream.cuda_stream)


@act(2)
def allocate_raw(it: Program) -> None:
    it.raw.append(it.torch.cuda.caching_allocator_alloc(it.size(), 0, it.draw.choice(it.streams)))


@act(2)
def free_raw(it: Program) -> None:
    if it.raw:
        it.torch.cuda.caching_allocator_delete(it.raw.pop(it.draw.randrange(len(it.raw))))


@act(0.6)
def empty_cache(it: Program) -> None:
    it.torch.cuda.empty_cache()


@act(0.5)
def reset(it: Program) -> None:
    it.torch.cuda.reset_peak_memory_stats()
    if it.draw.random() < 0.3:
        it.torch.cuda.reset_accumulated_memory_stats()


@act(0.4)
def limit(it: Program) -> None:
    nbytes = it.draw.choice([200, 300, 500]) * MIB
    it.torch.cuda.set_per_process_memory_fraction(nbytes / it.torch.cuda.mem_get_info()[1])


@act(0.2)
def settings(it: Program) -> None:
    it.torch._C._accelerator_setAllocatorSettings(it.draw.choice(SETTINGS))


@act(0.2)
def history(it: Program) -> None:
    it.records = not it.records
    it.torch.cuda.memory._record_memory_history(
        enabled="all" if it.records else None, context=None, max_entries=100_000
    )


@act(1)
def use_pool(it: Program) -> None:
    if len(it.pools) < 3 and it.draw.random() < 0.5:
        lends = it.draw.random() < 0.3 and not it.lent  # of several, a hash says which one lends
        it.lent |= lends
        no_split = it.draw.random() < 0.3
        it.pools.append(it.torch.cuda.MemPool(use_on_oom=lends, no_split=no_split))
    if it.pools:
        with it.torch.cuda.use_mem_pool(it.draw.choice(it.pools)):
            for _ in range(it.draw.randrange(1, 4)):
                it.live.append(it.torch.empty(it.size(), dtype=it.torch.uint8, device="cuda"))


@act(0.3)
def drop_pool(it: Program) -> None:
    if it.pools:
        it.pools.pop(it.draw.randrange(len(it.pools)))


@act(0.6)
def capture(it: Program) -> None:
    graph, kept = it.torch.cuda.CUDAGraph(), []
    fraction = it.torch.cuda.get_per_process_memory_fraction()
    it.torch.cuda.set_per_process_memory_fraction(1.0)  # a refusal would end the capture
    with it.torch.cuda.graph(graph, stream=it.streams[1]):
        for _ in range(it.draw.randrange(1, 6)):
            kept.append(it.torch.empty(it.size(), dtype=it.torch.uint8, device="cuda"))
            kept[-1].zero_()
            if it.draw.random() < 0.5:
                kept.pop(it.draw.randrange(len(kept)))
    it.torch.cuda.set_per_process_memory_fraction(fraction)
    it.graphs.append((graph, kept))
    graph.replay()


@act(0.5)
def drop_graph(it: Program) -> None:
    if it.graphs:
        it.graphs.pop(it.draw.randrange(len(it.graphs)))


#: For a process that has imported PyTorch already.
SCRIPT = """
import sys
sys.path.insert(0, "tests/helpers")
import torch_programs
torch_programs.main(sys.argv[1], *map(int, sys.argv[2:]))
"""


def differences(run: Run, seed: int, turns: int) -> str:
    """Runs one program on PyTorch's own allocator and on ours. Returns "" or what differed first.

    PyTorch goes through streams that give memory back, and through pools, in the order of a hash of
    their numbers. Ours must see, line by line, what PyTorch sees under some of them.
    """

    def seen(kind: str, moved: int = 0) -> list[str]:
        return run(SCRIPT, kind, str(seed), str(turns), str(moved)).splitlines()

    ours, own = seen("ours"), seen("own")
    if len(own) != len(ours):
        return f"{len(own)} and {len(ours)} lines"
    differing = [number for number, line in enumerate(ours) if line != own[number]]
    for moved in MOVES if differing else ():
        others = seen("own", moved)
        others += [""] * (len(ours) - len(others))
        differing = [number for number in differing if ours[number] != others[number]]
    if not differing:
        return ""
    number = differing[0]
    pair = json.loads(own[number]), json.loads(ours[number])
    return f"line {number}: {first_difference(*pair)}"


def first_difference(one: Any, other: Any, path: str = "") -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = [(key, one.get(key), other.get(key)) for key in {**one, **other}]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(i, *both) for i, both in enumerate(zip(one, other, strict=True))]
    else:
        return f"{path}: {str(one)[:300]} and {str(other)[:300]}"
    return next(first_difference(a, b, f"{path}/{key}") for key, a, b in pairs if a != b)


def main(kind: str, seed: int, turns: int, moved: int = 0) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from bfc.testing import cuda_emulator

    driver = None
    if not os.environ.get("BFC_TEST_GPU"):
        driver = cuda_emulator.load()
        driver.reset(devices=1)
    import torch

    import bfc
    from bfc.integrations._torch_cuda import rules_for

    if kind == "ours":
        rules = rules_for(torch)
        bfc.integrations.torch.install(
            lambda device: bfc.CachingAllocator(
                bfc.CUDASubAllocator(device), strict=True, torch=rules
            )
        )
    for _ in range(moved):
        torch.cuda.Stream()
        torch.cuda.MemPool()
    torch.cuda.reset_accumulated_memory_stats()  # a pool waits for all streams as it goes
    torch.cuda.set_per_process_memory_fraction(300 * MIB / torch.cuda.mem_get_info()[1])
    program = Program(torch, driver, seed)
    for turn in range(turns):
        program.step()
        if turn % LOOK_EVERY == LOOK_EVERY - 1:
            program.look()
    program.look()
    for row in program.seen:
        print(json.dumps(row))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
