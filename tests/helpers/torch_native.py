"""Makes the module of torch_native.cpp, in the process that has loaded PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch

from bfc.integrations import _torch_cuda
from bfc.pytorch import extension


def load() -> ModuleType:
    headers = _torch_cuda._cuda_headers(torch)
    wanted = replace(
        _torch_cuda.EXTENSION,
        source=Path(__file__).with_suffix(".cpp"),
        name="torch_native_calls",
        folder="torch_native",
        headers=(str(headers),),
    )
    return extension.load(wanted)
