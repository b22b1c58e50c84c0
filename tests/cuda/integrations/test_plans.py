"""Libraries whose memory comes from a pool follow its plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from planned_client import learns_and_follows_a_plan

import bfc

both_policies = pytest.mark.parametrize(
    "make_cuda", [bfc.BFCAllocator, bfc.CachingAllocator], indirect=True, ids=["bfc", "caching"]
)


@both_policies
def test_cupy_follows_a_plan(cupy, make_cuda) -> None:
    pool = make_cuda(allow_growth=True)

    def allocate(size: int) -> Callable[[], object]:
        held = [cupy.module.ndarray((size,), "u1")]
        return held.clear

    with bfc.use(pool, "cupy"):
        learns_and_follows_a_plan(pool, allocate)


@both_policies
def test_numba_follows_a_plan(numba, make_cuda) -> None:
    pool = make_cuda(allow_growth=True)

    def allocate(size: int) -> Callable[[], object]:
        held = [numba.cuda.device_array((size,), "u1")]
        return held.clear

    with bfc.use(pool, "numba"):
        learns_and_follows_a_plan(pool, allocate)
