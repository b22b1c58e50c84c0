"""Evaluations whose passes are alike: a few are run, which is said, and nothing else is cut."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest

from bfc_tools.predicting.evaluations import ALIKE
from bfc_tools.predicting.script import Ran, run
from bfc_tools.predicting.stopping import Limits

HEAD = """
    import torch

    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.utils.data.TensorDataset(torch.zeros(6400, 64))

    def train(steps=3):
        model.train()
        for step in range(steps):
            model(torch.zeros(64, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    model.eval()
    passes = 0
"""
RANGE = """
    @torch.no_grad()
    def estimate():
        global passes
        found = {}
        for split in ("train", "val"):
            losses = torch.zeros(100)
            for k in range(100):
                passes += 1
                losses[k] = model(torch.zeros(64, 64, device="cuda")).mean().item()
            found[split] = losses.mean()
        return found

    estimate()
    train()
"""
LOADER = """
    with torch.no_grad():
        for (x,) in torch.utils.data.DataLoader(data, 64):
            model(x.cuda())
            passes += 1
    train()
"""
#: With layers as in training, which no gradient follows: as many scripts evaluate.
TRAINING = """
    model.train()
    with torch.no_grad():
        for (x,) in torch.utils.data.DataLoader(data, 64):
            passes += (model(x.cuda()).argmax(1).cpu() == 0).sum().item()
    train()
"""
ASKED = """
    @torch.no_grad()
    def estimate():
        batches = iter(torch.utils.data.DataLoader(data, 64))
        for k in range(100):
            x, = next(batches)
            model(x.cuda())
        return 0

    estimate()
    train()
"""
#: Loops that are run whole, and why.
WHOLE = {
    "results are kept": """
        kept = []
        with torch.no_grad():
            for k in range(30):
                kept.append(model(torch.zeros(64, 64, device="cuda")).cpu())
        assert len(kept) == 30
        train()
    """,
    "passes differ": """
        with torch.no_grad():
            for k in range(30):
                model(torch.zeros(1024 * (k + 1), 64, device="cuda"))
                passes = k + 1
        assert passes == 30
        train()
    """,
    "it asks a DataLoader, and nothing stands behind it": """
        batches = iter(torch.utils.data.DataLoader(data, 64))
        with torch.no_grad():
            for k in range(30):
                model(next(batches)[0].cuda())
        train()
    """,
    "it trains": """
        for k in range(30):
            with torch.no_grad():
                model(torch.zeros(64, 64, device="cuda"))
            model(torch.zeros(64, 64, device="cuda")).sum().backward()
            passes = k + 1
        optimizer.step()
        assert passes == 30
    """,
    "the model is in training": """
        model.train()
        with torch.no_grad():
            for k in range(30):
                model(torch.zeros(64, 64, device="cuda"))
                passes = k + 1
            assert passes == 30
        train()
    """,
}


def ran(script: Callable[[str], str], text: str, limits: Limits | None = None) -> Ran:
    found = run(script(textwrap.dedent(HEAD) + textwrap.dedent(text)), [], limits=limits)
    assert found.error is None
    return found


@pytest.mark.parametrize(
    "text",
    [RANGE, LOADER, TRAINING, ASKED],
    ids=["range", "DataLoader", "layers as in training", "next"],
)
def test_ten_passes_of_many_are_run(
    script: Callable[[str], str], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    found = ran(script, text)
    forwards = found.stopping.forwards
    assert ALIKE <= forwards <= 2 * ALIKE + 6
    assert found.steps == 2
    told = capfd.readouterr().err
    assert told.count("passes of this loop, which evaluates, took the same memory") == 1
    whole = ran(script, text, Limits(steps=1 << 62))
    assert whole.stopping.forwards >= 100
    assert whole.prediction.peak_requested == found.prediction.peak_requested
    assert whole.prediction.peak_reserved == found.prediction.peak_reserved


@pytest.mark.parametrize("text", WHOLE.values(), ids=WHOLE)
def test_what_may_matter_is_run_whole(
    script: Callable[[str], str], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    ran(script, text)
    assert "passes of this loop" not in capfd.readouterr().err
