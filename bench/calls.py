"""What a call from Python costs under each policy: `python -m bench.calls`. The loop around the
calls is in the figure. Repeats of the policies take turns."""

from __future__ import annotations

import timeit
from collections.abc import Callable

import bfc
from bench.report import machine, say, spread

REPEATS, NUMBER = 15, 100_000
STATEMENTS = {
    "deallocate_raw(allocate_raw(n))": "deallocate_raw(allocate_raw(1000))",
    "a Buffer made and dropped": "allocate(1000)",
    "a Buffer made and freed": "allocate(1000).free()",
    "requested_size(ptr)": "requested_size(kept)",
    "the empty loop": "pass",
}
POLICIES: dict[str, Callable[[bfc.SubAllocator], bfc.Allocator]] = {
    "bfc": bfc.BFCAllocator,
    "caching": bfc.CachingAllocator,
}


def main() -> None:
    say(machine())
    say(f"{'ns, min / median / max':34}" + "".join(f"{policy:>26}" for policy in POLICIES))
    allocators = [make(bfc.SimulatedSubAllocator("1 GiB")) for make in POLICIES.values()]
    names = [names_of(allocator) for allocator in allocators]
    for label, statement in STATEMENTS.items():
        spreads = [spread(samples) for samples in time_in_turns(statement, names)]
        say(f"{label:34}" + "".join(f"{text:>26}" for text in spreads))
    for allocator in allocators:
        allocator.close()


def names_of(allocator: bfc.Allocator) -> dict[str, object]:
    """What the statements name."""
    return {
        "allocate_raw": allocator.allocate_raw,
        "deallocate_raw": allocator.deallocate_raw,
        "allocate": allocator.allocate,
        "requested_size": allocator.requested_size,
        "kept": allocator.allocate_raw(1000),
    }


def time_in_turns(statement: str, names: list[dict[str, object]]) -> list[list[float]]:
    """ns a call: the samples of each set of names."""
    timers = [timeit.Timer(statement, globals=each) for each in names]
    samples: list[list[float]] = [[] for _ in timers]
    for _ in range(REPEATS):
        for timer, found in zip(timers, samples, strict=True):
            found.append(timer.timeit(NUMBER) * 1e9 / NUMBER)
    return samples


if __name__ == "__main__":
    main()
