"""The benchmark of plans: what it reads, and that each figure is there."""

from __future__ import annotations

from pathlib import Path

from bench import plans

INSTANCE = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"


def test_a_run_has_a_row_and_an_instance_has_one(tmp_path: Path, monkeypatch, capsys):
    folder = tmp_path / "benchmarks" / "challenging"
    folder.mkdir(parents=True)
    (folder / "A.12.csv").write_text(INSTANCE)
    monkeypatch.setattr(plans, "CAPACITY", 12)
    plans.main(["--traces", "gpu_lm_small", "--minimalloc", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    [run] = [line.split() for line in lines if line.startswith("gpu_lm_small")]
    assert run[1:3] == ["36", "1.0000"]
    [row] = [line.split() for line in lines if line.startswith("A ")]
    assert row[1:5] == ["5", "1.000", "1.000", "1.000"]


def test_lengths_that_vary_take_what_is_live(capsys):
    """The reach: 1.005, with lengths that the plan has not seen, also longer ones. Three streams,
    which share no memory under PyTorch's policy, take 1.0353."""
    plans.main(["--lengths"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "with a plan" in line]
    assert [row[0] for row in rows] == ["caching", "bfc"] * 2
    for row, reach in zip(rows, (1.005, 1.005, 1.036, 1.005), strict=True):
        assert float(row[5].rstrip(",")) <= reach < float(row[1])
