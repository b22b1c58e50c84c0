"""What the emulated driver gives other processes: memory, mapped memory, events."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from cuda_calls import alloc, code, cu, enter, ok, peek, stream

from bfc.testing import cuda_emulator as emulator

MIB = 1 << 20
INVALID_VALUE, INVALID_CONTEXT, INVALID_HANDLE, NOT_READY = 1, 201, 400, 600
LAZY, SHARED_EVENT, DESCRIPTOR = 1, 4 | 2, 1

#: Does what it is told, a line each, and answers with a line.
OTHER = """
import ctypes, os, socket, sys
from bfc.testing import cuda_emulator
driver = cuda_emulator.load()
driver.reset()
from cuda.bindings import driver as cu

def ok(result):
    assert result[0] == 0, result[0]
    return result[1] if len(result) == 2 else result[1:]

def handle_of(kind, text):
    handle = kind()
    ctypes.memmove(handle.getPtr(), bytes.fromhex(text), 64)
    return handle

ok(cu.cuInit(0))
ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
stream = ok(cu.cuStreamCreate(1))
control = socket.socket(fileno=int(sys.argv[1]))
for line in sys.stdin:
    print(eval(line), flush=True)
"""


class Other:
    """Another process, that runs expressions."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.control = ours
        self.process = subprocess.Popen(
            [sys.executable, "-c", OTHER, str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def __call__(self, expression: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.communicate(timeout=60)
        self.control.close()
        assert self.process.returncode == 0


@pytest.fixture
def gpu() -> Iterator[emulator.Driver]:
    driver = emulator.load()
    driver.reset()
    enter()
    yield driver
    driver.release_all()
    assert driver.complaints == []


@pytest.fixture
def other(gpu: emulator.Driver) -> Iterator[Other]:
    it = Other()
    yield it
    it.close()


def in_hex(handle: object) -> str:
    return ctypes.string_at(handle.getPtr(), 64).hex()  # type: ignore[attr-defined]


def test_memory_is_one_for_two_processes(gpu: emulator.Driver, other: Other) -> None:
    """Small allocations share pages with others; what was written before is seen."""
    kept, small, large = alloc(512), alloc(512), alloc(5 * MIB)
    for number, (place, nbytes) in enumerate([(kept, 512), (small, 512), (large, 5 * MIB)]):
        ok(cu.cuMemsetD8(place, number + 1, nbytes))
    for place, nbytes in ((small, 512), (large, 5 * MIB), (small, 512)):
        handle = in_hex(ok(cu.cuIpcGetMemHandle(place)))
        opened = f"handle_of(cu.CUipcMemHandle, '{handle}'), {LAZY}"
        there = int(other(f"int(ok(cu.cuIpcOpenMemHandle({opened})))"))
        assert int(other(f"int(ok(cu.cuIpcOpenMemHandle({opened})))")) == there, "opened twice"
        read = f"(lambda b: (ok(cu.cuMemcpyDtoH(b, {there}, 512)), b.hex())[1])(bytearray(512))"
        assert bytes.fromhex(other(read)) == peek(place, 512)
        other(f"cu.cuMemsetD8({there} + {nbytes} - 8, 9, 8)")
        assert peek(place + nbytes - 8, 8) == b"\11" * 8
        ok(cu.cuMemsetD8(place, 7, 512))
        assert bytes.fromhex(other(read)) == b"\7" * 512
        for left in (1, 0):
            assert other(f"int(cu.cuIpcCloseMemHandle({there})[0])") == "0"
            assert int(other("len(driver.live())")) == left
    assert peek(kept, 512) == b"\1" * 512
    ok(cu.cuMemFree(large))
    again = alloc(5 * MIB)
    assert peek(again, 5 * MIB) == bytes(5 * MIB)
    assert other("driver.complaints") == "[]"


def test_handles_are_for_other_processes(gpu: emulator.Driver, other: Other) -> None:
    handle = ok(cu.cuIpcGetMemHandle(alloc(512)))
    assert code(cu.cuIpcOpenMemHandle(handle, LAZY)) == INVALID_CONTEXT
    event = ok(cu.cuEventCreate(SHARED_EVENT))
    assert code(cu.cuIpcOpenEventHandle(ok(cu.cuIpcGetEventHandle(event)))) == INVALID_CONTEXT
    assert [it.split(":")[1] for it in gpu.complaints] == [
        " the handle is of this process, and is for others"
    ] * 2
    gpu.clear()
    assert code(cu.cuIpcGetEventHandle(ok(cu.cuEventCreate(2)))) == INVALID_VALUE
    nothing = f"handle_of(cu.CUipcMemHandle, '{bytes(64).hex()}')"
    assert int(other(f"int(cu.cuIpcOpenMemHandle({nothing}, {LAZY})[0])")) == INVALID_HANDLE


def test_an_event_is_waited_for_in_another_process(gpu: emulator.Driver, other: Other) -> None:
    here, event = stream(), ok(cu.cuEventCreate(SHARED_EVENT))
    gpu.hold(here)
    ok(cu.cuEventRecord(event, here))
    handle = in_hex(ok(cu.cuIpcGetEventHandle(event)))
    opened = f"cu.cuIpcOpenEventHandle(handle_of(cu.CUipcEventHandle, '{handle}'))"
    other(f"globals().update(event=ok({opened}))")
    query = "int(cu.cuEventQuery(event)[0])"
    assert int(other(query)) == NOT_READY
    gpu.release(here)
    assert int(other(query)) == 0
    gpu.hold(here)
    ok(cu.cuEventRecord(event, here))  # again
    assert int(other(query)) == NOT_READY
    gpu.release(here)
    assert int(other("int(cu.cuStreamWaitEvent(stream, event, 0)[0])")) == 0
    other("driver.hold(int(stream))")
    other("cu.cuEventRecord(event, stream)")
    assert code(cu.cuEventQuery(event)) == NOT_READY
    other("driver.release(int(stream))")
    ok(cu.cuEventSynchronize(event))
    assert code(cu.cuEventQuery(event)) == 0


def wanted(handles: int) -> object:
    it = cu.CUmemAllocationProp()
    it.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    it.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    it.location.id = 0
    it.requestedHandleTypes = cu.CUmemAllocationHandleType(handles)
    return it


def test_mapped_memory_is_given_by_descriptors(gpu: emulator.Driver, other: Other) -> None:
    """Those of two pages in one file; what was freed here reads as zero there."""
    kind = cu.CUmemAllocationHandleType(DESCRIPTOR)
    pages = [ok(cu.cuMemCreate(size * MIB, wanted(DESCRIPTOR), 0)) for size in (2, 4)]
    access = cu.CUmemAccessDesc()
    access.location = wanted(0).location  # type: ignore[attr-defined]
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    base = int(ok(cu.cuMemAddressReserve(6 * MIB, 0, 0, 0)))
    ok(cu.cuMemMap(base, 2 * MIB, 0, pages[0], 0))
    ok(cu.cuMemMap(base + 2 * MIB, 4 * MIB, 0, pages[1], 0))
    ok(cu.cuMemSetAccess(base, 6 * MIB, [access], 1))
    ok(cu.cuMemsetD8(base, 5, 6 * MIB))
    descriptors = [int(ok(cu.cuMemExportToShareableHandle(it, kind, 0))) for it in pages]
    socket.send_fds(other.control, [b"x"], descriptors)
    for it in descriptors:
        os.close(it)
    other("globals().update(given=socket.recv_fds(control, 1, 2)[1])")
    imported = "cu.cuMemImportFromShareableHandle(it, cu.CUmemAllocationHandleType(1))"
    other(f"globals().update(pages=[int(ok({imported})) for it in given])")
    other("globals().update(base=int(ok(cu.cuMemAddressReserve(6 << 20, 0, 0, 0))))")
    for at, page, size in ((0, 0, 2), (2, 1, 4)):
        mapped = f"cu.cuMemMap(base + ({at} << 20), {size} << 20, 0, pages[{page}], 0)"
        assert other(f"int({mapped}[0])") == "0"
    allow = (
        "(lambda a: (setattr(a, 'location', ok(cu.cuMemGetAllocationPropertiesFromHandle(pages[0]))"
        ".location), setattr(a, 'flags', cu.CUmemAccess_flags(3)), "
        "int(cu.cuMemSetAccess(base, 6 << 20, [a], 1)[0])))(cu.CUmemAccessDesc())[2]"
    )
    assert other(allow) == "0"
    read = "(lambda b: (ok(cu.cuMemcpyDtoH(b, base + (2 << 20) - 4, 8)), b.hex())[1])(bytearray(8))"
    assert other(read) == "05" * 8
    other("cu.cuMemsetD8(base + (2 << 20) - 2, 8, 4)")
    assert peek(base + 2 * MIB - 4, 8) == b"\5\5\10\10\10\10\5\5"
    assert other("(cu.cuMemUnmap(base, 6 << 20), [cu.cuMemRelease(it) for it in pages])[0]")
    assert other("(driver.live(), driver.live_handles(), driver.complaints)") == "({}, 0, [])"
    assert peek(base, 4) == b"\5" * 4
    alone = ok(cu.cuMemCreate(2 * MIB, wanted(0), 0))
    assert code(cu.cuMemExportToShareableHandle(alone, kind, 0)) == INVALID_VALUE
    assert "for this process alone" in gpu.complaints[0]
    gpu.clear()
