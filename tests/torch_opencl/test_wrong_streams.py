"""Devices and streams that there are not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

NO_DEVICE = "there is no device"
NO_QUEUE = "not a (command queue|stream of opencl)"


def stream(number: int, device: int = 0) -> torch.Stream:
    """Any stream, as PyTorch makes one from what it has unpacked."""
    kind = torch.Stream("opencl").device_type
    return torch.Stream(stream_id=number, device_index=device, device_type=kind)


@contextmanager
def current(other: torch.Stream) -> Iterator[None]:
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(other)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


@pytest.mark.parametrize("device", [1, 64, 100])
def test_a_device_that_there_is_not_has_no_streams(opencl: torch.device, device: int) -> None:
    """The streams of a thread stand in an array, which was read behind its end."""
    torch.ones(1, device=opencl)
    device = max(device, torch.opencl.device_count())  # one of each driver that is installed
    for ask in (
        lambda: torch.accelerator.current_stream(device),
        lambda: torch.Stream(f"opencl:{device}"),
        lambda: torch.accelerator.set_stream(stream(0, device)),
        lambda: torch.accelerator.set_device_index(device),
        lambda: torch.empty(3, device=f"opencl:{device}"),
    ):
        with pytest.raises(RuntimeError, match=NO_DEVICE):
            ask()
    assert torch.accelerator.current_device_index() == 0


@pytest.mark.usefixtures("nothing_left")
def test_a_stream_that_is_no_queue_is_refused_wherever_it_is_used(opencl: torch.device) -> None:
    x = torch.ones(1000, device=opencl)
    wrong = stream(12345)
    with pytest.raises(RuntimeError, match=NO_QUEUE):
        x.record_stream(wrong)
    with current(wrong):
        for use in (
            lambda: torch.empty(1000, device=opencl),
            lambda: x + 1,
            lambda: x.cpu(),
            lambda: x.fill_(2),
            wrong.synchronize,
            wrong.query,
        ):
            with pytest.raises((RuntimeError, ValueError), match=NO_QUEUE):
                use()
    assert (x + 1).sum().item() == 2000
