"""`python -m bench.dask_sweep`: what it times, and what it prints."""

from __future__ import annotations

import bfc
from bench import dask_sweep
from bench.histories import TRACES


def test_the_sweep_has_as_many_different_replays_as_it_says():
    work = dask_sweep.tasks(bfc.Trace.load(TRACES / "gpu_lm_small.npz"), dask_sweep.REPLAYS)
    assert len(set(work)) == len(work) == 2_000


def test_each_pass_has_a_line_and_the_last_one_the_ratios(capsys):
    dask_sweep.main(["--trace", "gpu_lm_small", "--replays", "40", "--passes", "2"])
    _machine, what, heading, *passes, last, cpu = capsys.readouterr().out.splitlines()
    assert what.startswith("40 replays of gpu_lm_small, ")
    assert heading.split()[5:7] == ["ratio", "CPU"]
    assert len(passes) == 2
    for line in passes:
        assert len(line.split()) == 6
    assert last.startswith("ratio ")
    assert last.endswith("(min / median / max), goal 1.7")
    assert cpu.startswith("CPU")


def test_ratios_are_of_one_worker_over_two():
    row = dask_sweep.Pass(9.0, 5.0, 8.0, 4.0, 0.1, 2.0)
    assert (row.ratio, row.cpu_ratio) == (1.8, 2.0)
