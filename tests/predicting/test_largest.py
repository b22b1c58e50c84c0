"""The largest that fits, and the GPUs on which a program fits: by the command and in Python, and
what is said of scripts that cannot be asked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from documents import BLOCK, ROOT
from fresh_commands import called, command

#: With {} for what reads the size of the batch. Each row of the batch takes a MiB, or two.
PROGRAM = """
import argparse, os, sys
import torch

{}
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(batch, 1024, 256, device="cuda")).sum().backward()
    optimizer.step()
"""
OPTION = """
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, required=True)
parser.add_argument("--length", type=int, default=1)
arguments = parser.parse_args()
batch = arguments.batch_size * arguments.length
"""
KEY = 'batch = int(dict(word.split("=") for word in sys.argv[1:])["batch_size"])'
JOINED = """
if len(sys.argv) != 2 or not sys.argv[1].startswith("--batch_size="):
    sys.exit("a word too much or too few")
batch = int(sys.argv[1].partition("=")[2])
"""
VARIABLE = 'batch = int(os.environ["BATCH"])'


@pytest.fixture
def script(script):
    return lambda reads: script(PROGRAM.replace("{}", reads))


def largest(name: str, *more: str, device: str = "64MiB", code: int = 0) -> dict[str, Any]:
    found, out, err = command("predict", name, "--device", device, "--json", "--largest", *more)
    assert found == code, err
    return json.loads(out)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("reads", "asked", "form"),
    [
        (OPTION, "batch-size=1..512", "--batch-size N"),
        (KEY, "batch-size=1..512", "batch_size=N"),
        (JOINED, "batch-size=1..512", "--batch_size=N"),
        (VARIABLE, "env:BATCH=1..512", "BATCH=N"),
    ],
    ids=["option", "key", "joined", "variable"],
)
def test_the_largest_is_proven_by_the_next(script, reads: str, asked: str, form: str) -> None:
    found = largest(script(reads), asked)
    assert (found["form"], found["is_proven"], found["fits"]) == (form, True, True)
    assert found["first_too_large"] == found["value"] + 1
    fits = {one["value"]: one["fits"] for one in found["tries"]}
    assert fits[found["value"]] is True
    assert fits[found["value"] + 1] is False
    assert all(one["reserved"] > one["live"] > one["value"] << 20 for one in found["tries"])


def test_a_try_needs_what_a_prediction_with_that_value_needs(script) -> None:
    found = largest(script(OPTION), "batch-size=3,5")
    for one in found["tries"]:
        words = ("predict", "train.py", "--device", "64MiB", "--batch-size", str(one["value"]))
        _, out, _ = command(*words, "--json")
        single = json.loads(out)
        after = single["peak_reserved_after_repeats"]
        assert one["live"] == single["peak_requested"]
        assert one["reserved"] == max(single["peak_reserved"], after)


def test_an_argument_that_stands_there_is_varied_where_it_stands(script) -> None:
    code, out, err = command(
        *("predict", script(OPTION), "--batch-size", "7", "--length", "2", "--device", "64MiB"),
        *("--largest", "batch-size=1..64"),
    )
    assert code == 0, err
    assert out.startswith("The largest batch-size that fits on a GPU of 64.00 MiB is ")
    assert "The script takes it as --batch-size N.\n" in out
    assert "bfc: batch-size 1: it fits, " in err


def test_a_script_that_does_not_have_it(script) -> None:
    code, out, err = command(
        *("predict", script("batch = 3"), "--device", "64MiB", "--largest", "batch-size=1..9")
    )
    assert (code, out) == (2, "")
    assert "batch-size changes nothing in what train.py does on the GPU" in err
    assert "env:batch-size=1..512" in err
    code, out, err = command(
        *("predict", script(OPTION), "--device", "64MiB", "--largest", "bath=1..9")
    )
    assert (code, out) == (2, "")
    assert "ended before it used the GPU when it was given any of these" in err
    assert "error: " in err  # what argparse says


def test_none_fits_and_all_fit(script) -> None:
    found = largest(script(OPTION), "batch-size=100..200", code=1)
    assert found["value"] is None
    assert found["answer"].startswith("None of batch-size 100..200 fits on a GPU of 64.00 MiB: 100")
    found = largest(script(OPTION), "batch-size=1..4")
    assert found["answer"].startswith("All of batch-size 1..4 fit on a GPU of 64.00 MiB: 4 ")


def test_a_try_that_crashes_leaves_the_others(script) -> None:
    crash = "\nif batch == 2: os.kill(os.getpid(), 11)"
    found = largest(script(OPTION + crash), "batch-size=2..9")
    first = found["tries"][0]
    assert (first["value"], first["fits"]) == (2, None)
    assert "SIGSEGV" in first["error"]
    assert found["answer"].startswith("All of batch-size 2..9 fit")
    code, out, err = command(
        *("predict", script(OPTION + "\nraise OSError('no data')"), "--largest", "batch-size=1..8")
    )
    assert (code, out) == (2, "")
    assert "OSError: no data" in err


def test_a_try_in_which_bfc_fails_says_so_and_leaves_the_others(script) -> None:
    """It is not the script that ended its process, nor one that does not have the argument."""
    code, out, err = called(_with_a_mistake, script(OPTION), "batch-size=2..9")
    assert code == 0, err
    assert "KeyError: 'odd': bfc did not expect this, so it is a mistake in bfc" in out
    assert out.startswith("All of batch-size 2..9 fit")
    assert "bfc: batch-size 2: KeyError: 'odd': bfc did not expect this" in err
    assert "Traceback (most recent call last):" in err
    assert "in broken" in err
    code, out, err = called(_with_a_mistake, script(OPTION), "batch-size=2")
    assert (code, out) == (2, "")
    assert "No answer" in err
    assert "a mistake in bfc" in err
    assert "ended before it used the GPU" not in err


def _with_a_mistake(name: str, asked: str) -> tuple[int, str, str]:
    from fresh_commands import _main

    from bfc_tools.predicting.asked import Asked

    run = Asked.run

    def broken(self: Asked, *more: Any) -> Any:
        if self.arguments[-1] == "2":
            raise KeyError("odd")
        return run(self, *more)

    Asked.run = broken  # type: ignore[method-assign]
    return _main(["predict", name, "--device", "64MiB", "--largest", asked])


def test_ctrl_c_leaves_what_was_found(script) -> None:
    stop = "\nif batch > 8: os.kill(int(os.environ['WHOM']), 2)"
    code, out, err = called(_interrupted, script(OPTION + stop))
    assert code == 130, err
    assert out.startswith("Not finished: batch-size 8 fits on a GPU of 64.00 MiB")
    assert err.endswith("bfc: interrupted\n")


def _interrupted(name: str) -> tuple[int, str, str]:
    from fresh_commands import _main

    os.environ["WHOM"] = str(os.getpid())
    return _main(["predict", name, "--device", "64MiB", "--largest", "batch-size=1..512"])


def test_two_arguments_are_a_frontier(script) -> None:
    found = largest(script(OPTION), "batch-size=1..64", "--largest", "length=1,2")
    rows = {row["other"]: row["value"] for row in found["frontier"]}
    assert list(rows) == [1, 2]
    assert rows[1] // 2 == rows[2] > 0
    assert f"{rows[1]} x 1, {rows[2]} x 2" in found["answer"]


def test_a_finder_of_batch_sizes_is_told_of_oom(script) -> None:
    found = largest(script(OPTION + "\n# auto_find_batch_size"), "batch-size=1,2")
    assert "--oom" in found["hints"][0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--largest", "b=1..8", "--cheapest"], "two questions"),
        (["--largest", "b=1..8", "--save", "t.npz"], "--save is about one prediction"),
        (["--cheapest", "--device", "h100"], "leave --device out"),
        (["--largest", "b=1..8", "--jobs", "0"], "--jobs is 1 or more"),
        (["--largest", "b=1..8", "--largest", "b=1..8"], "there twice"),
        (["--largest", "b=1..8", "--largest", "c=1", "--largest", "d=1"], "one argument, or two"),
        (["--largest", "b=8..4"], "--largest b=8..4: the range is empty. The smallest comes first"),
        (["--largest", "b=1..8:0"], "--largest b=1..8:0: the step is 1 or more, not 0"),
        (["--largest", "b"], "--largest b: write a range, as batch-size=1..512 or "),
    ],
)
def test_options_that_do_not_go_together(script, capsys, words: list[str], said: str) -> None:
    from bfc_tools.cli import main

    assert main(["predict", *words, script(OPTION)]) == 2
    assert said in capsys.readouterr().err


def test_the_gpus_on_which_it_fits(script) -> None:
    code, out, err = called(_among_three, script("batch = 20_000"))
    assert code == 0, err
    found = json.loads(out)
    assert [(row["device"], row["fits"]) for row in found["devices"]] == [
        ("t4", False),
        ("a100-40gb", False),
        ("h200", True),
    ]
    assert found["answer"].startswith("The smallest GPU that it fits on is h200: it reserves ")


def _among_three(name: str) -> tuple[int, str, str]:
    from fresh_commands import _main

    from bfc_tools.predicting import cheapest

    kept = {name: cheapest.DEVICES[name] for name in ("h200", "t4", "a100-40gb")}
    cheapest.DEVICES = kept  # type: ignore[misc]
    return _main(["predict", name, "--cheapest", "--json"])


def test_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    value, first_too_large, wrote, text = called(_of_a_function)
    assert (value, first_too_large, wrote) == (64, 65, False)
    assert text.startswith("The largest value that fits on a GPU of 64.00 MiB is 64: ")


def _of_a_function() -> tuple[Any, ...]:
    import bfc

    def makes(size: int) -> None:
        import torch

        Path("made").write_text("")
        torch.empty(size << 20, dtype=torch.uint8, device="cuda")

    found = bfc.largest(makes, "1..1000", "64 MiB")
    return found.value, found.first_too_large, Path("made").exists(), str(found)


def test_a_function_by_the_rules_of_another_release() -> None:
    """Each try is told which, and says it of one that is not known."""
    known, unknown = called(_by_other_releases)
    assert known == (True, "")
    assert unknown[0] is None
    assert "1.0" in unknown[1]


def _by_other_releases() -> list[tuple[bool | None, str]]:
    import bfc

    def makes(size: int) -> None:
        import torch

        torch.empty(size, device="cuda")

    tries = [bfc.largest(makes, [8], as_torch=one, jobs=1).tries[0] for one in ("2.9", "1.0")]
    return [(one.fits, one.error) for one in tries]


def test_the_function_of_the_page() -> None:
    value, first_too_large = called(_of_the_page)
    assert first_too_large == value + 1 > 1


def _of_the_page() -> tuple[int, int]:
    page = (ROOT / "docs" / "how-to" / "what-then.md").read_text()
    (code,) = (code for kind, code in BLOCK.findall(page) if kind == "py")
    names: dict[str, Any] = {}
    exec(compile(code, "what-then.md", "exec"), names)
    return names["found"].value, names["found"].first_too_large


@pytest.mark.parametrize(
    ("values", "said"),
    [([], "no values to try"), ("8..4", "range is empty"), ("many", "write a range")],
)
def test_a_function_without_values(values: Any, said: str) -> None:
    import bfc

    with pytest.raises(ValueError, match=said):
        bfc.largest(print, values)


def test_a_process_that_has_made_a_prediction_says_so() -> None:
    import torch

    import bfc

    with bfc.predict("h100"):
        torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError, match="search in another process"):
        bfc.largest(print, "1..8")
