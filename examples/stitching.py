"""What do fragments cost, and what helps? Replays recorded runs under PyTorch's policy, with its
default settings and with expandable segments, and with pages that are stitched together
(virtual_memory=True, pages of 2 MiB). Takes .npz traces, or all those of the checkout. Needs no
GPU.

    $ python examples/stitching.py
    Each run is played twice. For each policy: the peak of reserved bytes on 80 GiB, and the
    smallest device, both divided by the peak of live bytes; and whether the run completes
    on a device of 102% of that peak.
    run                    GiB  default                expandable             stitched
    gpt2m_adam           28.23  1.181 1.075 refused    1.058 1.005 completes  1.000 1.005 completes
    gpt2s_varlen         32.01  1.734 1.185 refused    1.062 1.005 completes  1.001 1.005 completes
    gpu_decomfl           1.66  1.064 1.050 refused    1.015 1.015 completes  1.004 1.005 completes
    gpu_lm_small          3.03  1.164 1.165 refused    1.169 1.025 refused    1.002 1.005 completes
    llama7b_zero3_lro    10.75  1.411 1.175 refused    1.164 1.020 completes  1.040 1.010 completes
    llm_decode_kv         5.42  1.100 1.075 refused    1.055 1.030 refused    1.010 1.015 completes
    moe_dynamic          33.43  1.129 1.045 refused    1.031 1.035 refused    1.004 1.010 completes
    resnet50_multiscale  25.84  1.773 1.035 refused    1.004 1.005 completes  1.001 1.005 completes
    unet_buckets         23.63  1.108 1.055 refused    1.008 1.010 completes  1.006 1.010 completes
"""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

import bfc

TRACES = Path(__file__).parents[1] / "bench" / "traces"
GIB = 1 << 30
#: The device on which all three are tried, and the steps in which the smallest is looked for.
DEVICE, STEP = 1.02, 0.005
PASSES = 2

Maker = Callable[[bfc.SubAllocator], bfc.Allocator]
POLICIES: dict[str, Maker] = {
    "default": lambda device: bfc.CachingAllocator(device, strict=True),
    "expandable": lambda device: bfc.CachingAllocator(
        device, settings="expandable_segments:True", strict=True
    ),
    "stitched": lambda device: bfc.BFCAllocator(device, virtual_memory=True, page_size="2 MiB"),
}


def completes(trace: bfc.Trace, make: Maker, nbytes: int) -> bool:
    """Whether a trace that frees everything at its end fits on such a device, twice in a row."""
    with make(bfc.SimulatedSubAllocator(nbytes)) as allocator:
        return all(trace.replay(allocator).failed == 0 for _ in range(PASSES))


def smallest(trace: bfc.Trace, make: Maker, live: int) -> float:
    """The smallest device that a trace fits on, divided by the most bytes that are live at once.
    All sizes are tried: it may fit on a device and not on a larger one."""
    steps = 0
    while not completes(trace, make, round(live * (1 + STEP * steps))):
        steps += 1
    return 1 + STEP * steps


def cell(trace: bfc.Trace, make: Maker) -> str:
    with make(bfc.SimulatedSubAllocator("80 GiB")) as allocator:
        run = trace.replay(allocator)
    live = run.peak_bytes_live
    outcome = "completes" if completes(trace, make, round(live * DEVICE)) else "refused"
    reserved = run.peak_bytes_reserved / live
    return f"{reserved:.3f} {smallest(trace, make, live):.3f} {outcome}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="*", type=Path, default=sorted(TRACES.glob("*.npz")))
    runs = parser.parse_args().runs
    print(
        "Each run is played twice. For each policy: the peak of reserved bytes on 80 GiB, and the"
    )
    print("smallest device, both divided by the peak of live bytes; and whether the run completes")
    print(f"on a device of {DEVICE:.0%} of that peak.")
    print(line("run", "GiB", POLICIES))
    for path in runs:
        trace = bfc.Trace.load(path).closed()
        with bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 TiB")) as allocator:
            live = trace.replay(allocator).peak_bytes_live
        cells = (cell(trace, make) for make in POLICIES.values())
        print(line(path.stem, f"{live / GIB:.2f}", cells))


def line(name: str, live: str, cells: Iterable[str]) -> str:
    return "  ".join([f"{name:19}", f"{live:>5}", *(f"{text:21}" for text in cells)]).rstrip()


if __name__ == "__main__":
    main()
