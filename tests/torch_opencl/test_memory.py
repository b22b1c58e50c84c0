"""The memory of tensors on opencl is the pool's: its figures, its refusals, what waits for
streams."""

from __future__ import annotations

import copy
import io
import warnings

import pyopencl as cl
import pytest
import torch

import bfc

MIB = 1 << 20


def test_statistics_are_the_pools_key_by_key(opencl: torch.device) -> None:
    kept = [torch.empty(nbytes, dtype=torch.uint8, device=opencl) for nbytes in (1, 3000, 5 * MIB)]
    del kept[1]
    pool = torch.opencl.pool()
    ours, theirs = pool.memory_stats(), dict(torch.accelerator.memory_stats())
    assert {key: ours[key] for key in theirs} == theirs
    # torch.accelerator has no place for it.
    assert {key for key in ours if key not in theirs} == {"num_oom_rejections"}
    assert torch.accelerator.memory_allocated() == pool.stats().bytes_in_use
    assert torch.accelerator.memory_reserved() == pool.stats().pool_bytes
    pool.check()


def test_emptying_the_cache_gives_back_what_no_tensor_has(opencl: torch.device) -> None:
    torch.empty(64 * MIB, dtype=torch.uint8, device=opencl)
    before = torch.opencl.memory_reserved()
    torch.opencl.empty_cache()
    assert torch.opencl.memory_reserved() <= before - 64 * MIB


def test_peaks_fall_to_what_is_in_use(opencl: torch.device) -> None:
    torch.empty(8 * MIB, dtype=torch.uint8, device=opencl)
    assert torch.accelerator.max_memory_allocated() >= 8 * MIB
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == torch.accelerator.memory_allocated()


def test_what_does_not_fit_is_refused_in_words_and_fits_once_there_is_room(
    opencl: torch.device, nothing_left: None
) -> None:
    first = torch.empty(700 * MIB, dtype=torch.uint8, device=opencl)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(500 * MIB, dtype=torch.uint8, device=opencl)
    assert str(caught.value).startswith("out of memory: asked for 500.00 MiB (524288000 bytes)")
    assert "in use" in str(caught.value)
    del first
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() < 500 * MIB
    assert torch.empty(500 * MIB, dtype=torch.uint8, device=opencl).nbytes == 500 * MIB
    torch.accelerator.empty_cache()


def test_memory_that_a_held_stream_uses_is_not_given_to_another_tensor(
    opencl: torch.device, nothing_left: None
) -> None:
    stream = torch.Stream(opencl)
    queue = cl.CommandQueue.from_int_ptr(stream.native_handle)
    held = cl.UserEvent(queue.context)
    cl.enqueue_barrier(queue, wait_for=[held])
    used = torch.empty(3 * MIB, dtype=torch.uint8, device=opencl)
    address = used.data_ptr()
    used.record_stream(stream)
    del used
    others = [torch.empty(3 * MIB, dtype=torch.uint8, device=opencl) for _ in range(4)]
    assert address not in [other.data_ptr() for other in others]
    assert not stream.query()
    held.set_status(cl.command_execution_status.COMPLETE)
    stream.synchronize()
    del others
    again = [torch.empty(3 * MIB, dtype=torch.uint8, device=opencl) for _ in range(5)]
    assert address in [tensor.data_ptr() for tensor in again]


def test_tensors_are_saved_loaded_and_copied(opencl: torch.device, nothing_left: None) -> None:
    saved = {"weight": torch.arange(6.0, device=opencl).reshape(2, 3).T}
    file = io.BytesIO()
    torch.save(saved, file)
    for place in (opencl, "cpu"):
        file.seek(0)
        loaded = torch.load(file, map_location=place)["weight"]
        assert loaded.device.type == torch.device(place).type
        assert loaded.tolist() == saved["weight"].tolist()
    twin = copy.deepcopy(saved)["weight"]
    assert twin.data_ptr() != saved["weight"].data_ptr()
    assert twin.tolist() == saved["weight"].tolist()


def test_a_seed_gives_the_numbers_of_the_cpu(opencl: torch.device) -> None:
    torch.manual_seed(7)
    here = torch.randn(5)
    torch.opencl.manual_seed(7)
    assert torch.randn(5, device=opencl).tolist() == here.tolist()
    generators = [torch.Generator(place).manual_seed(3) for place in ("cpu", opencl)]
    drawn = [torch.rand(4, generator=it, device=it.device).tolist() for it in generators]
    assert drawn[0] == drawn[1]


def test_pinned_memory_is_bfcs(opencl: torch.device) -> None:
    pinned = torch.arange(1000.0).pin_memory()
    assert pinned.is_pinned()
    found = bfc.pinned.find(pinned.data_ptr())
    assert found is not None
    there = pinned.to(opencl, non_blocking=True)
    assert there.cpu().tolist() == pinned.tolist()


def test_pinned_memory_and_events_are_freed_while_an_exception_propagates(
    opencl: torch.device,
) -> None:
    """Python has the exception at hand while it drops what an expression has made so far."""

    def pinned() -> object:
        return torch.ones(1000).pin_memory(), 1 / 0

    def event() -> object:
        return torch.Event(opencl).record(torch.opencl.current_stream()), 1 / 0

    torch.opencl.synchronize()
    before = torch.opencl.host_memory_stats()["active_bytes.current"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fails in (pinned, event):
            with pytest.raises(ZeroDivisionError):
                fails()
    # Less where a copy of another test has ended meanwhile.
    assert torch.opencl.host_memory_stats()["active_bytes.current"] <= before


def test_a_tensor_is_made_where_the_default_is(opencl: torch.device, nothing_left: None) -> None:
    with torch.device(opencl):
        assert torch.ones(3).device == torch.device("opencl", 0)
    assert torch.ones(3).device == torch.device("cpu")
