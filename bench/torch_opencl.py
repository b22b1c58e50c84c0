"""PyTorch's tensors on OpenCL: what they cost in time beside the CPU's, and in memory beside the
cache of dlprim's back end: `python -m bench.torch_opencl`, a minute. It needs
`pip install 'bfc-allocator[torch-opencl]'`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import bfc
from bench.histories import TRACES
from bench.peers import dlprim
from bench.report import machine, say, spread

ROUNDS, CALLS = 30, 2_000
SLOW_CALLS = 50
ITEMS = 1_000
TENSORS = ("gpt2s_varlen", "resnet50_multiscale", "gpu_decomfl")


def per_call(call: Callable[[], object], calls: int) -> float:
    """Microseconds a call."""
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - started) * 1e6 / calls


def in_time() -> None:
    """Rounds of both devices take turns."""
    import torch

    from bfc.integrations import torch_opencl

    torch_opencl.enable("1 GiB")
    say(f"PyTorch {torch.__version__}, {torch.opencl.get_device_name()}")
    say(
        f"\n{'us a call: min / median / max':36}{'cpu':>26}{'opencl':>26}"
        f"   opencl / cpu: median, min"
    )
    on = {name: torch.rand(ITEMS, device=name) for name in ("cpu", "opencl")}
    square = {name: torch.rand(64, 64, device=name) for name in on}
    cases: dict[str, tuple[Callable[[str], object], int]] = {
        f"torch.empty({ITEMS})": (lambda name: torch.empty(ITEMS, device=name), CALLS),
        f"add of {ITEMS} floats": (lambda name: on[name] + on[name], SLOW_CALLS),
        "mm of 64 x 64": (lambda name: square[name] @ square[name], SLOW_CALLS),
        f"softmax of {ITEMS}, on the host": (lambda name: torch.softmax(on[name], 0), SLOW_CALLS),
        f"{ITEMS} floats to the CPU": (lambda name: on[name].to("cpu", copy=True), SLOW_CALLS),
    }
    for title, (call, calls) in cases.items():
        times: dict[str, list[float]] = {name: [] for name in on}
        for turn in range(ROUNDS + 1):
            for name, found in times.items():
                took = per_call(lambda name=name, call=call: call(name), calls)  # type: ignore[misc]
                if turn:  # the first warms up
                    found.append(took)
        torch.opencl.synchronize()
        cpu, opencl = times["cpu"], times["opencl"]
        medians = statistics.median(opencl) / statistics.median(cpu)
        say(
            f"{title:36}{spread(cpu):>26}{spread(opencl):>26}   "
            f"{medians:.2f} {min(opencl) / min(cpu):.2f}"
        )


def in_memory() -> None:
    """Reserved / live at their peaks, of recorded runs of tensors."""
    say(f"\n{'reserved / live':24}{'CachingAllocator':>20}{'BFCAllocator':>16}{'dlprim':>12}")
    for name in TENSORS:
        trace = bfc.Trace.load(TRACES / f"{name}.npz")
        theirs = dlprim.replay(trace)
        ours = []
        for pool in (
            bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 TiB")),
            bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 TiB"), allow_growth=True),
        ):
            trace.replay(pool)
            ours.append(pool.stats().peak_pool_bytes / theirs.peak_live)
        rows = [f"{ratio:.3f}" for ratio in (*ours, theirs.reserved / theirs.peak_live)]
        say(f"{name:24}{rows[0]:>20}{rows[1]:>16}{rows[2]:>12}")


def main() -> None:
    say(machine())
    in_memory()
    in_time()


if __name__ == "__main__":
    main()
