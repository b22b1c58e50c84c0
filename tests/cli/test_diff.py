"""`bfc diff`: what it prints, its exit codes, and files that are no runs."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

import bfc
from bfc_tools.cli import main

TRACES = Path(__file__).parents[2] / "bench" / "traces"
SMALL = str(TRACES / "gpu_decomfl.npz")
MIB = 1 << 20


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str]:
    """Two runs; the second has 3 MiB more in the cache."""
    made = []
    for name, count in (("before", 2), ("after", 5)):
        path = tmp_path / f"{name}.npz"
        owners = ["", "weights", "kv cache"]
        owner = [1] + [2] * count
        trace = bfc.Trace(
            [0] * (count + 1),
            range(count + 1),
            [8 * MIB, *[MIB] * count],
            owner=owner,
            owners=owners,
        )
        trace.save(path)
        made.append(str(path))
    return made[0], made[1]


def test_the_peaks_come_first(runs, capsys):
    assert main(["diff", *runs]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "peak, live bytes: 10.00 MiB -> 13.00 MiB, +3.00 MiB (+30.0%)"
    assert lines[1] == "live at the end:  10.00 MiB -> 13.00 MiB, +3.00 MiB (+30.0%)"
    assert lines[2] == f"first: {runs[0]}; second: {runs[1]}"
    at = next(number for number, line in enumerate(lines) if line.startswith("at the peak"))
    assert lines[at].split() == ["at", "the", "peak,", "by", "owner", *HEADINGS]
    cells = [cell.strip() for cell in lines[at + 1].split("  ") if cell]
    assert cells == ["kv cache", "2.00 MiB", "5.00 MiB", "+3.00 MiB", "2 -> 5"]


HEADINGS = ["first", "second", "growth", "blocks"]


@pytest.mark.parametrize(
    ("options", "code"),
    [([], 1), (["--allow", "3MiB"], 0), (["--allow", "3145727"], 1), (["--allow", "1GiB"], 0)],
)
def test_the_exit_code_says_whether_the_peak_grew(runs, options, code, capsys):
    assert main(["diff", *runs, *options]) == code
    assert main(["diff", *reversed(runs)]) == 0
    assert main(["diff", runs[0], runs[0]]) == 0


def test_json_is_all_that_is_printed(runs, capsys):
    main(["diff", *runs, "--json"])
    assert json.loads(capsys.readouterr().out) == bfc.diff(*runs).as_dict()


def test_rows_limit_each_table(capsys):
    main(["diff", SMALL, str(TRACES / "unet_buckets.npz"), "--rows", "2"])
    out = capsys.readouterr().out
    assert out.count("\n  and ") == 2
    assert len(out.splitlines()) < 20


@pytest.mark.parametrize("options", [["--rows", "0"], ["--rows", "x"], ["--rows", "-1"]])
def test_rows_are_a_count(runs, options, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["diff", *runs, *options])
    assert raised.value.code == 2
    assert "is not a whole number of at least 1" in capsys.readouterr().err


def test_a_wrong_size_is_said_before_a_file_is_read(capsys):
    assert main(["diff", "none", "none", "--allow", "much"]) == 2
    assert "'much' is not a size" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bad.npz", "bad.pickle", "bad.csv", "missing.npz"])
@pytest.mark.parametrize("first", [True, False])
def test_a_bad_file_is_named_in_one_line(tmp_path, name, first, capsys):
    bad = tmp_path / name
    if name != "missing.npz":
        bad.write_bytes(b"PK\3\4 and nothing else")
    pair = [str(bad), SMALL] if first else [SMALL, str(bad)]
    assert main(["diff", *pair]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("bfc: ")
    assert str(bad) in err
    assert err.count("\n") == 1


def test_of_several_devices_one_is_chosen(tmp_path, capsys):
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("64 MiB"))
    allocator.record_history()
    allocator.allocate_raw(MIB)
    content = allocator.snapshot().to_torch()
    content["device_traces"] *= 2
    path = tmp_path / "two.pickle"
    path.write_bytes(pickle.dumps(content, protocol=4))
    assert main(["diff", str(path), str(path)]) == 2
    assert capsys.readouterr().err == (
        f"bfc: {path}: it holds the devices [0, 1]: choose one with --snapshot-device\n"
    )
    assert main(["diff", str(path), str(path), "--snapshot-device", "0"]) == 0
    assert main(["diff", SMALL, str(path), "--snapshot-device", "0"]) == 0
    capsys.readouterr()
    assert main(["diff", SMALL, SMALL, "--snapshot-device", "0"]) == 2
