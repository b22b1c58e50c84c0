"""Plugin of pytest: the tests of another library, on its own memory or on a pool of ours.

BFC_PEER names the library and BFC_PEER_MEMORY its memory: "own", "bfc" or "caching". CUDA is the
emulated driver, whose kernels compute nothing, and OpenCL is PoCL. BFC_PEER_RESULTS is a file of
lines of JSON: each test has one when it begins and one when it ends. Tests that stand there already
are left out, so that a run goes on where the one before it ended its process. BFC_PEER_ONLY is the
one test to run.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_machine
import cupy_runtime
import pocl
import pytest

import bfc

PEER, MEMORY = os.environ["BFC_PEER"], os.environ["BFC_PEER_MEMORY"]
RESULTS, ONLY = Path(os.environ["BFC_PEER_RESULTS"]), os.environ.get("BFC_PEER_ONLY", "")
#: What a name has that is not the same in the next process, or on the next machine.
CHANGING = re.compile(r"<context factory for .*?>>-?| at 0x[0-9a-f]+")


def pool_on(source: bfc.SubAllocator) -> bfc.Allocator:
    if MEMORY == "bfc":
        return bfc.BFCAllocator(source, allow_growth=True)
    return bfc.CachingAllocator(source)


def pytest_configure() -> None:
    {"pyopencl": opencl, "numba": numba, "cupy": cupy}[PEER]()


# -- what came of each test ------------------------------------------------------------------------


def name_of(nodeid: str) -> str:
    return CHANGING.sub("", nodeid.rpartition("/")[2])


def note(nodeid: str, outcome: str) -> None:
    with RESULTS.open("a") as file:
        file.write(json.dumps([name_of(nodeid), outcome]) + "\n")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        note(report.nodeid, "not collected")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen = {json.loads(line)[0] for line in RESULTS.read_text().splitlines()}
    named = [(name_of(item.nodeid), item) for item in items]
    items[:] = [it for name, it in named if name not in seen and ONLY in ("", name)]


def pytest_runtest_logstart(nodeid: str) -> None:
    note(nodeid, "ended the process")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        note(report.nodeid, report.outcome)


# -- the memory ------------------------------------------------------------------------------------


def opencl() -> None:
    """Arrays that name no allocator, and no memory of their own, take a pool of their context."""
    pocl.start()
    if MEMORY == "own":
        return
    import pyopencl
    import pyopencl.array

    pools: dict[Any, bfc.Allocator] = {}

    def make(queue: Any) -> Callable[[int], Any]:
        if queue.context not in pools:
            pools[queue.context] = pool_on(bfc.OpenCLSubAllocator(queue.context))
        return bfc.integrations.pyopencl.allocator(pools[queue.context], queue)

    made = pyopencl.array.Array.__init__

    def init(self: Any, cq: Any, *arguments: Any, **named: Any) -> None:
        has_data = named.get("data") is not None or len(arguments) > 4
        has_allocator = named.get("allocator") is not None or len(arguments) > 3
        if isinstance(cq, pyopencl.CommandQueue) and not (has_data or has_allocator):
            named["allocator"] = make(cq)
        made(self, cq, *arguments, **named)

    pyopencl.array.Array.__init__ = init


@pytest.fixture
def initialize_from_pytest_config() -> None:
    """Numba's tests ask for it, and the file that has it is not in the wheel."""


def numba() -> None:
    cuda_machine.load()
    if MEMORY != "own":
        use("numba")


def cupy() -> None:
    """Its default allocator. Pools of its own that a test makes stay what they are."""
    cuda_machine.load()
    cupy_runtime.install(cupy_runtime.build(Path(tempfile.mkdtemp())))
    if MEMORY != "own":
        use("cupy")


def use(name: str) -> None:
    pools = [pool_on(bfc.CUDASubAllocator(it)) for it in range(len(cuda_machine.TOTALS))]
    bfc.use(pools, name)
