"""Replays a recorded run on devices of several sizes, under both policies: does it fit?
Needs no GPU.

    $ python examples/replay_a_run.py
    gpt2m_adam: 20249 events, 28.23 GiB live at most
    tensorflow on 28 GiB: takes 28.00 GiB, 9 refused
    tensorflow on 30 GiB: takes 30.00 GiB, 3 refused
    tensorflow on 32 GiB: takes 32.00 GiB, fits
    tensorflow on 34 GiB: takes 32.00 GiB, fits
    pytorch    on 28 GiB: takes 27.20 GiB, 3 refused
    pytorch    on 30 GiB: takes 27.20 GiB, 3 refused
    pytorch    on 32 GiB: takes 30.26 GiB, fits
    pytorch    on 34 GiB: takes 33.33 GiB, fits
"""

import argparse
from pathlib import Path

import bfc
from bfc.units import format_bytes

RUN = Path(__file__).parents[1] / "bench" / "traces" / "gpt2m_adam.npz"


def tensorflow(size: str) -> bfc.Allocator:
    return bfc.BFCAllocator(bfc.SimulatedSubAllocator(size), allow_growth=True, strict=True)


def pytorch(size: str) -> bfc.Allocator:
    return bfc.CachingAllocator(bfc.SimulatedSubAllocator(size), strict=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", nargs="?", type=Path, default=RUN, help="a trace (.npz)")
    path = parser.parse_args().run
    trace = bfc.Trace.load(path)
    live = trace.replay(tensorflow("1 TiB")).peak_bytes_live
    print(f"{path.stem}: {len(trace)} events, {format_bytes(live)} live at most")
    for make in (tensorflow, pytorch):
        for size in ("28 GiB", "30 GiB", "32 GiB", "34 GiB"):
            with make(size) as allocator:
                result = trace.replay(allocator)
            verdict = f"{result.failed} refused" if result.failed else "fits"
            taken = format_bytes(result.peak_bytes_reserved)
            print(f"{make.__name__:10} on {size}: takes {taken:>9}, {verdict}")


if __name__ == "__main__":
    main()
