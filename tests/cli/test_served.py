"""What a process below `bfc run` says at its end, of pools on simulated devices."""

from __future__ import annotations

from pathlib import Path

import pytest

import bfc
from bfc_tools.cli.served import name_of_process, say
from bfc_tools.study.counting import CountedPages

MIB = 1 << 20


@pytest.mark.parametrize(
    ("first", "variables", "name"),
    [
        ("7", {}, ""),
        (None, {}, ""),
        ("3", {}, "7"),
        ("3", {"RANK": "2"}, "rank2"),
        ("7", {"RANK": "2"}, "rank2"),
        ("3", {"RANK": "", "SLURM_PROCID": "1"}, "rank1"),
    ],
)
def test_processes_of_one_program_have_names(first, variables, name) -> None:
    assert name_of_process(first, variables, 7) == name


def pool_with_a_history(**options: object) -> bfc.CachingAllocator:
    pool = bfc.CachingAllocator(CountedPages("64 MiB"), **options)
    pool.record_history()
    blocks = [pool.allocate_raw(4 * MIB) for _ in range(15)]
    for block in blocks[::2]:
        pool.deallocate_raw(block)
    return pool


def test_a_pool_is_compared_with_pytorchs_own(capsys) -> None:
    with pool_with_a_history(stitch=True) as pool:
        pool.allocate_raw(24 * MIB)
        pool.reset_peak_stats()
        say({0: pool}, "", "", with_summary=True, report=None)
        calls = pool.sub_allocator.calls_by_kind.total()
    said = capsys.readouterr().err.splitlines()
    would = "PyTorch's own allocator would have reserved 60.00 MiB for the same 24 allocations"
    would += " and frees"
    assert said == [
        "bfc: cuda:0: 60.00 MiB live at most, 60.00 MiB reserved at most",
        f"bfc: cuda:0: {would}, and refused 1 of them",
        f"bfc: cuda:0: {calls} calls of the driver for memory; PyTorch's own would have made 5",
    ]


def test_a_plan_that_no_request_has_followed_is_said_to_be_anothers(capsys) -> None:
    actions, sizes = [0, 0, 1, 0, 1, 1] * 4, [20 * MIB, 20 * MIB, 0, 30 * MIB, 0, 0] * 4
    trace = bfc.Trace(actions, [0, 1, 0, 2, 1, 2] * 4, sizes)
    plan = bfc.Plan.from_trace(trace, marks=range(0, 24, 6))
    for size, expected in ((20 * MIB, ""), (7 * MIB, "no request came as plan.npz has it")):
        with bfc.CachingAllocator(CountedPages("64 MiB"), stitch=True) as pool:
            pool.use_plan(plan, steps="auto")
            blocks = [pool.allocate_raw(size) for _ in range(2)]
            say({0: pool}, "", "", with_summary=False, report=None, plan="plan.npz")
            for block in blocks:
                pool.deallocate_raw(block)
        said = capsys.readouterr().err
        assert expected in said
        assert bool(expected) == bool(said)


def test_each_device_and_process_has_a_page_that_says_why(tmp_path: Path, capsys) -> None:
    with pool_with_a_history() as pool, pool_with_a_history() as other:
        with pytest.raises(bfc.OutOfMemoryError):
            pool.allocate_raw(24 * MIB)
        report = str(tmp_path / "page.html")
        say({0: pool, 3: other}, "", "rank1", with_summary=False, report=report)
    said = capsys.readouterr().err
    assert (
        "bfc: rank1 cuda:0: It ran out of memory: 24.00 MiB were refused at test_served.py" in said
    )
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["page-rank1-cuda0.html", "page-rank1-cuda3.html"]


def test_what_goes_wrong_at_the_end_is_said_and_raises_nothing(tmp_path: Path, capsys) -> None:
    with pool_with_a_history() as pool:
        report = str(tmp_path / "no such folder" / "page.html")
        say({0: pool}, "", "", with_summary=False, report=report)
    assert "bfc: cuda:0: FileNotFoundError" in capsys.readouterr().err
