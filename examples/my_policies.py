"""Two policies written in Python, a buddy allocator and TensorFlow's best fit without its rarer
rules, beside the compiled ones on a recorded run. Needs no GPU.

    $ python examples/my_policies.py
    tensorflow takes  32.00 GiB in   8 calls, uses 29.86 GiB
    best fit   takes  32.00 GiB in   8 calls, uses 29.86 GiB
    pytorch    takes  33.33 GiB in 321 calls, uses 28.23 GiB
    buddy      takes  35.44 GiB in 208 calls, uses 32.32 GiB
"""

import argparse
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bfc
from bfc.study import PythonPolicy, compare
from bfc.units import format_bytes

RUN = Path(__file__).parents[1] / "bench" / "traces" / "gpt2m_adam.npz"
MIB = 1 << 20


class Buddy(PythonPolicy):
    """Blocks of powers of two: halved to serve, and joined when both halves are free."""

    def __init__(self, sub_allocator: bfc.SubAllocator, **options: Any) -> None:
        super().__init__(sub_allocator, **options)
        self.idle: dict[int, set[int]] = defaultdict(set)  # free blocks: addresses by size
        self.busy: dict[int, int] = {}  # blocks in use: sizes by address

    def allocate(self, size: int, stream: int) -> tuple[int, int] | None:
        wanted = 1 << max(size - 1, 511).bit_length()  # at least 512 bytes
        found = min((it for it in self.idle if it >= wanted and self.idle[it]), default=0)
        if not found:
            found = max(wanted, 64 * MIB)
            region = self.take(found)
            if region is None:
                return None
            self.idle[found].add(region[0])
        address = self.idle[found].pop()
        while found > wanted:
            found //= 2
            self.idle[found].add(address + found)
        self.busy[address] = wanted
        return address, wanted

    def free(self, address: int) -> None:
        size = self.busy.pop(address)
        root = max(it for it in self.regions if it <= address)
        while size < self.regions[root]:
            other = root + ((address - root) ^ size)
            if other not in self.idle[size]:
                break
            self.idle[size].remove(other)
            address, size = min(address, other), 2 * size
        self.idle[size].add(address)


class BestFit(PythonPolicy):
    """The smallest free piece that is large enough, in regions that double, as TensorFlow has it
    with allow_growth."""

    def __init__(self, sub_allocator: bfc.SubAllocator, **options: Any) -> None:
        super().__init__(sub_allocator, **options)
        self.idle: list[tuple[int, int]] = []  # free pieces in order: size, address
        self.busy: dict[int, int] = {}  # blocks in use: sizes by address
        self.next_region = 2 * MIB

    def allocate(self, size: int, stream: int) -> tuple[int, int] | None:
        size = -(-size // 256) * 256
        at = bisect_left(self.idle, (size, 0))
        if at == len(self.idle):
            grown = max(self.next_region, 1 << (size - 1).bit_length())
            region = self.take(grown) or self.take(size)
            if region is None:
                return None
            self.next_region = max(grown, 2 * self.next_region)
            self.idle.append(region[::-1])
        nbytes, address = self.idle.pop(at)
        if nbytes >= 2 * size or nbytes - size >= 128 * MIB:
            insort(self.idle, (nbytes - size, address + size))
            nbytes = size
        self.busy[address] = nbytes
        return address, nbytes

    def free(self, address: int) -> None:
        end = address + self.busy.pop(address)
        for size, start in self.idle[:]:
            if start == end and end not in self.regions:
                self.idle.remove((size, start))
                end += size
            elif start + size == address and address not in self.regions:
                self.idle.remove((size, start))
                address = start
        insort(self.idle, (end - address, address))


def tensorflow(source: bfc.SubAllocator) -> bfc.Allocator:
    return bfc.BFCAllocator(source, allow_growth=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", nargs="?", type=Path, default=RUN, help="a trace (.npz)")
    trace = bfc.Trace.load(parser.parse_args().run)
    policies: dict[str, Callable[..., Any]] = {
        "tensorflow": tensorflow,
        "best fit": BestFit,
        "pytorch": bfc.CachingAllocator,
        "buddy": Buddy,
    }
    for row in compare(trace, policies, "80 GiB", passes=1):
        reserved, used = format_bytes(row.peak_bytes_reserved), format_bytes(row.peak_bytes_in_use)
        print(f"{row.policy:10} takes {reserved:>10} in {row.driver_calls:3} calls, uses {used}")


if __name__ == "__main__":
    main()
