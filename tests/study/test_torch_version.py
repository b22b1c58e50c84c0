"""The version of PyTorch that a recorded run is replayed under."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bfc
from bfc.pytorch.rules import NEWEST, VERSIONS
from bfc.pytorch.settings import CachingSettings
from bfc_tools.study import candidates, recorded_settings
from bfc_tools.study.torch_version import decided, line_of
from bfc_tools.study.workers import Replays

MIB = 1 << 20
TRACES = Path(__file__).parents[2] / "bench" / "traces"


@pytest.mark.parametrize(
    ("name", "blocks", "elsewhere"), [("gpu_lm_small", 36, 5), ("gpu_decomfl", 7946, 2113)]
)
def test_replay_tells_that_a_gpu_ran_pytorch_2_11(name: str, blocks: int, elsewhere: int):
    """The figures are those of the compiled 2.11.0 and 2.15.0 (PyTorch's behaviour, 3.6)."""
    run = decided(bfc.Trace.load(TRACES / f"{name}.npz"))
    assert run.torch == "2.11"
    assert line_of(run) == (
        f"PyTorch 2.11, a replay has the fewest of {blocks} blocks elsewhere than recorded "
        f"(0 under 2.11; {elsewhere} under 2.15)"
    )


def recording(torch: str, settings: str = "") -> bfc.Trace:
    """A run whose third block lies elsewhere under the rules of another version: of two free
    segments of one size the older one is at the higher address."""
    device = bfc.SimulatedSubAllocator("1 GiB", reuse=True)
    allocator = bfc.CachingAllocator(device, torch=torch, settings=settings)
    allocator.record_history()
    low = allocator.allocate_raw(30 * MIB)
    high = allocator.allocate_raw(12 * MIB)
    allocator.deallocate_raw(low)
    allocator.empty_cache()
    again = allocator.allocate_raw(12 * MIB)
    for address in (high, again):
        allocator.deallocate_raw(address)
    allocator.allocate_raw(12 * MIB)
    return bfc.Trace.from_snapshot(allocator.snapshot())


def untold(trace: bfc.Trace) -> bfc.Trace:
    trace.meta |= {"torch_version": None, "torch_version_sign": "nothing"}
    return trace


@pytest.mark.parametrize("torch", VERSIONS)
def test_replay_decides_where_the_file_does_not_tell(torch: str):
    known = recording(torch)
    assert decided(known) is known
    run = decided(untold(known))
    assert run.torch == torch
    assert f"(0 under {torch}" in line_of(run) or f"; 0 under {torch})" in line_of(run)


def test_settings_that_only_one_version_has_decide():
    run = decided(untold(recording("2.15", "pinned_max_cached_size_mb:4")))
    assert run.torch == "2.15"
    assert "(0 under 2.15)" in line_of(run)


def test_where_nothing_tells_it_is_the_newest():
    device = bfc.SimulatedSubAllocator("1 GiB")
    allocator = bfc.CachingAllocator(device)
    allocator.record_history()
    allocator.allocate_raw(MIB)
    rising = decided(untold(bfc.Trace.from_snapshot(allocator.snapshot())))
    assert rising.torch == NEWEST
    assert line_of(rising) == "PyTorch 2.15, the newest: 2.11 would place it alike"
    assert "does not say" in line_of(decided(bfc.Trace([0], [0], [512])))
    mapped = untold(recording("2.15", "expandable_segments:True"))
    assert "does not say" in line_of(decided(mapped))


def test_expandable_segments_that_were_mapped_before_the_history_began_tell_nothing():
    """No entry says that memory was mapped: the settings do."""
    allocator = bfc.CachingAllocator(
        bfc.SimulatedSubAllocator("8 GiB"), settings="expandable_segments:True", torch="2.11"
    )
    kept = [allocator.allocate("30 MiB") for _ in range(4)]
    allocator.record_history()
    allocator.allocate("3 MiB").free()
    run = untold(bfc.Trace.from_snapshot(allocator.snapshot()))
    assert kept
    assert "does not say" in line_of(decided(run))


def test_the_version_that_is_asked_for_counts():
    known = recording("2.15")
    run = decided(known, "2.11")
    assert (run.torch, line_of(run)) == ("2.11", "PyTorch 2.11, as asked for")
    assert known.torch == "2.15"
    with pytest.raises(ValueError, match=r"'2\.11' or '2\.15'"):
        decided(known, "2.12")


@pytest.mark.parametrize(
    "placed",
    [
        None,
        7,
        {},
        {"addresses": [0], "segments": []},
        {"addresses": [1, 2], "segments": [[0, 4096, 512]]},
        {"addresses": ["x"], "segments": [[0, 4096, 512]]},
        {"addresses": [-1], "segments": [[0, 4096, 512]]},
        {"addresses": [0], "segments": [[0, 4096]]},
        {"addresses": [0], "segments": [[0, 4096, 512]], "settings": 3},
        {"addresses": [0], "segments": [[0, 4096, 512]], "segment_events": [[]]},
        *(
            {"addresses": [0], "segments": [[0, address, 20 * MIB]]}
            for address in (0, -4096, 1 << 62, 1 << 64)
        ),
    ],
)
def test_a_meta_that_is_not_a_recording_tells_nothing(placed: Any):
    run = decided(bfc.Trace([0], [0], [512], meta={"torch": placed}))
    assert (run.torch, "does not say" in line_of(run)) == (NEWEST, True)


@pytest.mark.parametrize("torch", VERSIONS)
def test_every_setting_that_is_tried_is_known_to_every_version(torch: str):
    for values in (candidates.VALUES, candidates.GRID):
        for key, listed in values.items():
            for value in filter(None, listed):
                CachingSettings().apply(f"{key}:{value}", torch=torch)


@pytest.mark.parametrize("torch", VERSIONS)
def test_the_advice_follows_the_version(torch: str):
    """Of the two free segments the one that is taken decides whether the run fits."""
    run = recording("2.15")
    advice = bfc.advise(run, "128 MiB", jobs=1, torch=torch)
    assert advice.recorded.torch == torch
    assert str(advice).startswith(f"PyTorch {torch}: It fits on 128.00 MiB as it is")
    assert f"PyTorch {torch}, as asked for" in str(advice)
    assert bfc.advise(run, "128 MiB", jobs=1).answer.startswith("PyTorch 2.15: ")
    with Replays(decided(run, torch), jobs=1) as replays:
        assert replays.trace.torch == torch


def test_settings_of_a_later_version_cannot_be_replayed_under_an_older_one():
    run = decided(recording("2.15", "pinned_max_cached_size_mb:4"), "2.11")
    found = recorded_settings.read(run)
    assert "PyTorch 2.13 and later have it" in found.obstacle
    assert recorded_settings.known_to(found) == []
    assert recorded_settings.read(decided(run, "2.15")).obstacle == ""
