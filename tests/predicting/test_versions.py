"""A PyTorch whose internals nobody has looked at is refused in words."""

from __future__ import annotations

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
