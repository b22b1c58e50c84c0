"""What a call from Python costs: `python -m bench.calls`. The loop around the calls is in the
figure."""

from __future__ import annotations

import timeit

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


def main() -> None:
    say(machine())
    say(f"{'ns':34}{'min / median / max':>24}")
    with bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB")) as allocator:
        names = {
            "allocate_raw": allocator.allocate_raw,
            "deallocate_raw": allocator.deallocate_raw,
            "allocate": allocator.allocate,
            "requested_size": allocator.requested_size,
            "kept": allocator.allocate_raw(1000),
        }
        for label, statement in STATEMENTS.items():
            times = timeit.repeat(statement, globals=names, number=NUMBER, repeat=REPEATS)
            say(f"{label:34}{spread([seconds * 1e9 / NUMBER for seconds in times]):>24}")


if __name__ == "__main__":
    main()
