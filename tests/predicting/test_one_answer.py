"""The first line, the exit code, the JSON and all later lines of `bfc predict` say the same: a
matrix of programs and options, each held against what any two of them may contradict."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest
import torch

import bfc
from bfc.units import parse_bytes
from bfc_tools.cli import main
from bfc_tools.predicting import session

MIB = 1 << 20

HEAD = """
import sys, torch
MIB = 1 << 20
def take(n): return torch.empty(n * MIB, dtype=torch.uint8, device="cuda")
"""
TRAIN = """
model = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for step in range(4):
    optimizer.zero_grad()
    made = model(torch.randn(SIZE, 1024, device="cuda"))
    KEEP
    made.sum().backward()
    optimizer.step()
"""
#: Free pieces that together would hold the last request.
PIECES = """
a = [take(30) for _ in range(8)]
for _ in range(2): b = a.pop(); c = take(18); del b; a.append(c)
del a[::2]
d = take(60)
"""
PROGRAMS = {
    "small": "x = take(20)\n",
    "large": "x = take(300)\n",
    "pieces": PIECES,
    "training": TRAIN.replace("SIZE", "4096").replace("KEEP", "pass"),
    "leaks": TRAIN.replace("SIZE", "1024").replace("KEEP", "kept.append(made.detach())"),
    "lengths": TRAIN.replace("SIZE", "[4096, 7000, 5000, 6500][step]").replace("KEEP", "pass"),
    "fraction": "torch.cuda.set_per_process_memory_fraction(0.25)\nx = take(100)\n",
    "fraction, caught": (
        "torch.cuda.set_per_process_memory_fraction(0.25)\nx = take(40)\n"
        "try:\n    y = take(60)\nexcept torch.OutOfMemoryError:\n    pass\n"
    ),
    "another device": "x = take(20)\ny = x.to('cuda:1')\n",
    "exits with 3": "x = take(20)\nsys.exit(3)\n",
    "caught": (
        "x = take(100)\ntry:\n    y = take(150)\nexcept torch.OutOfMemoryError:\n    sys.exit(0)\n"
    ),
    "caught, 1": (
        "x = take(100)\ntry:\n    y = take(150)\nexcept torch.OutOfMemoryError:\n    sys.exit(1)\n"
    ),
    "finder": (
        "n = 1 << 30\nwhile n:\n    try:\n        x = take(n)\n        break\n"
        "    except torch.OutOfMemoryError:\n        n //= 2\n"
    ),
    "says so": "x = take(10)\nraise torch.OutOfMemoryError('CUDA out of memory.')\n",
    "fails": "x = take(10)\nopen('nothing-there.bin')\n",
    "fails when full": "x = take(300)\nopen('nothing-there.bin')\n",
}
OPTIONS = {
    "plain": [],
    "oom": ["--oom", "--by", "line"],
    "expandable": ["--settings", "expandable_segments:True", "--no-advice"],
    "fraction": ["--settings", "per_process_memory_fraction:0.5"],
    "old": ["--by", "op"],
}
SIZE = re.compile(r"\d+(?:\.\d+)? (?:B|KiB|MiB|GiB|TiB)\b")
YES = re.compile(r"\bfits\b|nothing has to change|is enough", re.IGNORECASE)
NO = re.compile(
    r"not fit|refused|nothing makes|nothing that was tried|runs out|ran out|too many|OutOfMemory",
    re.IGNORECASE,
)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)

    def ask(program: str, *options: str) -> tuple[int, str]:
        (tmp_path / "train.py").write_text(HEAD + program)
        code = main(["predict", "--steps", "0", *options, "train.py"])
        return code, capsys.readouterr().out

    return ask


def contradictions(code: int, text: str, found: dict) -> list[str]:
    """What two parts of one prediction say differently."""
    first, *later = text.splitlines()
    fits, advice = found["fits"], found["advice"]
    reserved = max(
        found["peak_reserved"],
        found["peak_reserved_range"][1],
        found["peak_reserved_after_repeats"] or 0,
    )
    figures = {size for line in later for size in SIZE.findall(line)}
    words = {True: "It fits on ", None: "Until it failed: It fits on "}
    said_no = re.match(r"It (does not fit|may not fit|runs out of memory) on ", first) is not None
    checks = {
        "exit code and JSON": code == {True: 0, False: 1, None: 2}[fits],
        "first line and JSON": first == found["answer"],
        "first line and fits": said_no if fits is False else first.startswith(words[fits]),
        "peaks": found["peak_requested"] <= found["peak_allocated"] <= reserved,
        "a refusal and fits": fits is False or not found["refused"],
        "a reason and fits": (fits is False) == bool(found["reason"]),
        "the limit and fits": fits is False
        or "if only just" in first
        or reserved <= found["limit"],
        "no advice where it fits": fits is False or advice is None,
        "the limit and the device": found["limit"] <= found["device"]["usable"],
    }
    wrong = [name for name, holds in checks.items() if not holds]
    device = {found["device"]["name"], f"{found['limit'] / MIB:.2f} MiB"}
    wrong += [
        f"{size} of the first line is nowhere else"
        for size in SIZE.findall(first)
        if size not in figures
        and not any(size in one for one in device)
        and not any(abs(parse_bytes(size) - it) < MIB for it in (found["limit"], reserved))
    ]
    for line in later:
        if fits is not False and NO.search(line):
            wrong.append(f"it fits, and yet: {line}")
        if (
            fits is False
            and YES.search(line)
            and not re.search(
                r"^PyTorch \S+.*: (It fits on .* with|Nothing .*makes it fit)|^settings +fits", line
            )
        ):
            wrong.append(f"it does not fit, and yet: {line}")
    if advice is not None:
        now = advice["rows"][advice["in_force"]]
        wrong += ["the settings in force fit in the advice"] if now["fits"] else []
        wrong += ["another limit in the advice"] if advice["device"] != found["limit"] else []
        wrong += [] if advice["answer"] in text else ["another advice in JSON"]
    return wrong


@pytest.mark.sampled(27)  # of 80: each of both several times
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_part_contradicts_another(asked, monkeypatch, program: str, options: str) -> None:
    if options == "old":
        memory = session.Memory
        monkeypatch.setattr(session, "Memory", lambda *given: memory(*given[:-1], "2.11"))
    text, words = PROGRAMS[program], ["--device", "200MiB", *OPTIONS[options]]
    code, out = asked(text, *words)
    again, as_json = asked(text, "--json", *words)
    found = json.loads(as_json)
    assert again == code
    assert contradictions(code, out, found) == [], out
    if found["fits"] is False and not found["refused"] and found["reason"] != "refused":
        enough = max(found["peak_reserved_range"][1], found["peak_reserved_after_repeats"] or 0)
        if "fraction" not in f"{program} {options}":
            assert asked(text, *words, "--device", str(enough))[0] in (0, 2)
    advice = found["advice"]
    if advice is not None and advice["best"] is not None:
        row = advice["rows"][advice["best"]]
        if row["policy"] == "caching" and options != "fraction":
            now = [*words, "--settings", row["settings"]]
            assert asked(text, *now)[0] in (0, 2), row["settings"]


@pytest.mark.parametrize("oom", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_block_in_python_says_what_the_command_says(asked, program: str, oom: bool) -> None:
    """Where the program failed, the block said that it fits, and the command that this holds until
    then."""
    text = PROGRAMS[program]
    code, out = asked(text, "--device", "200MiB", "--no-advice", *["--oom"] * oom)
    with contextlib.suppress(BaseException), bfc.predict(device="200MiB", oom=oom) as run:
        exec(compile(HEAD + text, "train.py", "exec"), {"__name__": "__main__"})
    found = run.to_dict()
    assert str(run).startswith(f"{found['answer']}\n")
    assert found["answer"] == out.partition("\n")[0]
    assert {True: 0, False: 1, None: 2}[found["fits"]] == code
    assert run.fits() == (code == 0)
    assert bool(found["reason"]) == (found["fits"] is False)


def test_a_block_that_is_left_on_purpose_has_not_failed() -> None:
    with contextlib.suppress(SystemExit), bfc.predict("h100") as run:
        torch.ones(3, device="cuda")
        raise SystemExit
    assert run.fits()
    with contextlib.suppress(KeyboardInterrupt), bfc.predict("h100") as run:
        torch.ones(3, device="cuda")
        raise KeyboardInterrupt
    assert str(run).startswith("Until it was interrupted: It fits on ")


def test_a_saved_prediction_is_advised_as_it_was(asked, capsys) -> None:
    """Also one that caught the error of what it was refused."""
    program = PROGRAMS["caught"]
    assert asked(program, "--device", "200MiB", "--oom", "--save", "run.npz")[0] == 1
    advice = bfc.advise("run.npz", "200 MiB", jobs=1)
    assert (advice.fits, advice.refused_at_the_end) == (False, 150 * MIB)


def test_the_limit_that_a_program_allows_itself_is_named(asked, capsys) -> None:
    program = "torch.cuda.set_per_process_memory_fraction(0.1)\nx = take(9000)\n"
    code, out = asked(program, "--device", "h100")
    assert code == 1
    assert ", of which the program allows PyTorch 7.92 GiB: it would reserve 8.79 GiB." in out
    assert "Nothing makes it fit on 7.92 GiB" in out
    (Path.cwd() / "train.py").write_text(HEAD + program)
    assert main(["predict", "--device", "h100", "--oom", "--no-advice", "train.py"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("It runs out of memory on ")
    assert "GPU 0 has a total capacity of 79.18 GiB of which 78.68 GiB is free. 7.92 GiB " in err
    assert "GiB allowed; Of the allocated memory 0 B is allocated by PyTorch" in err


def test_a_program_that_adapts_is_told_of_the_option(asked) -> None:
    code, out = asked(PROGRAMS["finder"], "--device", "200MiB")
    assert code == 1
    assert "The program names OutOfMemoryError" in out
    assert "add --oom" in out
    code, out = asked(PROGRAMS["finder"], "--device", "200MiB", "--oom")
    assert code == 1
    assert "the program caught the error and went on" in out
    assert "PYTORCH_CUDA_ALLOC_CONF" not in out


def test_a_program_that_only_names_the_error_is_given_settings(asked) -> None:
    program = "kept = []\ntry:\n    for _ in range(5):\n"
    program += "        x = take(60)\n        del x\n        kept.append(take(35))\n"
    program += "except torch.OutOfMemoryError:\n    print('too large')\n    raise\n"
    code, out = asked(program, "--device", "240MiB")
    assert code == 1
    assert "The program names OutOfMemoryError: " in out
    assert "export PYTORCH_CUDA_ALLOC_CONF=" in out
