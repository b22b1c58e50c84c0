"""`--csv` and `--json`, which every command that prints a table has."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

import bfc
from bfc_tools.cli import main, replay

TRACES = Path(__file__).parents[2] / "bench" / "traces"
SMALL = str(TRACES / "gpu_lm_small.npz")


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str]:
    """Two runs. An owner of the second would clear the terminal, and has a comma and quotes."""
    made = []
    for stem, owner in (("a", "weights"), ("b", '\x1b[2J,"x"')):
        path = tmp_path / f"{stem}.npz"
        sizes = [4096, 512] if stem == "b" else [4096]
        owners, numbers = ["", owner], [1] * len(sizes)
        bfc.Trace([0] * len(sizes), range(len(sizes)), sizes, owner=numbers, owners=owners).save(
            path
        )
        made.append(str(path))
    return made[0], made[1]


def printed_rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, str]]:
    main([*arguments, "--csv"])
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out), strict=True))


def test_a_replay_has_the_figures_of_its_json(capsys):
    options = ["--no-picture", "--policy", "bfc", "--policy", "caching:expandable_segments:True"]
    rows = printed_rows(capsys, "replay", SMALL, *options)
    main(["replay", SMALL, *options, "--json"])
    wanted = json.loads(capsys.readouterr().out)["traces"]
    assert [row["policy"] for row in rows] == [row["policy"] for row in wanted]
    for row, full in zip(rows, wanted, strict=True):
        by_kind = full.pop("driver_calls_by_kind")
        assert {kind for kind in replay.CALLS if row[f"{kind}_calls"] != "0"} == set(by_kind)
        for name in full.keys() - {"ns_per_event"}:
            assert row[name] == ("" if full[name] is None else str(full[name]))


def test_a_diff_has_every_row_of_its_json(capsys, runs):
    rows = printed_rows(capsys, "diff", *runs)
    found = bfc.diff(*runs).as_dict()
    for at in ("peak", "end"):
        for kind in ("owner", "line", "size"):
            parts = [row for row in rows if (row["at"], row["by"]) == (at, kind)]
            growths = [str(part["growth"]) for part in found[at][f"by_{kind}"]]
            assert [part["growth"] for part in parts] == growths
    assert list(rows[0].values()) == ["peak", "total", "", "4096", "4608", "512", "1", "2"]


def test_a_name_in_csv_cannot_move_the_cursor(capsys, runs):
    names = {row["name"] for row in printed_rows(capsys, "diff", *runs)}
    assert ascii('\x1b[2J,"x"') in names
    assert "weights" in names


def test_devices_are_rows_and_what_is_missing_is_one_too(capsys):
    rows = printed_rows(capsys, "devices")
    assert {row["kind"] for row in rows} == {"cuda", "opencl", "host"}
    for row in rows:
        assert bool(row["total_bytes"]) != bool(row["fault"])


def test_one_format_is_asked_for(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["devices", "--csv", "--json"])
    assert ended.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err
