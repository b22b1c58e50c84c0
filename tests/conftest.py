"""Fixtures for every test, and the account that is drawn up after each one."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import memory_hooks
import pytest

import bfc

#: What is compiled for tests is kept in the checkout, not in the user's cache.
os.environ.setdefault("BFC_CACHE_HOME", str(Path(__file__).parents[1] / "build" / "cache"))

#: What CI has not got, either, and what a source under test is not to do: all else that a test asks
#: for is there, or the test fails.
NOT_IN_CI = (
    "needs a GPU",
    "needs a build of PyTorch for CUDA",
    "cuDNN 9.19 and cublasLt are not installed",  # make test-predict has them
    "checks after each change",
    "this Python is linked statically",
    "the source declares",
    "the source maps no memory",
    "which cost no memory",
)

# Examples have no deadline: a loaded machine would miss it. `make check` and `.ci/long` try more.
hypothesis.settings.register_profile(
    "bfc",
    deadline=None,
    max_examples=int(os.environ.get("BFC_EXAMPLES", "35")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("bfc")

Simulated = Callable[..., bfc.SimulatedSubAllocator]
MakeAllocator = Callable[..., bfc.BFCAllocator]


def pytest_configure(config: pytest.Config) -> None:
    memory_hooks.hear_in_turns(config)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # as a shell starts jobs in the background: the tests of Ctrl-C would be ignored with it
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def hears_hangups() -> Iterator[None]:
    """What `nohup` begins ignores SIGHUP, and so would all that a test begins."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting tests makes no garbage: looking for some took a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`long` is also what is slow, and each instance of a sampled test but some."""
    sampled: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker("long")
        elif item.get_closest_marker("sampled"):
            sampled.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for instances in sampled.values():
        mark = instances[0].get_closest_marker("sampled")
        assert mark is not None
        for item in all_but(instances, *mark.args, **mark.kwargs):
            item.add_marker("long")


def all_but(instances: list[pytest.Item], n: int = 3) -> list[pytest.Item]:
    """All but n: the first, the last, and what stands evenly between them."""
    last = len(instances) - 1
    kept = {0} if n == 1 else {round(i * last / (n - 1)) for i in range(n)}
    return [item for i, item in enumerate(instances) if i not in kept]


def pytest_collection_finish() -> None:
    """Fixtures collect garbage after a test. What pytest collected is thousands of items that never
    become garbage: frozen, they are not looked through each time."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str | None:
    debug = os.environ.get("BFC_DEBUG")  # make check says what it built
    return None if debug is None else f"bfc: built with BFC_DEBUG={debug}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, object]:
    """No garbage is collected while a report is written. CPython 3.11's `ast.parse`, which finds
    the lines of a traceback, raises SystemError where a finaliser raises inside it: the traceback
    of that is formatted at once, which parses its lines, too. The whole run would end."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        report = yield
    finally:
        if is_enabled:
            gc.enable()
    return fail_in_ci(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, object]:
    return fail_in_ci((yield))


def fail_in_ci(report: pytest.TestReport | pytest.CollectReport) -> object:
    """With BFC_CI=1 a skip is a failure: what CI needs and does not find must not pass by."""
    is_skip = report.skipped and not hasattr(report, "wasxfail")
    reason = str(report.longrepr)
    if (
        is_skip
        and os.environ.get("BFC_CI") == "1"
        and not any(text in reason for text in NOT_IN_CI)
    ):
        report.outcome, report.longrepr = "failed", f"skipped, which CI may not: {reason}"
    return report


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """What the files before have imported never becomes garbage, either: numba, CuPy and pyopencl
    make a collection a hundred times as long."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def quiet_collector() -> Iterator[None]:
    """Collections of garbage come only where the code under test asks for one, and nobody hears of
    them: Hypothesis does, and a host that is made to have no memory fails there, too. Nor does a
    worker hear what it is to do next."""
    listeners = gc.callbacks[:]
    gc.disable()
    gc.callbacks.clear()
    with memory_hooks.unheard():
        yield
    gc.callbacks.extend(listeners)
    gc.enable()


@pytest.fixture
def simulated() -> Iterator[Simulated]:
    """Makes simulated devices. After the test nothing may be live on any of them."""
    devices: list[bfc.SimulatedSubAllocator] = []

    def make(capacity: int | str = "64 MiB", **options: object) -> bfc.SimulatedSubAllocator:
        devices.append(bfc.SimulatedSubAllocator(capacity, **options))
        return devices[-1]

    yield make
    for device in devices:
        assert (device.live, device.live_bytes) == ({}, 0), "regions were leaked"


@pytest.fixture
def make_allocator(simulated: Simulated) -> Iterator[MakeAllocator]:
    """Makes allocators: over what is passed, or over a new simulated device of that capacity.

    After the test each one is checked and closed, and its source must have all of its memory back.
    """
    allocators: list[bfc.BFCAllocator] = []

    def make(source: object = "64 MiB", **options: object) -> bfc.BFCAllocator:
        sub_allocator = simulated(source) if isinstance(source, int | str) else source
        allocators.append(bfc.BFCAllocator(sub_allocator, **options))
        return allocators[-1]

    yield make
    gc.collect()
    for allocator in allocators:
        allocator.check()
        allocator.close()
        allocator.check()
        assert allocator.stats().bytes_in_use == 0
    for allocator in allocators:
        assert getattr(allocator.sub_allocator, "live_bytes", 0) == 0, "regions were leaked"


@pytest.fixture(scope="session")
def torch_peer() -> None:
    """PyTorch's compiled allocators are built, so that no test is slowed down by it."""
    from bench.peers.torch import PACKAGES, build  # which most tests have no use for

    for version in PACKAGES:
        build(version=version)


@pytest.fixture
def dice(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers, the same in every run of a test."""
    return random.Random(request.node.name)


@pytest.fixture
def pyplot() -> Iterator[Any]:
    """matplotlib without a window. All figures are closed afterwards."""
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")
