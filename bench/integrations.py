"""What a cache hit costs from Python through each library, ours beside the library's own pool:
`python -m bench.integrations`. One call is an allocation and its free; rounds of all cases take
turns. `--emulated` runs ours alone on the emulated driver of `bfc.testing`, where there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib
import timeit
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import bfc
from bench import gpu
from bench.report import say, spread

ROUNDS, CALLS, NBYTES = 15, 2000, 1000
POOL = "256 MiB"

#: Of a library: (what, whether it is ours, one call).
Case = tuple[str, bool, Callable[[], object]]


def cases_of_bfc(pool: bfc.Allocator, emulated: bool) -> Iterator[Case]:
    yield "bfc: allocate", True, lambda: pool.allocate(NBYTES)
    yield "bfc: allocate_raw", True, lambda: pool.deallocate_raw(pool.allocate_raw(NBYTES))


def cases_of_cupy(pool: bfc.Allocator, emulated: bool) -> Iterator[Case]:
    cupy = importlib.import_module("cupy")
    ours = bfc.integrations.cupy
    if emulated:  # CuPy's runtime library refuses the emulated driver
        null = cupy.cuda.Stream.null
        ours.lookups = lambda cupy: (lambda: 0, lambda: null)
    allocate = ours.allocator(pool)
    yield "cupy: bfc", True, lambda: allocate(NBYTES)
    if not emulated:
        own = cupy.cuda.MemoryPool()
        yield "cupy: MemoryPool", False, lambda: own.malloc(NBYTES)


def cases_of_numba(pool: bfc.Allocator, emulated: bool) -> Iterator[Case]:
    driver = importlib.import_module("numba.cuda.cudadrv.driver")
    context = importlib.import_module("numba.cuda").current_context()
    make = bfc.integrations.numba.manager
    fenced = make(pool, driver)(context=context)
    unfenced = make(pool, driver, fenced=False)(context=context)
    yield "numba: bfc", True, lambda: fenced.memalloc(NBYTES)
    yield "numba: bfc, unfenced", True, lambda: unfenced.memalloc(NBYTES)
    own = driver.NumbaCUDAMemoryManager(context=context)
    own.initialize()
    yield "numba: its default", False, lambda: own.memalloc(NBYTES)


def cases_of_cuda_core(pool: bfc.Allocator, emulated: bool) -> Iterator[Case]:
    core = importlib.import_module("cuda.core")
    device = core.Device(0)
    device.set_current()
    streams = {"": device.default_stream, ", own stream": device.create_stream()}
    resources = {
        "bfc": bfc.integrations.cuda_core.MemoryResource(pool),
        "DeviceMemoryResource": core.DeviceMemoryResource(0),
    }

    def one(resource: Any, stream: Any) -> Callable[[], object]:
        return lambda: resource.allocate(NBYTES, stream=stream).close()

    for name, resource in resources.items():
        for where, stream in streams.items():
            yield f"cuda.core: {name}{where}", name == "bfc", one(resource, stream)


def cases_of_rmm(pool: bfc.Allocator, emulated: bool) -> Iterator[Case]:
    mr = importlib.import_module("rmm").mr
    resources = {"bfc": bfc.integrations.rmm.resource(pool)}
    if not emulated:  # RMM's own resources ask the CUDA runtime
        resources["PoolMemoryResource"] = mr.PoolMemoryResource(mr.CudaMemoryResource(), POOL)

    def one(resource: Any) -> Callable[[], object]:
        return lambda: resource.deallocate(resource.allocate(NBYTES), NBYTES)

    for name, resource in resources.items():
        yield f"rmm: {name}", name == "bfc", one(resource)


def cases_of_torch(pool: bfc.Allocator, emulated: bool) -> Iterator[Case]:
    """PyTorch asks ours for segments only, so that a hit is its own: a peer and nothing of ours."""
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise ImportError("PyTorch sees no GPU")
    take, give = torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete
    yield "torch: its caching allocator", False, lambda: give(take(NBYTES))


SOURCES = (
    cases_of_bfc,
    cases_of_cupy,
    cases_of_numba,
    cases_of_cuda_core,
    cases_of_rmm,
    cases_of_torch,
)


def gather(pool: bfc.Allocator, emulated: bool) -> list[Case]:
    cases: list[Case] = []
    for source in SOURCES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                cases += [case for case in source(pool, emulated) if case[1] or not emulated]
        except ImportError as error:
            say(f"{source.__name__.removeprefix('cases_of_')} is left out: {error}")
    return cases


def measure(cases: list[Case]) -> dict[str, list[float]]:
    """Nanoseconds a call, by case and round. A block stays live, as in programs; each case is
    warmed up."""
    timers = {label: timeit.Timer(call) for label, _ours, call in cases}
    for timer in timers.values():
        timer.timeit(CALLS // 10)
    times: dict[str, list[float]] = {label: [] for label in timers}
    for _ in range(ROUNDS):
        for label, timer in timers.items():
            times[label].append(timer.timeit(CALLS) * 1e9 / CALLS)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.integrations", description=__doc__)
    parser.add_argument("--emulated", action="store_true", help="ours alone, without a GPU")
    emulated: bool = parser.parse_args().emulated
    source = gpu.start("bench.integrations", emulated=emulated)
    with bfc.BFCAllocator(source, memory_limit=POOL) as pool:
        kept = pool.allocate(NBYTES)
        times = measure(gather(pool, emulated))
        say(f"{f'ns a pair, {NBYTES} bytes':40}{'min / median / max':>24}")
        for label, samples in times.items():
            say(f"{label:40}{spread(samples):>24}")
        kept.free()


if __name__ == "__main__":
    main()
