"""`bfc demo`: the recording that it makes, and the commands that it prints to go on with."""

from __future__ import annotations

import re
import shlex

import pytest

import bfc
from bfc_tools.cli import demo, main


@pytest.fixture
def printed(capsys, monkeypatch, tmp_path) -> str:
    """What it prints, without the advice: tests/documents runs all of it, as the README has it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo.advise, "run", lambda arguments: True)
    assert main(["demo", "a folder"]) == 0
    return capsys.readouterr().out


def test_the_recording_fits_only_under_other_settings_than_the_defaults(printed):
    trace = bfc.Trace.from_torch("a folder/training.pickle")
    refused = {}
    for settings in ("", "expandable_segments:True"):
        device = bfc.SimulatedSubAllocator(demo.DEVICE)
        with bfc.CachingAllocator(device, settings=settings, strict=True) as allocator:
            refused[settings] = trace.replay(allocator).failed
    assert refused == {"": 1, "expandable_segments:True": 0}
    assert {"weights", "activations", "optimizer"} <= set(trace.owners)


def test_what_it_prints_can_be_typed(printed, capsys):
    own, other = printed.split("or on a run of yours")
    shown = [shlex.split(line)[2:] for line in own.splitlines() if line.startswith("$ bfc")]
    assert [words[0] for words in shown] == ["advise", "report"]
    following = [shlex.split(line)[1:] for line in own.splitlines() if line.startswith("  bfc ")]
    assert [words[0] for words in following] == ["replay", "report"]
    assert [main(words) for words in following] == [1, 0]  # the defaults refuse on that device
    assert len(re.findall(r"^  bfc (?:advise|report) snapshot", other, re.MULTILINE)) == 2
