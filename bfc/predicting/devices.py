"""The usual GPUs, by name: what the rules of operators ask of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """What a prediction needs to know of a GPU.

    Attributes
    ----------
    name : str
        As `torch.cuda.get_device_name` returns it.
    memory : int
        Its memory in bytes, as `torch.cuda.get_device_properties` tells it.
    cc : tuple of int
        The compute capability: major and minor.
    sms : int
        The number of multiprocessors.
    threads_per_sm : int
        The most threads that are resident on a multiprocessor.
    """

    name: str
    memory: int
    cc: tuple[int, int]
    sms: int
    threads_per_sm: int


H100 = GPU("NVIDIA H100 80GB HBM3", 85_017_755_648, (9, 0), 132, 2048)


def find(device: str, cc: tuple[int, int] | None = None, sms: int | None = None) -> GPU:
    """A GPU by its name, or one with so many bytes of memory."""
    if device != "h100":
        raise ValueError(f"{device!r} is no GPU that bfc knows")
    return H100
