"""Budgets of memory: what passes, what an error names, and files of figures that are damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import bfc
from bfc_tools.predicting.devices import DEVICES
from bfc_tools.study import budgets
from bfc_tools.study.budgets import FILE, Budget, BudgetError

KIB = 1 << 10


def allocate(pool: bfc.Allocator, nbytes: int) -> bfc.Buffer:
    return pool.allocate(nbytes)


#: How an error names what `allocate` holds.
LINE = f"test_budgets.py:{allocate.__code__.co_firstlineno + 1} in allocate"


@pytest.fixture
def pool() -> bfc.CachingAllocator:
    return bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))


def budget(folder: Path, **options) -> Budget:
    return Budget("test_theirs.py::test_it", folder, Path(__file__).parent, **options)


def stored(folder: Path) -> dict:
    """The figures of a folder."""
    return json.loads((folder / FILE).read_text())["figures"]


def store(folder: Path, pool: bfc.Allocator, *sizes: int) -> None:
    """As a test does that passes under `--bfc-write-budgets`."""
    check = budget(folder, write=True)
    play(check, pool, *sizes)
    assert check.passed() == ""


def play(check: Budget, pool: bfc.Allocator, *sizes: int, **options) -> int:
    with check(pool, **options) as block:
        held = [allocate(pool, nbytes) for nbytes in sizes]
        del held
    return block.peak


def test_a_limit_is_the_most_that_may_be_live(tmp_path, pool) -> None:
    assert play(budget(tmp_path), pool, KIB, KIB, limit="2 KiB") == 2 * KIB
    with pytest.raises(BudgetError) as caught:
        play(budget(tmp_path, limit="2 KiB"), pool, KIB, KIB, 1)
    first, second, *rows = str(caught.value).splitlines()
    assert first == "2.0 KiB live at most, 1 B over the budget of 2.0 KiB"
    assert second == "At the peak, most is held by:"
    assert [row.split(maxsplit=2)[2] for row in rows] == [LINE]


def test_what_was_live_before_a_block_counts(tmp_path, pool) -> None:
    before = pool.allocate(KIB)
    assert play(budget(tmp_path), pool, KIB, limit="2 KiB") == 2 * KIB
    before.free()


def test_a_stored_figure_is_compared(tmp_path, pool) -> None:
    with pytest.raises(
        BudgetError, match=r"has no figure of test_theirs\.py::test_it: pytest --bfc"
    ):
        play(budget(tmp_path), pool, KIB)
    store(tmp_path, pool, KIB)
    assert stored(tmp_path) == {
        "test_theirs.py::test_it": {"live": KIB, "held": {"test_budgets.py in allocate": KIB}}
    }
    play(budget(tmp_path), pool, KIB)
    play(budget(tmp_path), pool, KIB - 1)
    play(budget(tmp_path), pool, KIB, 100, allow=100)
    with pytest.raises(BudgetError) as caught:
        play(budget(tmp_path), pool, KIB, 101, allow=100)
    first, _, row, last = str(caught.value).splitlines()
    assert first.endswith("+101 B (+9.9%), more than the 100 B allowed")
    assert row.strip() == f"+101 B  {LINE}: 1.1 KiB"
    assert last == "If that is as it should be: pytest --bfc-write-budgets"


def test_figures_of_one_test_have_names(tmp_path, pool) -> None:
    check = budget(tmp_path, write=True)
    play(check, pool, KIB, name="first")
    play(check, pool, 2 * KIB, name="second")
    assert check.passed() == ""
    assert len(stored(tmp_path)) == 2
    with pytest.raises(ValueError, match="give each of a test a name"):
        play(check, pool, KIB, name="first")


def test_a_trace_is_judged_by_what_is_live(tmp_path) -> None:
    trace = bfc.Trace([0, 0, 1], [0, 1, 0], [4096, 1024, 0])
    budget(tmp_path)(trace, 5120)
    with pytest.raises(BudgetError, match=r"5\.0 KiB live at most, 1 B over"):
        budget(tmp_path)(trace, 5119)
    budget(tmp_path)(bfc.Trace([], [], []), 0)


def test_an_error_in_a_block_is_not_hidden(tmp_path, pool) -> None:
    def fails() -> None:
        with budget(tmp_path, limit=0)(pool):
            pool.allocate(KIB)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    play(budget(tmp_path, limit=KIB), pool, KIB)


def test_what_is_refused(tmp_path, pool) -> None:
    with pytest.raises(TypeError, match="for a prediction, a Trace or an allocator, not for int"):
        budget(tmp_path)(3)
    pool.record_history()
    with pytest.raises(ValueError, match="records a history, which a budget would drop"):
        play(budget(tmp_path), pool, KIB, limit=KIB)
    pool.record_history(None)
    with (
        pytest.raises(ValueError, match="closed in the block"),
        budget(tmp_path, limit=KIB)(pool),
    ):
        pool.close()


@pytest.mark.parametrize("given", [{"limit": "22 gigs"}, {"limit": -1}, {"allow": "some"}])
def test_a_limit_that_is_no_size_is_refused_before_the_test_runs(tmp_path, given) -> None:
    with pytest.raises(ValueError, match=r"is not a size: write|a size lies between"):
        budget(tmp_path, **given)


DAMAGED = ["{", "[]", "\0", "\xff", "{}", '{"figures": 3}', '{"figures": {"a": 3}}', "[" * 10**5]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_is_named_and_left_alone(tmp_path, pool, text) -> None:
    (tmp_path / FILE).write_text(text, "latin-1")
    with pytest.raises(BudgetError, match="holds no figures of budgets: restore it, or remove it"):
        play(budget(tmp_path), pool, KIB)
    check = budget(tmp_path, write=True)
    play(check, pool, KIB)
    assert "cannot be stored" in check.passed()
    assert (tmp_path / FILE).read_text("latin-1") == text


def test_a_figure_of_another_format_or_kind_is_refused(tmp_path, pool) -> None:
    file = tmp_path / FILE
    store(tmp_path, pool, KIB)
    whole = json.loads(file.read_text())
    file.write_text(json.dumps(whole | {"format": 2}))
    with pytest.raises(BudgetError, match="has format 2, and this bfc knows 1"):
        play(budget(tmp_path), pool, KIB)
    (entry,) = whole["figures"].values()
    entry["reserved"] = entry.pop("live")
    file.write_text(json.dumps(whole))
    with pytest.raises(BudgetError, match="the stored figure is not of what is live"):
        play(budget(tmp_path), pool, KIB)


def test_what_cannot_be_stored_fails_the_test(tmp_path, pool) -> None:
    check = budget(tmp_path / "gone", write=True)
    play(check, pool, KIB)
    assert "the figures of test_theirs.py::test_it cannot be stored: [Errno 2]" in check.passed()


def prediction(trace: bfc.Trace, gpu: str = "a100", torch: str = "2.15.0+cu130") -> object:
    """What a budget takes of one, where there is no PyTorch."""
    found = type("Prediction", (), {"verdict": None})()
    found.trace, found.gpu, found.torch_version = trace, DEVICES[gpu], torch
    found.peak_reserved = 2 * trace.peak_bytes_live()
    return found


def test_figures_of_other_gpus_and_pytorches_are_not_compared(tmp_path, monkeypatch) -> None:
    small, large = bfc.Trace([0], [0], [1024]), bfc.Trace([0], [0], [4096])
    check = budget(tmp_path, write=True)
    check(prediction(small))
    assert check.passed() == ""
    budget(tmp_path)(prediction(small, torch="2.15.1+cpu"))
    with pytest.raises(BudgetError, match=r"of another machine: torch 2\.15, not 2\.13\. Such"):
        budget(tmp_path)(prediction(small, torch="2.13.0"))
    with pytest.raises(BudgetError, match=r"machine: gpu NVIDIA A100.*8\.0.*, not NVIDIA H100"):
        budget(tmp_path)(prediction(small, "h100"))
    with pytest.raises(BudgetError) as caught:
        budget(tmp_path)(prediction(large))
    assert "It was stored by bfc" not in str(caught.value)
    monkeypatch.setattr(budgets, "__version__", "99.0.0")
    with pytest.raises(BudgetError, match=r"It was stored by bfc \S+, and this is 99\.0\.0"):
        budget(tmp_path)(prediction(large))


WRITER = """
import sys
from pathlib import Path
import bfc
from bfc_tools.study.budgets import Budget
folder, worker = Path(sys.argv[1]), sys.argv[2]
for number in range(20):
    trace = bfc.Trace([0], [0], [number])
    check = Budget(f"test_{worker}_{number}", folder, folder, write=True)
    check(trace)
    assert check.passed() == ""
"""


def test_workers_store_side_by_side(tmp_path) -> None:
    """As those of pytest-xdist do: nothing that another has stored is lost."""
    workers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(worker)])
        for worker in range(2)
    ]
    assert [worker.wait(60) for worker in workers] == [0, 0]
    figures = stored(tmp_path)
    assert {f"test_{w}_{n}": n for w in range(2) for n in range(20)} == {
        name: figure["live"] for name, figure in figures.items()
    }
