"""DLPack: kDLOpenCL has the cl_mem as data, and where in it the memory starts as byte_offset."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from dlpack_structures import KINDS, Tensor

import bfc

OPENCL, HOST = 4, 1


def read(capsule: object) -> Tensor:
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype = ctypes.c_char_p
    api.PyCapsule_GetName.argtypes = [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    name = api.PyCapsule_GetName(capsule)
    (kind,) = (kind for known, kind in KINDS.values() if known == name)
    return kind.from_address(api.PyCapsule_GetPointer(capsule, name)).tensor


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_capsule_leads_to_the_memory(make, cl, queue, version) -> None:
    allocator = make()
    allocator.allocate(1000)
    kept, buffer = allocator.allocate(1000), allocator.allocate(2400)
    values = np.arange(600, dtype="i4").reshape(20, 30)
    view = buffer.view("i4", (20, 30)).from_host(values)
    capsule = view.__dlpack__(max_version=version)
    tensor = read(capsule)
    region, offset = allocator.sub_allocator.locate(buffer.ptr)
    assert (tensor.data, tensor.byte_offset) == (region.int_ptr, offset)
    assert offset > 0
    assert (
        (tensor.device.device_type, tensor.device.device_id)
        == (OPENCL, 0)
        == view.__dlpack_device__()
    )
    assert (tensor.code, tensor.bits, tensor.lanes) == (0, 32, 1)
    assert tensor.shape[:2] == [20, 30]
    assert tensor.strides[:2] == [30, 1]
    read_back = np.empty_like(values)
    memory = cl.MemoryObject.from_int_ptr(tensor.data)
    cl.enqueue_copy(queue, read_back, memory, src_offset=tensor.byte_offset)
    assert (read_back == values).all()
    with pytest.raises(BufferError, match="in use"):
        buffer.free()
    del capsule
    buffer.free()
    kept.free()


def test_a_capsule_waits_for_the_buffers_queue(make, queue, hold) -> None:
    """Its consumer names no queue, so the host waits."""
    import threading

    allocator = make()
    buffer = allocator.allocate(1000, queue)
    with hold(queue) as held:
        capsules: list[object] = []
        thread = threading.Thread(target=lambda: capsules.append(buffer.__dlpack__()))
        thread.start()
        thread.join(0.05)
        assert capsules == []
        held.let_go()
        thread.join()
    assert read(capsules.pop()).device.device_type == OPENCL
    buffer.free()


def test_copies_and_nothing(make) -> None:
    allocator = make()
    buffer = allocator.allocate(8).from_host(b"abcdefgh")
    copied = read(capsule := buffer.__dlpack__(copy=True, max_version=(1, 0)))
    region, offset = allocator.sub_allocator.locate(buffer.ptr)
    assert (copied.data, copied.byte_offset) != (region.int_ptr, offset)
    del capsule
    on_host = read(capsule := buffer.__dlpack__(dl_device=(HOST, 0), max_version=(1, 0)))
    assert on_host.device.device_type == HOST
    assert ctypes.string_at(on_host.data, 8) == b"abcdefgh"
    del capsule
    nothing = read(capsule := allocator.allocate(0).__dlpack__())
    assert (nothing.data, nothing.byte_offset, nothing.shape[0]) == (None, 0, 0)
    del capsule


def test_what_cannot_be_had_is_a_buffer_error(make, context) -> None:
    allocator = make()
    buffer = allocator.allocate(100)
    with pytest.raises(BufferError, match="no stream"):
        buffer.__dlpack__(stream=1)
    with pytest.raises(BufferError, match="does not go to"):
        buffer.__dlpack__(dl_device=(OPENCL, 5))
    svm = make(bfc.OpenCLSubAllocator(context, svm=True))
    shared = svm.allocate(100)
    with pytest.raises(BufferError, match="SVM has none"):
        shared.__dlpack__()
    shared.free()  # nothing holds it
    buffer.free()
