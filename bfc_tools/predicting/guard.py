"""The device "cuda" of a PyTorch that has none: C++ functions, compiled when first used."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from bfc.errors import DeviceUnavailableError
from bfc.pytorch import extension
from bfc_tools.predicting import outside
from bfc_tools.predicting.releases import NEWEST, OLDEST

EXTENSION = extension.Extension(
    source=Path(__file__).with_name("guard.cpp"),
    name="_bfc_predict",
    folder="predict",
    what="the fake device for PyTorch",
    needed_by="bfc.predict needs",
    install="pip install torch",
    oldest=OLDEST.version,
)


def supported_torch() -> Any:
    """torch. Raises DeviceUnavailableError where there is none, or one that is not known."""
    torch = extension.supported_torch(EXTENSION)
    if extension.torch_version(torch) > NEWEST.version:
        raise DeviceUnavailableError(
            f"bfc.predict knows torch {OLDEST.name} to {NEWEST.name}, and this is "
            f"torch {torch.__version__}: install one of these, or a newer bfc"
        )
    return torch


def load() -> ModuleType:
    """The module of guard.cpp. Where files are kept apart, it is written for real first, if it was
    compiled just now: under Landlock the system's loader sees no other."""
    supported_torch()
    if outside.link is not None:
        outside.link.write_new(str(extension.made(EXTENSION)))
    return extension.load(EXTENSION)
