"""The number of the GPU that is predicted, as the program calls it: that of a process among those
of its machine, which launchers such as torchrun pass on in LOCAL_RANK."""

from __future__ import annotations

import os
from collections.abc import Container
from typing import Any

from bfc.libraries import torch

#: The number, and how many GPUs the machine has: those of the prediction that runs.
_here = (0, 1)


def begin() -> tuple[int, int]:
    """Reads both from the environment, as the program will."""
    global _here
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible and "," not in visible:  # Slurm and Ray show each process its own GPU alone
        _here = 0, 1
    else:
        local = _natural("LOCAL_RANK")
        _here = local, max(_natural("LOCAL_WORLD_SIZE"), local + 1)
    return _here


def _natural(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def number() -> int:
    """The number of the GPU."""
    return _here[0]


def count() -> int:
    """How many GPUs the program sees."""
    return _here[1]


def device() -> torch.device:
    """The GPU."""
    return torch.device("cuda", number())


def checked(device: Any) -> int:
    """The number of a device. Raises what CUDA raises for one that is not there."""
    return _checked(device, (number(), -1))


def asked_about(device: Any) -> int:
    """The same of a device that a program only asks about: others of the machine are like it."""
    return _checked(device, range(-1, count()))


def _checked(device: Any, known: Container[int]) -> int:
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else device
    if index is not None and int(index) not in known:
        raise no_such_device(int(index))
    return number()


def no_such_device(index: int) -> Exception:
    """What CUDA raises for a device that is not there."""
    error: Exception = torch.AcceleratorError(
        f"CUDA error: invalid device ordinal: there is no cuda:{index}. bfc predicts for one GPU, "
        f"{device()}: give the program arguments that name that one"
        + (", which LOCAL_RANK has" if number() else "")
    )
    return error
