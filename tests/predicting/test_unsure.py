"""Between which figures a prediction lies, where sizes are not known."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import bfc
from bfc.trace import Trace
from bfc_tools.cli import main
from bfc_tools.predicting.memory import Doubted
from bfc_tools.predicting.rules.interface import Doubt
from bfc_tools.predicting.text import lines
from bfc_tools.predicting.unsure import AT_WORST, LEAST, MOST, at, reasons

MIB = 1 << 20


@pytest.fixture
def _no_cudnn(monkeypatch) -> None:
    monkeypatch.setenv("BFC_CUDNN_LIBRARY", "")


def between(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("between ", "at least "))]


@pytest.mark.usefixtures("_no_cudnn")
def test_a_plan_that_is_not_known_gives_a_range_and_its_reason() -> None:
    with bfc.predict("a100") as run:
        convolution = nn.Conv2d(64, 64, 3, padding=1, bias=False, device="cuda")
        convolution(torch.empty(8, 64, 64, 64, device="cuda"))
    images, weight = 4 * 8 * 64 * 64 * 64, 4 * 64 * 64 * 9
    # without a workspace, and where all is converted; tensor cores take no FFT for a result
    live = run.live_bounds
    assert live.low == 2 * images + weight
    assert live.high == live.with_an_fft == 4 * images + 2 * weight + 16 == run.peak_requested
    held = run.reserved_bounds
    assert held.low == 22 * MIB
    assert held.high == held.with_an_fft == run.peak_reserved == 40 * MIB
    reason = "cuDNN's workspaces of convolutions are estimates where cuDNN is not asked itself"
    assert live.because == [reason]
    assert between(str(run)) == [
        f"between    16.14 MiB and 32.28 MiB live, 22.00 MiB and 40.00 MiB reserved, since {reason}"
    ]
    assert json.loads(run.to_json())["live_bounds"]["low"] == live.low


@pytest.mark.usefixtures("_no_cudnn")
def test_without_tensor_cores_transforms_are_possible_where_nothing_is_counted() -> None:
    with bfc.predict("t4") as run:
        nn.Conv2d(64, 64, 3, padding=1, device="cuda")(torch.empty(4, 64, 14, 14, device="cuda"))
    transformed = 36 * 4 * (4 * 4 * 4 * 128 + 64 * 64)
    live = run.live_bounds
    assert live.low == run.peak_requested
    assert live.high == live.low + transformed
    # of planes of 32 by 32 as complex numbers, of which there are half
    assert live.with_an_fft is not None
    fourier = live.with_an_fft - live.low
    assert fourier == 16 * 32 * 17 * 64 * 64 + 4 * 4 * 64 * 14 * 14
    assert "MiB if cuDNN takes an FFT, since cuDNN's workspaces" in between(str(run))[0]


def test_where_all_is_known_there_is_no_range() -> None:
    with bfc.predict("a100") as run:
        nn.Linear(64, 64, device="cuda")(torch.empty(8, 64, device="cuda"))
    live, held = run.live_bounds, run.reserved_bounds
    assert (live.low, live.high, live.because) == (run.peak_requested, run.peak_requested, [])
    assert (held.low, held.high, held.because) == (run.peak_reserved, run.peak_reserved, [])
    assert between(str(run)) == []


def test_of_an_operator_of_others_no_upper_bound_is_known(script, capsys) -> None:
    text = (
        "import torch\nlibrary = torch.library.Library('others', 'DEF')\n"
        "library.define('kernel(Tensor x) -> Tensor')\n"
        "torch.library.register_fake('others::kernel', torch.empty_like)\n"
        "torch.ops.others.kernel(torch.ones(1 << 20, device='cuda'))\n"
    )
    assert main(["predict", "--device", "a100", script(text)]) == 0
    (told,) = between(capsys.readouterr().out)
    assert told.startswith("at least   8.00 MiB live, 20.00 MiB reserved: no upper bound is known")
    assert told.endswith("since it is not known what others::kernel allocates inside")
    assert main(["predict", "--device", "a100", "--json", script(text)]) == 0
    found = json.loads(capsys.readouterr().out)["reserved_bounds"]
    assert (found["low"], found["high"], found["with_an_fft"]) == (20 * MIB, None, None)


def test_a_network_is_known_as_far_as_an_h100_went() -> None:
    found = []
    for gpu in ("h100", "a100"):
        with bfc.predict(gpu) as run:
            nn.LSTM(256, 256, device="cuda")(torch.empty(100, 64, 256, device="cuda"))
        found.append((run, run.live_bounds))
    (run, near), (_, far) = found
    assert near.low < run.peak_requested < (near.high or 0)
    assert far.low < near.low
    assert far.high is None
    assert far.because == [
        "cuDNN's workspaces of recurrent networks have not been compared with this GPU"
    ]


def test_what_values_choose_lies_above_what_was_live_before() -> None:
    with bfc.predict("a100") as run:
        torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        numbers = torch.randn(MIB // 4, device="cuda")
        numbers[numbers > numbers.exp()] * 2
    live = run.live_bounds
    assert 3 * MIB <= live.low < run.peak_requested == live.high
    assert live.because == ["values choose elements: all of them here"]


def test_a_range_is_that_of_the_peak_and_not_a_sum() -> None:
    """Of three workspaces one is counted, one is not, and one has no upper bound."""
    trace = Trace(
        [0, 0, 1, 1, 0, 1], [0, 1, 1, 0, 2, 2], [100, 50, 50, 100, 30, 30], [0, 0, 0, 0, 0, 0]
    )
    doubted = [
        Doubted(2, 1, Doubt(0, 60, "x", at_worst=500)),
        Doubted(4, -1, Doubt(0, 90, "x")),
        Doubted(5, 2, Doubt(10, None, "y")),
    ]
    least, most, worst = (at(trace, doubted, which) for which in (LEAST, MOST, AT_WORST))
    assert [*zip(least.op, least.size, strict=True)] == [(0, 100), (1, 100), (0, 10), (1, 10)]
    assert list(most.size) == [100, 60, 60, 100, 90, 90, 30, 30]
    assert list(worst.size) == [100, 500, 500, 100, 90, 90, 30, 30]
    assert reasons(doubted) == ["y", "x"]


@pytest.mark.usefixtures("_no_cudnn")
def test_the_answer_says_when_the_most_would_not_fit() -> None:
    with bfc.predict("t4") as run:
        nn.Conv2d(64, 64, 3, padding=1, device="cuda")(torch.empty(4, 64, 14, 14, device="cuda"))
    held = run.reserved_bounds
    assert run.peak_reserved == held.low < (held.high or 0)
    between_them = run.verdict(held.low)
    assert (between_them.fits, between_them.fits_at_most) == (True, False)
    assert str(between_them) == (
        "As counted, it fits on a GPU of 2.00 MiB: it reserves 2.00 MiB. It may need up to "
        "22.00 MiB, which would not fit."
    )
    assert (run.verdict(held.high).fits_at_most, run.fits(held.low)) == (True, True)
    assert str(run.verdict(held.high)) == "It fits on a GPU of 22.00 MiB: it reserves 2.00 MiB."
    said_of_it = "\n".join(lines(run, run.verdict(held.high)))
    assert "\nreserved   2.00 MiB as counted, under PyTorch's default settings\n" in said_of_it
    assert ", which is more than there is, if cuDNN takes an FFT" in between(said_of_it)[0]
    said = run.to_dict()
    assert (said["fits_at_least"], said["fits_at_most"]) == (True, True)


@pytest.mark.usefixtures("_no_cudnn")
def test_the_answer_says_when_the_least_would_fit() -> None:
    with bfc.predict("a100") as run:
        convolution = nn.Conv2d(64, 64, 3, padding=1, bias=False, device="cuda")
        convolution(torch.empty(8, 64, 64, 64, device="cuda"))
    told = run.verdict(run.reserved_bounds.low)
    assert (told.fits, told.fits_at_least, told.fits_at_most) == (False, True, False)
    assert str(told).startswith("As counted, it does not fit on a GPU of 22.00 MiB: it would ")
    assert str(told).endswith(" It may need as little as 22.00 MiB, which would fit.")
    assert str(run.verdict(run.reserved_bounds.low - 1)).startswith("It does not fit on ")


def test_without_an_upper_bound_nothing_is_said_to_be_the_most() -> None:
    with bfc.predict("a100") as run:
        nn.LSTM(256, 256, device="cuda")(torch.empty(100, 64, 256, device="cuda"))
    told = run.verdict()
    assert (told.fits, told.fits_at_most) == (True, None)
    assert " at most " not in str(told)
    assert str(told).endswith("It may need more: no upper bound is known.")
