"""How small a device does a recorded run fit on, under several settings of PyTorch's allocator?
Takes an .npz trace, or a memory snapshot of PyTorch (.pickle). Needs no GPU.

    $ python examples/which_settings_help.py
    gpt2s_varlen uses 32.0 GiB at most
    no settings                       fits on 35.00 GiB, with 109 segments taken
    roundup_power2_divisions:4        fits on 34.25 GiB, with 114 segments taken
    max_split_size_mb:128             fits on 32.75 GiB, with 701 segments taken
    max_split_size_mb:32              fits on 33.00 GiB, with 1150 segments taken
"""

import argparse
from pathlib import Path

import bfc

RUN = Path(__file__).parents[1] / "bench" / "traces" / "gpt2s_varlen.npz"
GIB = 1 << 30
SETTINGS = (
    "",
    "roundup_power2_divisions:4",
    "max_split_size_mb:128",
    "max_split_size_mb:32",
)


def replayed(trace: bfc.Trace, nbytes: int, settings: str) -> tuple[bfc.Replay, int]:
    """The replay, and how many segments were taken from the device."""
    device = bfc.SimulatedSubAllocator(nbytes)
    with bfc.CachingAllocator(device, settings=settings, strict=True) as allocator:
        return trace.replay(allocator), allocator.memory_stats()["num_device_alloc"]


def smallest(trace: bfc.Trace, settings: str, least: int, most: int) -> int:
    """A size from `least` to `most` that the trace fits on; it fails on a quarter GiB less."""
    step = GIB // 4
    low, high = least // step, -(-most // step)  # too small, large enough
    while high - low > 1:
        middle = (low + high) // 2
        if replayed(trace, middle * step, settings)[0].failed:
            low = middle
        else:
            high = middle
    return high * step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", nargs="?", type=Path, default=RUN)
    path = parser.parse_args().run
    is_pickle = path.suffix in (".pickle", ".pkl")
    trace = bfc.Trace.from_torch(path) if is_pickle else bfc.Trace.load(path)
    unlimited, _ = replayed(trace, 1 << 50, "")
    live, most = unlimited.peak_bytes_live, 2 * unlimited.peak_bytes_reserved
    print(f"{path.stem} uses {live / GIB:.1f} GiB at most")
    for settings in SETTINGS:
        size = smallest(trace, settings, live, most)
        _, segments = replayed(trace, size, settings)
        print(
            f"{settings or 'no settings':33} fits on {size / GIB:5.2f} GiB, "
            f"with {segments} segments taken"
        )


if __name__ == "__main__":
    main()
