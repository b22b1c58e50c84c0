"""The extension that is compiled against the user's PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from bfc.pytorch import extension

EXTENSION = extension.Extension(
    source=Path(__file__).with_name("extension.cpp"),
    name="_bfc_torch_opencl",
    folder="torch_opencl",
    what="the extension for PyTorch",
    needed_by="tensors on OpenCL need",
    install="pip install 'bfc-allocator[torch-opencl]'",
    oldest=(2, 11),
)


def load(source: Path = EXTENSION.source) -> ModuleType:
    """Its module, or that of another source; see `extension.load`."""
    return extension.load(replace(EXTENSION, source=source))


def supported_torch() -> Any:
    """torch. Raises DeviceUnavailableError, which says what to install."""
    return extension.supported_torch(EXTENSION)
