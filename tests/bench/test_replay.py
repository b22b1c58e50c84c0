"""The benchmarks: who stands beside whom, that placements are compared, and what is done where an
original is not to be had. Of the times, nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import bfc
from bench import calls, gpu_mapping
from bench import replay as bench
from bench.peers.tensorflow import PeerUnavailable
from bfc.drivers.cuda import nvrtc

REPEATING = bench.repeating
TRACE = bfc.Trace(
    op=[0, 0, 1, 0, 0],
    id=[0, 1, 0, 2, 3],
    size=[1000, 3 << 20, 0, 700, 5 << 20],
    stream=[0, 1, 0, 0, 2],
).closed()


@pytest.fixture(autouse=True)
def _two_short_histories(monkeypatch) -> None:
    monkeypatch.setattr(bench, "histories", lambda: iter([("one", TRACE), ("two", TRACE)]))
    monkeypatch.setattr(bench, "repeating", lambda: iter([("one x 6", TRACE)]))
    monkeypatch.setattr(bench, "MOST_PASSES", 6)


def stand_in(make: Callable[[], bfc.Allocator], shift: int = 0) -> Callable[[], Any]:
    """An allocator of ours as the original, whose addresses are so much too high at the end."""

    @contextmanager
    def opened() -> Iterator[bench.Replayer]:
        passes = []

        def replay(trace: bfc.Trace) -> tuple[Any, float]:
            result = trace.replay(allocator)
            passes.append(result)
            moved = np.where(result.addresses, result.addresses + np.uint64(shift), 0)
            return (moved if len(passes) == 3 else result.addresses), result.seconds

        with make() as allocator:
            yield replay

    return opened


def unavailable() -> None:
    raise PeerUnavailable("there is no wheel for this machine")


def contests(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """The contests as they are, with a stand-in for each original."""
    listed = [
        replace(contest, build=lambda: None, open_original=stand_in(contest.make_ours))
        for contest in bench.CONTESTS
    ]
    monkeypatch.setattr(bench, "CONTESTS", [replace(contest, **changes) for contest in listed])


def test_each_policy_stands_beside_its_original(monkeypatch, capsys):
    contests(monkeypatch)
    bench.main([])
    lines = capsys.readouterr().out.splitlines()
    first, second = (at for at, line in enumerate(lines) if line.startswith("ns an event"))
    for at, policy, original in (
        (first, "bfc", "TensorFlow 2.21"),
        (second, "caching", "PyTorch 2.15"),
    ):
        heading, *rows, mean, repeated, mean_of_plans = lines[at : at + 6]
        columns = (policy, original, f"{policy} + plan", "of ours")
        places = [heading.index(name) for name in columns]
        assert places == sorted(places)
        assert [(row.split()[0], row.count("/")) for row in rows] == [("one", 4), ("two", 4)]
        assert mean.startswith("geometric mean: ratio ")
        assert (repeated[:7], repeated.count("/")) == ("one x 6", 6)
        assert "a plan takes " in mean_of_plans


def test_a_ratio_is_of_medians_and_the_last_line_of_geometric_means(monkeypatch, capsys):
    contests(monkeypatch)
    times = iter(
        [
            bench.Times([90.0, 20.0, 10.0], [100.0, 1.0, 40.0]),
            bench.Times([5.0] * 3, [40.0] * 3),
            bench.Times([20.0] * 3, [60.0] * 3, [9.0, 5.0, 1.0]),
        ]
    )
    monkeypatch.setattr(bench, "time_in_turns", lambda *arguments: next(times))
    bench.main(["--policy", "caching"])
    *_, one, two, mean, repeated, mean_of_plans = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in (one, two)] == ["2.00", "8.00"]
    assert one[24:50].split() == ["10.0", "/", "20.0", "/", "90.0"]
    assert mean.startswith("geometric mean: ratio 4.00, ours 10.0 ns an event, 100 million events")
    assert [repeated.split()[at] for at in (-8, -5, -2, -1)] == ["3.00", "5.0", "0.25", "12.00"]
    assert mean_of_plans.endswith("a plan takes 0.25 of that, ratio 12.00")


def test_all_have_as_many_passes_and_the_first_of_a_turn_is_not_counted(monkeypatch):
    contests(monkeypatch)
    for contest in bench.CONTESTS:
        plan = bfc.Plan.from_trace(TRACE, fallback=contest.policy)
        times = bench.time_in_turns(contest, TRACE, 6, plan)
        assert [len(each) for each in (times.ours, times.theirs, times.planned)] == [6, 6, 6]


@pytest.mark.parametrize("policy", ["bfc", "caching"])
def test_one_policy_can_be_chosen(monkeypatch, capsys, policy):
    contests(monkeypatch)
    bench.main(["--policy", policy])
    (heading,) = [line for line in capsys.readouterr().out.splitlines() if "min / median" in line]
    assert policy in heading.split()


@pytest.mark.parametrize("policy", ["bfc", "caching"])
def test_a_placement_that_differs_in_one_pass_is_an_error(monkeypatch, policy):
    (contest,) = [contest for contest in bench.CONTESTS if contest.policy == policy]
    contests(monkeypatch, open_original=stand_in(contest.make_ours, shift=512))
    with pytest.raises(AssertionError, match=f"the placement differs from {contest.original}'s"):
        bench.main(["--policy", policy])


def test_without_an_original_that_is_said_and_ours_is_measured(monkeypatch, capsys):
    contests(monkeypatch, build=unavailable)
    bench.main([])
    lines = capsys.readouterr().out.splitlines()
    why = "there is no wheel for this machine"
    for contest in bench.CONTESTS:
        at = lines.index(f"{contest.policy} without {contest.original}: {why}")
        assert contest.policy in lines[at + 1]
        assert contest.original not in lines[at + 1]
        assert [line.split()[0] for line in lines[at + 2 : at + 4]] == ["one", "two"]
        assert lines[at + 4].startswith("geometric mean: ")
        assert (lines[at + 5][:7], lines[at + 5].count("/")) == ("one x 6", 4)


def test_calls_are_timed_under_both_policies(monkeypatch, capsys):
    monkeypatch.setattr(calls, "NUMBER", 3)
    monkeypatch.setattr(calls, "REPEATS", 2)
    calls.main()
    _machine, heading, *rows = capsys.readouterr().out.splitlines()
    columns = ["bfc", "ratio", "caching", "ratio", calls.BUILTIN, calls.FLOOR]
    assert heading.split()[-6:] == columns
    assert [row[:32].strip() for row in rows] == list(calls.STATEMENTS)
    assert all(row.count("/") == 8 for row in rows)


@pytest.mark.peers
def test_the_originals_place_a_trace_as_ours_do(capsys):
    bench.main([])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("geometric mean: ratio ") for line in lines) == 4


def test_the_plan_of_a_repeated_run_serves_all_of_it():
    """A plan of which part is missed would be timed as the allocator behind it."""
    [(name, trace)] = list(REPEATING(["gpt2m_adam"]))
    assert name == "gpt2m_adam x 6"
    for contest in bench.CONTESTS:
        with contest.make_planned(bfc.SimulatedSubAllocator("1 TiB")) as allocator:
            allocator.use_plan(bfc.Plan.from_trace(trace, fallback=contest.policy), gate=None)
            trace.replay(allocator)
            assert allocator.plan_stats()["agreement"] == 1.0


# -- mapped memory ---------------------------------------------------------------------------------


def run_mapping(code: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which sees no GPU."""
    return subprocess.run(
        [sys.executable, "-c", f"from bench import gpu_mapping\n{code}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )


def test_mapping_is_timed_by_size_beside_a_kernel_and_until_it_is_refused():
    pytest.importorskip("cuda.bindings")
    done = run_mapping("gpu_mapping.main(['--emulated', '--most', '100'])")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "not a measure of a GPU" in lines[1]
    heads = [line.rpartition("  ")[0].strip() for line in lines if line.endswith("median / max")]
    assert [head for head in heads if head.startswith("one page of")] == [
        f"one page of {size}.00 MiB" for size in (2, 4, 8, 16, 20, 32, 64)
    ]
    assert sum(head.startswith("60 MiB as") for head in heads) == 3
    watched = "beside a kernel: left out" not in done.stdout  # there is no NVRTC
    verbs = Counter(line.split()[0] for line in lines if line.startswith("  "))
    for verb in ("reserve", "create", "map", "set_access", "unmap", "release", "unreserve"):
        assert verbs[verb] == 7 + 3 + watched, verb
    assert verbs["cuMemAlloc"] == verbs["cuMemFree"] == 7 + watched
    for what in ("handles", "mappings of one handle", "reservations"):
        assert any(line.startswith(f"100 {what}") for line in lines), what


def test_the_kernel_that_watches_compiles():
    pytest.importorskip("cuda.bindings")
    try:
        assert nvrtc.compiled(gpu_mapping.KERNEL, 90)[:4] == b"\x7fELF"
    except bfc.DeviceUnavailableError as error:
        pytest.skip(str(error))


def test_mapping_is_refused_in_words_where_there_is_nothing_to_measure():
    pytest.importorskip("cuda.bindings")
    nowhere = run_mapping("gpu_mapping.main([])")
    assert nowhere.returncode == 1
    assert "try: python -m bench.gpu_mapping --emulated" in nowhere.stderr
    cannot = run_mapping(
        "from bfc.testing import cuda_emulator\n"
        "cuda_emulator.load().set_attribute(0, 102, 0)\n"
        "gpu_mapping.main(['--emulated'])"
    )
    assert cannot.returncode == 1
    assert "there is nothing to measure: device 0" in cannot.stderr


def test_a_count_ends_with_the_drivers_refusal(monkeypatch, capsys):
    """By None, which is no memory, and by an error."""
    source = bfc.SimulatedSubAllocator("16 MiB")
    monkeypatch.setattr(bfc.SimulatedSubAllocator, "handle_type", "none", raising=False)
    gpu_mapping.report_handles(source, 100)
    assert capsys.readouterr().out.startswith("8 handles of 2.00 MiB (none): the driver has no")
    assert source.live_bytes == 0
    source.fail_at(4, "map")
    gpu_mapping.report_mappings(source, 100)
    assert capsys.readouterr().out.startswith("3 mappings of one handle: ")
    assert source.live_bytes == 0
