"""Tests of the emulated driver's copies of rows, and of its launches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from cuda_calls import alloc, code, cu, fill, ok, peek, stream

from bfc.testing import cuda_emulator as emulator

INVALID_VALUE, FILE_NOT_FOUND, INVALID_HANDLE = 1, 301, 400
HOST, DEVICE = cu.CUmemorytype.CU_MEMORYTYPE_HOST, cu.CUmemorytype.CU_MEMORYTYPE_DEVICE


def rows(to: int, source: np.ndarray, *, deep: bool = False, pitch: int = 16) -> object:
    """Three bytes of each of the source's rows, to rows that lie `pitch` apart."""
    copy = cu.CUDA_MEMCPY3D() if deep else cu.CUDA_MEMCPY2D()
    copy.srcMemoryType, copy.srcHost = HOST, source.ctypes.data
    copy.dstMemoryType, copy.dstDevice = DEVICE, to
    copy.srcPitch, copy.dstPitch = source.strides[-2], pitch
    copy.srcXInBytes, copy.dstXInBytes, copy.dstY = 1, 2, 1
    copy.WidthInBytes, copy.Height = 3, source.shape[-2]
    if deep:
        copy.Depth, copy.srcHeight, copy.dstHeight = len(source), source.shape[1], 5
        copy.dstZ = 1
    return copy


def test_rows_go_where_pitches_say(gpu: emulator.Driver) -> None:
    source = np.arange(1, 33, dtype=np.uint8).reshape(4, 8)
    to = alloc(128)
    fill(to, 0, nbytes=128)
    ok(cu.cuMemcpy2DAsync(rows(to, source), 0))
    wanted = np.zeros((8, 16), np.uint8)
    wanted[1:5, 2:5] = source[:, 1:4]
    assert peek(to, 128) == wanted.tobytes()
    assert [c.nbytes for c in gpu.calls if c.name == "cuMemcpy2DAsync"] == [12]


def test_slices_go_where_heights_say(gpu: emulator.Driver) -> None:
    source = np.arange(1, 49, dtype=np.uint8).reshape(2, 3, 8)
    to = alloc(512)
    fill(to, 0, nbytes=512)
    ok(cu.cuMemcpy3DAsync(rows(to, source, deep=True), 0))
    wanted = np.zeros((6, 5, 16), np.uint8)
    wanted[1:3, 1:4, 2:5] = source[:, :, 1:4]
    assert peek(to, 480) == wanted.tobytes()


def test_rows_wait_for_their_stream_and_take_pageable_memory_at_once(gpu: emulator.Driver) -> None:
    source = np.ones((4, 8), np.uint8)
    to, mine = alloc(128), stream(1)
    fill(to, 0, nbytes=128)
    gpu.hold(mine)
    ok(cu.cuMemcpy2DAsync(rows(to, source), mine))
    source[:] = 7
    assert peek(to, 128) == bytes(128)
    gpu.release(mine)
    assert peek(to + 18, 3) == b"\1\1\1"


def test_rows_that_end_outside_their_memory_are_complained_of(gpu: emulator.Driver) -> None:
    source = np.ones((4, 8), np.uint8)
    to = alloc(64)
    for copy, words in (
        (rows(to, source), "cross the end of an allocation"),
        (rows(to, source, pitch=4), "rows of 3 bytes lie 4 apart"),
    ):
        assert code(cu.cuMemcpy2DAsync(copy, 0)) == INVALID_VALUE
        assert [words in said for said in gpu.complaints] == [True]
        gpu.clear()


def test_a_launch_stands_in_its_streams_queue_and_does_nothing(gpu: emulator.Driver) -> None:
    library = ok(cu.cuLibraryLoadData(b"any code\0", [], [], 0, [], [], 0))
    kernel = ok(cu.cuLibraryGetKernel(library, b"name"))
    function = ok(cu.cuKernelGetFunction(kernel))
    module = ok(cu.cuModuleLoadData(b"any code\0"))
    other = ok(cu.cuModuleGetFunction(module, b"name"))
    assert len({int(library), int(kernel), int(function), int(module), int(other)}) == 5
    mine = stream(1)
    gpu.hold(mine)
    for each in (function, other):
        ok(cu.cuLaunchKernel(each, 2, 1, 1, 32, 1, 1, 0, mine, 0, 0))
    assert gpu.pending == 2
    gpu.release(mine)
    assert gpu.pending == 0
    assert code(cu.cuLaunchKernel(0, 1, 1, 1, 1, 1, 1, 0, mine, 0, 0)) == INVALID_HANDLE
    for shape in ((0, 32), (1, 2048)):
        launch = (function, shape[0], 1, 1, shape[1], 1, 1, 0, mine, 0, 0)
        assert code(cu.cuLaunchKernel(*launch)) == INVALID_VALUE
    ok(cu.cuModuleUnload(module))
    ok(cu.cuLibraryUnload(library))


def test_a_module_of_a_file_is_read_and_asked_what_its_code_takes(
    gpu: emulator.Driver, tmp_path: Path
) -> None:
    path = tmp_path / "kernel.cubin"
    assert code(cu.cuModuleLoad(str(path).encode())) == FILE_NOT_FOUND
    path.write_bytes(b"any code")
    for module in (
        ok(cu.cuModuleLoad(str(path).encode())),
        ok(cu.cuModuleLoadDataEx(b"any code\0", 0, [], [])),
    ):
        function = ok(cu.cuModuleGetFunction(module, b"name"))
        asked = cu.CUfunction_attribute
        ok(cu.cuFuncSetCacheConfig(function, cu.CUfunc_cache.CU_FUNC_CACHE_PREFER_SHARED))
        shared = asked.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        ok(cu.cuFuncSetAttribute(function, shared, 1 << 16))
        most = asked.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        assert ok(cu.cuFuncGetAttribute(most, function)) == 1024
        assert ok(cu.cuFuncGetAttribute(asked.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function)) == 0
        assert code(cu.cuFuncGetAttribute(most, 0)) == INVALID_HANDLE
