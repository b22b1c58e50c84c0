"""What an owner costs: `python -m bench.owners`.

A pair of `allocate_raw` and `deallocate_raw` under each policy: before any owner was named in the
process, outside of every scope, and within one. The last two take turns, and the last column is
the difference of their medians. Then the `with` statement, around nothing.
"""

from __future__ import annotations

import statistics
import timeit

import bfc
from bench.histories import POLICIES
from bench.report import machine, say, spread

REPEATS, NUMBER = 301, 5_000
PAIR = "deallocate_raw(allocate_raw(1000))"
SCOPE = "with owner:\n    pass"


def main() -> None:
    say(machine())
    allocators = {name: make(bfc.SimulatedSubAllocator("1 GiB")) for name, make in POLICIES.items()}
    timers = {name: timer_of(allocator) for name, allocator in allocators.items()}
    never = {name: [sample(timer) for _ in range(REPEATS)] for name, timer in timers.items()}
    columns = "".join(f"{column:>24}" for column in ("never named", "no owner", "one owner"))
    say(f"{'ns, min / median / max':24}{columns}{'difference':>12}")
    for name, timer in timers.items():
        none, one = in_turns(timer)
        cells = "".join(f" {spread(each):>23}" for each in (never[name], none, one))
        more = statistics.median(one) - statistics.median(none)
        say(f"{'a raw pair, ' + name:24}{cells}{more:12.1f}")
    timer = timeit.Timer(SCOPE, globals={"owner": bfc.owner("benchmark")})
    say(f"{'with owner: pass':24}{spread([sample(timer) for _ in range(REPEATS)]):>24}")
    timer = timeit.Timer(SCOPE.replace("owner:", "owner('a'):"), globals={"owner": bfc.owner})
    say(f"{'with bfc.owner(...):':24}{spread([sample(timer) for _ in range(REPEATS)]):>24}")
    for allocator in allocators.values():
        allocator.close()


def timer_of(allocator: bfc.Allocator) -> timeit.Timer:
    allocator.allocate_raw(1000)
    names = {"allocate_raw": allocator.allocate_raw, "deallocate_raw": allocator.deallocate_raw}
    return timeit.Timer(PAIR, globals=names)


def in_turns(timer: timeit.Timer) -> tuple[list[float], list[float]]:
    """The samples without an owner, and within the scope of one."""
    none, one = [], []
    for _ in range(REPEATS):
        none.append(sample(timer))
        with bfc.owner("benchmark"):
            one.append(sample(timer))
    return none, one


def sample(timer: timeit.Timer) -> float:
    """ns a statement."""
    return timer.timeit(NUMBER) * 1e9 / NUMBER


if __name__ == "__main__":
    main()
