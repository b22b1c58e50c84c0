"""The allocator beside its slow twin, over all options: Hypothesis histories, and longer random
ones.

A random history that fails prints the one line that repeats it. BFC_SEED=n runs the one history of
that seed; BFC_HISTORIES=n runs n of them, from fresh seeds.
"""

from __future__ import annotations

import os
import random
import secrets

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from strategies import Policy, Source, play, set_timing_counter, setups, twins_of

from bfc.testing import AllocatorMachine, Twins

HISTORIES = 400

histories = settings(
    stateful_step_count=50,
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def is_counted(machine: AllocatorMachine) -> bool:
    return machine.twins.beside.model.counter is not None


class AllocatorBesideItsModel(AllocatorMachine):
    @initialize(setup=setups(), counted=st.booleans())
    def start(self, setup: tuple[Policy, Source], counted: bool) -> None:
        self.twins = twins_of(*setup)
        if counted:
            self.attach_a_timing_counter()

    @precondition(lambda self: not is_counted(self))
    @rule()
    def attach_a_timing_counter(self) -> None:
        set_timing_counter(self.twins)

    @precondition(is_counted)
    @rule(behind=st.integers(0, 6))
    def raise_the_frontier(self, behind: int) -> None:
        self.twins.beside.set_safe_frontier(max(0, self.twins.frees + 1 - behind))

    @precondition(is_counted)
    @rule(share=st.integers(1, 400), behind=st.integers(0, 6))
    def allocate_with_a_constraint(self, share: int, behind: int) -> None:
        before = max(0, self.twins.frees - behind)
        self.twins.allocate(self.twins.limit * share // 1000, freed_before=before)


TestAllocatorBesideItsModel = AllocatorBesideItsModel.TestCase
TestAllocatorBesideItsModel.settings = histories


# -- histories that once went wrong ----------------------------------------------------------------


def counted_twins(limit: int) -> Twins:
    """A fixed pool that collects garbage, splits wherever 256 bytes are left, and counts frees."""
    policy = Policy(
        memory_limit=limit,
        allow_growth=False,
        garbage_collection=True,
        fragmentation_fraction=1e-7,
        strict=True,
    )
    source = Source(
        capacity=1 << 50,
        max_bytes=1 << 50,
        gap=0,
        alignment=256,
        supports_coalescing=False,
        granule=256,
        reuses=False,
    )
    twins = twins_of(policy, source)
    set_timing_counter(twins)
    return twins


def test_a_collected_region_leaves_nothing_in_the_queue_of_timestamped_frees() -> None:
    twins = counted_twins(768)
    for size, constraint in ((768, 0), (768, 0), (256, 1), (256, 1)):
        twins.allocate(
            size, freed_before=constraint
        )  # the third is served by collecting the region
        twins.free(0)
    twins.allocate(768)
    assert [[size for _, size, *_ in chunks] for *_, chunks in twins.beside.model.layout()] == [
        [768]
    ]
    twins.check()
    twins.close()


def test_a_record_that_was_merged_away_while_queued_may_be_found_in_its_next_use() -> None:
    twins = counted_twins(1280)
    for size in (512, 256, 256, 256):
        twins.allocate(size)
    for index in (2, 1, 0):
        twins.free(index)
    twins.allocate(768)  # merges the third into the second, both into the first, and splits that
    assert [stamp for *_, stamp in twins.beside.model.layout()[0][2]] == [3, 3, 0]
    twins.beside.set_safe_frontier(4)
    twins.allocate(256, freed_before=1)  # the rest has the second's record, which still stood there
    assert [stamp for *_, stamp in twins.beside.model.layout()[0][2]] == [3, 0, 0]
    twins.check()
    twins.close()


# -- plain random histories -----------------------------------------------------------------------


def seeds() -> list[int]:
    if "BFC_SEED" in os.environ:
        return [int(os.environ["BFC_SEED"])]
    return [secrets.randbits(32) for _ in range(int(os.environ.get("BFC_HISTORIES", HISTORIES)))]


@pytest.mark.long
def test_random_histories_agree_with_the_model() -> None:
    for seed in seeds():
        try:
            play(random.Random(seed))
        except Exception as error:
            line = f"BFC_SEED={seed} python -m pytest {__file__} -k random_histories"
            pytest.fail(f"{error!r}\nthis history again: {line}", pytrace=True)
