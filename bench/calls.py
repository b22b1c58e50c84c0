"""What a call from Python costs under each policy: `python -m bench.calls`.

The loop around the calls is in the figure. The ratio is to `id(id(n))`, two calls of a builtin that
make a number each. Behind it is the floor, two functions of C that do nothing: each gets a number
and returns it. All take turns.
"""

from __future__ import annotations

import operator
import statistics
import timeit

import bfc
from bench.histories import POLICIES
from bench.report import machine, say, spread

REPEATS, NUMBER = 15, 100_000
STATEMENTS = {
    "deallocate_raw(allocate_raw(n))": "deallocate_raw(allocate_raw(1000))",
    "a Buffer made and dropped": "allocate(1000)",
    "a Buffer made and freed": "allocate(1000).free()",
    "a pair of 0 bytes": "deallocate_raw(allocate_raw(0))",
    "requested_size(ptr)": "requested_size(kept)",
    "the empty loop": "pass",
}
BUILTIN, FLOOR = "id(id(1000))", "index(index(1000))"


def main() -> None:
    say(machine())
    columns = "".join(f"{policy:>24}{'ratio':>7}" for policy in POLICIES)
    say(f"{'ns, min / median / max':32}{columns}{BUILTIN:>24}{FLOOR:>24}")
    allocators = [make(bfc.SimulatedSubAllocator("1 GiB")) for make in POLICIES.values()]
    names = [names_of(allocator) for allocator in allocators]
    for label, statement in STATEMENTS.items():
        others: list[tuple[str, dict[str, object]]]
        others = [(BUILTIN, {}), (FLOOR, {"index": operator.index})]
        *ours, builtin, floor = time_in_turns([(statement, each) for each in names] + others)
        cells = "".join(f"{spread(each):>24}{ratio(each, builtin):7.2f}" for each in ours)
        say(f"{label:32}{cells}{spread(builtin):>24}{spread(floor):>24}")
    for allocator in allocators:
        allocator.close()


def ratio(samples: list[float], others: list[float]) -> float:
    return statistics.median(samples) / statistics.median(others)


def names_of(allocator: bfc.Allocator) -> dict[str, object]:
    """What the statements name."""
    return {
        "allocate_raw": allocator.allocate_raw,
        "deallocate_raw": allocator.deallocate_raw,
        "allocate": allocator.allocate,
        "requested_size": allocator.requested_size,
        "kept": allocator.allocate_raw(1000),
    }


def time_in_turns(statements: list[tuple[str, dict[str, object]]]) -> list[list[float]]:
    """ns a call: the samples of each statement, with what it names."""
    timers = [timeit.Timer(statement, globals=names) for statement, names in statements]
    samples: list[list[float]] = [[] for _ in timers]
    for _ in range(REPEATS):
        for timer, found in zip(timers, samples, strict=True):
            found.append(timer.timeit(NUMBER) * 1e9 / NUMBER)
    return samples


if __name__ == "__main__":
    main()
