"""One training on a GPU, with PyTorch's own allocator and with bfc's in its place: `python -m
bench.gpu_training`. Each allocator has processes of its own, which take turns. A small transformer
trains on batches whose lengths vary, as in text; `--fixed` gives all of them one length.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from bench.report import machine, say, spread

MIB = 1 << 20
STEPS, WARM = 60, 10
#: By name: what PYTORCH_CUDA_ALLOC_CONF says, and the class of bfc that replaces PyTorch's
#: allocator, with its options.
ALLOCATORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "PyTorch": ("", "", {}),
    "PyTorch, expandable segments": ("expandable_segments:True", "", {}),
    "bfc, caching": ("", "CachingAllocator", {}),
    "bfc, caching, a plan": ("", "CachingAllocator", {}),
    "bfc, BFC": ("", "BFCAllocator", {"allow_growth": True}),
}


def training(torch: Any, *, fixed: bool) -> Callable[[int], None]:
    """One step, by its number."""
    nn, width, words = torch.nn, 512, 8192
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(words, width), nn.TransformerEncoder(layer, 8), nn.Linear(width, words)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    lengths = torch.randint(64, 513, (STEPS,)).tolist()

    def step(number: int) -> None:
        shape = 16, 512 if fixed else lengths[number % STEPS]
        tokens = torch.randint(words, shape, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def run_one(name: str, *, fixed: bool) -> dict[str, Any]:
    """In a process of its own: milliseconds a step, and the most that was reserved and live."""
    import torch

    import bfc

    _conf, policy, options = ALLOCATORS[name]
    pool: Any = None
    if policy:
        pool = getattr(bfc, policy)(bfc.CUDASubAllocator(0), **options)
        bfc.integrations.torch.replace(pool)
    step = training(torch, fixed=fixed)

    def timed(number: int) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        with pool.step("train") if planned else nullcontext():
            step(number)
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) * 1e3

    planned = name.endswith("a plan")
    if planned:
        with pool.record_plan(iterations=4) as recording:
            for number in range(5):
                timed(number)
        pool.use_plan(recording.plan())
        pool.release_free_regions()
    for number in range(WARM):
        timed(number)
    reset = torch.cuda.reset_peak_memory_stats if pool is None else pool.reset_peak_stats
    reset()
    times = [timed(WARM + number) for number in range(STEPS)]
    if pool is None:
        reserved, live = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    else:
        stats = pool.stats()
        reserved, live = stats.peak_pool_bytes, stats.peak_bytes_in_use
    note = pool.plan_stats()["why"] if planned else ""
    return {"times": times, "reserved": reserved, "live": live, "note": note}


def run_apart(name: str, *, fixed: bool) -> dict[str, Any]:
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": ALLOCATORS[name][0]}
    command = [sys.executable, "-W", "ignore", "-m", "bench.gpu_training", "--one", name]
    done = subprocess.run(
        command + ["--fixed"] * fixed, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name}:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_training", description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="all batches have one length")
    parser.add_argument("--rounds", type=int, default=3, help="processes for each allocator")
    parser.add_argument("--one", choices=ALLOCATORS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_one(options.one, fixed=options.fixed)))
        return
    try:
        import torch
    except ImportError:
        raise SystemExit("this measures PyTorch on a GPU: pip install torch") from None
    if not torch.cuda.is_available():
        raise SystemExit("PyTorch sees no GPU here, and there is nothing else to measure")
    say(f"{machine()}; {torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ALLOCATORS}
    for _ in range(options.rounds):
        for name, runs in found.items():
            runs.append(run_apart(name, fixed=options.fixed))
    say(f"{'':30}{'ms a step, min / median / max':>32}{'reserved MiB':>14}{'/ live':>8}")
    for name, runs in found.items():
        times = [statistics.median(run["times"]) for run in runs]
        reserved, live = (max(run[what] for run in runs) for what in ("reserved", "live"))
        say(f"{name:30}{spread(times):>32}{reserved / MIB:14.1f}{reserved / live:8.3f}")
        if note := runs[-1]["note"]:
            say(f"    {note}")


if __name__ == "__main__":
    main()
