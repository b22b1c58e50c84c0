"""A PyTorch whose internals nobody has looked at is refused in words."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch

import bfc
from bfc_tools.predicting import guard


@pytest.mark.parametrize("version", ["2.99.0+cpu", "3.0.0", "2.8.1"])
def test_an_unknown_version_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    refused = pytest.raises(bfc.DeviceUnavailableError, match=version.partition("+")[0])
    with refused, bfc.predict("a100"):
        pass


def test_without_torch_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    refused = pytest.raises(
        bfc.DeviceUnavailableError, match=r"bfc.predict needs the package torch"
    )
    with refused, bfc.predict("a100"):
        pass


def test_this_one_is_known() -> None:
    assert guard.supported_torch() is torch


def predicted_as(monkeypatch: pytest.MonkeyPatch, version: str, **device: object) -> bfc.Prediction:
    """A prediction by this PyTorch, called by another version's name, that runs out once."""
    monkeypatch.setattr(torch, "__version__", version)
    with bfc.predict("1 GiB", **device) as run:
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            torch.ones(8, device="cuda")
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    return run


def test_figures_of_2_12_are_not_claimed_to_be_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    run = predicted_as(monkeypatch, "2.12.0+cpu")
    assert "live and allocated figures stand" in run.allocator_differs
    assert "not exact" in run.allocator_differs
    assert run.allocator_differs in str(run)
    assert run.trace.meta["torch_version_sign"] != "whose rules torch 2.12.0+cpu has"


def test_exceptions_are_named_where_a_program_meets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = {"settings": "expandable_segments:True", "oom": True}
    assert "private pool" in predicted_as(monkeypatch, "2.13.0+cpu").allocator_differs
    assert "range of addresses" in predicted_as(monkeypatch, "2.14.1", **ranges).allocator_differs
    assert predicted_as(monkeypatch, "2.14.1").allocator_differs == ""
    assert predicted_as(monkeypatch, "2.11.0", **ranges).allocator_differs == ""
    with bfc.predict("1 GiB") as run:
        torch.ones(8, device="cuda")
    assert run.allocator_differs == ""
