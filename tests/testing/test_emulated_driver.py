"""Tests of the emulated driver itself, through the real cuda.bindings."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from cuda_calls import alloc, code, cu, enter, event, fill, ok, peek, stream
from waiting import run_all

from bfc.testing import cuda_emulator as emulator
from bfc.testing.cuda_emulator import script

MIB = 1 << 20
GIB = 1 << 30
SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE = 0, 1, 2, 3, 100
INVALID_DEVICE, INVALID_CONTEXT, INVALID_HANDLE, NOT_FOUND, NOT_READY = 101, 201, 400, 500, 600
LAUNCH_TIMEOUT, DESTROYED, ALREADY_REGISTERED = 702, 709, 712
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_IMPLICIT = 900, 901, 906
MODES = cu.CUstreamCaptureMode
GLOBAL = MODES.CU_STREAM_CAPTURE_MODE_GLOBAL
RELAXED = MODES.CU_STREAM_CAPTURE_MODE_RELAXED
POINTER = cu.CUpointer_attribute


@pytest.fixture
def driver() -> Iterator[emulator.Driver]:
    """A fresh machine. What it complains about has to be taken by the test."""
    it = emulator.load()
    it.reset()
    yield it
    it.release_all()
    assert it.complaints == []


@pytest.fixture
def gpu(driver: emulator.Driver) -> emulator.Driver:
    """The same with the context of device 0 current."""
    enter()
    return driver


def taken(driver: emulator.Driver) -> list[str]:
    """The complaints, which are forgiven then."""
    complaints = driver.complaints
    driver.clear()
    return complaints


def later(action: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(0.05, action)
    timer.start()
    return timer


def test_devices_are_as_many_and_as_large_as_asked(driver: emulator.Driver) -> None:
    driver.reset(devices=3, total=[GIB, 2 * GIB, 80 * GIB], driver_version=12040)
    ok(cu.cuInit(0))
    assert ok(cu.cuDeviceGetCount()) == 3
    assert ok(cu.cuDriverGetVersion()) == 12040
    assert [ok(cu.cuDeviceTotalMem(i)) for i in range(3)] == [GIB, 2 * GIB, 80 * GIB]
    assert ok(cu.cuDeviceGetName(64, 1)).rstrip(b"\0 ") == b"Emulated GPU 1"
    assert len({bytes(ok(cu.cuDeviceGetUuid(i)).bytes) for i in range(3)}) == 3
    assert code(cu.cuDeviceGet(3)) == 101


def test_attributes_can_be_set(driver: emulator.Driver) -> None:
    driver.reset(capability=(8, 6), concurrent_managed=False)
    wanted = cu.CUdevice_attribute
    for name, value in {
        "COMPUTE_CAPABILITY_MAJOR": 8,
        "COMPUTE_CAPABILITY_MINOR": 6,
        "CONCURRENT_MANAGED_ACCESS": 0,
        "UNIFIED_ADDRESSING": 1,
        "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
    }.items():
        attribute = getattr(wanted, f"CU_DEVICE_ATTRIBUTE_{name}")
        assert ok(cu.cuDeviceGetAttribute(attribute, 0)) == value
    driver.set_attribute(0, wanted.CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 0)
    pools = wanted.CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED
    assert [ok(cu.cuDeviceGetAttribute(pools, i)) for i in range(2)] == [0, 1]


def test_no_device(driver: emulator.Driver) -> None:
    driver.reset(devices=0)
    assert code(cu.cuInit(0)) == NO_DEVICE
    assert code(cu.cuDeviceGetCount()) == NOT_INITIALIZED
    driver.reset()
    assert ok(cu.cuDeviceGetCount()) == 2  # libraries initialise once, and need not again


def test_errors_have_names(driver: emulator.Driver) -> None:
    assert ok(cu.cuGetErrorName(cu.CUresult(2))) == b"CUDA_ERROR_OUT_OF_MEMORY"
    assert ok(cu.cuGetErrorString(cu.CUresult(2))) == b"out of memory"
    known = {error.name: int(error) for error in cu.CUresult}
    assert {name: known[name] for name in emulator.ERRORS} == emulator.ERRORS


def test_memory_is_really_written(gpu: emulator.Driver) -> None:
    one, two = alloc(1000), alloc(1000)
    data = bytes(i % 251 for i in range(1000))
    ok(cu.cuMemcpyHtoD(one, data, 1000))
    ok(cu.cuMemcpyDtoD(two, one, 1000))
    ok(cu.cuMemcpy(two + 500, one, 500))
    back = (ctypes.c_char * 1000)()
    ok(cu.cuMemcpyDtoH(back, two, 1000))
    assert back.raw == data[:500] + data[:500]
    ok(cu.cuMemsetD16(one, 0x1234, 4))
    ok(cu.cuMemsetD32(one + 8, 0x12345678, 1))
    assert peek(one, 12) == bytes.fromhex("341234123412341278563412")


def test_each_device_has_addresses_of_its_own(gpu: emulator.Driver) -> None:
    first = alloc(100)
    enter(1)
    second = alloc(100)
    assert gpu.device_of(first) == 0
    assert gpu.device_of(second) == 1
    assert gpu.live(0) == {first: 100}
    assert gpu.live(1) == {second: 100}
    assert first % 512 == second % 512 == 0
    ok(cu.cuMemFree(first))  # unified addressing: any context may free it
    fill(second, 7)
    assert gpu.live() == {second: 100}


def test_memory_runs_out(gpu: emulator.Driver) -> None:
    gpu.reset(total=[80 * GIB, GIB])
    enter()
    address = alloc(80 * GIB)  # costs nothing
    assert ok(cu.cuMemGetInfo()) == (0, 80 * GIB)
    assert code(cu.cuMemAlloc(512)) == OUT_OF_MEMORY
    ok(cu.cuMemFree(address))
    gpu.set_free(0, MIB)
    assert ok(cu.cuMemGetInfo())[0] == MIB
    assert code(cu.cuMemAlloc(MIB + 1)) == OUT_OF_MEMORY
    assert gpu.live_bytes(0) == 0
    alloc(MIB)
    gpu.set_others(0, 0)
    assert ok(cu.cuMemGetInfo())[0] == 80 * GIB - MIB


def test_managed_memory_may_exceed_the_device(gpu: emulator.Driver) -> None:
    address = int(ok(cu.cuMemAllocManaged(100 * GIB, 1)))
    assert ok(cu.cuMemGetInfo())[0] == 8 * GIB
    assert ok(cu.cuPointerGetAttribute(POINTER.CU_POINTER_ATTRIBUTE_IS_MANAGED, address))
    ok(cu.cuMemFree(address))
    gpu.reset(concurrent_managed=False)
    enter()
    assert code(cu.cuMemAllocManaged(100 * GIB, 1)) == OUT_OF_MEMORY
    ok(cu.cuMemAllocManaged(GIB, 1))
    assert ok(cu.cuMemGetInfo())[0] == 7 * GIB


def test_pinned_memory(gpu: emulator.Driver) -> None:
    pointer = int(ok(cu.cuMemHostAlloc(4096, 2)))
    assert int(ok(cu.cuMemHostGetDevicePointer(pointer, 0))) == pointer
    assert ok(cu.cuMemHostGetFlags(pointer)) == 2
    kind = POINTER.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    assert ok(cu.cuPointerGetAttribute(kind, pointer)) == 1
    ok(cu.cuMemFreeHost(pointer))
    pages = ctypes.create_string_buffer(8192)
    where = ctypes.addressof(pages)
    ok(cu.cuMemHostRegister(where, 8192, 0))
    assert code(cu.cuMemHostRegister(where, 8192, 0)) == ALREADY_REGISTERED
    assert gpu.allocations()[0].kind == "registered"
    ok(cu.cuMemHostUnregister(where))
    gpu.reset(host=GIB)
    enter()
    assert code(cu.cuMemAllocHost(2 * GIB)) == OUT_OF_MEMORY


def test_what_is_known_of_a_pointer(gpu: emulator.Driver) -> None:
    address = alloc(1000)
    assert [int(it) for it in ok(cu.cuMemGetAddressRange(address + 999))] == [address, 1000]
    assert code(cu.cuMemGetAddressRange(address + 1000)) == NOT_FOUND

    def ask(name: str, pointer: int = address) -> tuple:
        return cu.cuPointerGetAttribute(getattr(POINTER, f"CU_POINTER_ATTRIBUTE_{name}"), pointer)

    assert int(ok(ask("CONTEXT"))) == int(ok(cu.cuCtxGetCurrent()))
    assert ok(ask("MEMORY_TYPE")) == 2
    assert int(ok(ask("DEVICE_POINTER", address + 5))) == address + 5
    assert code(ask("HOST_POINTER")) == INVALID_VALUE
    assert ok(ask("DEVICE_ORDINAL")) == 0
    assert ok(ask("BUFFER_ID")) != ok(ask("BUFFER_ID", alloc(1)))
    assert code(ask("MEMORY_TYPE", 4096)) == INVALID_VALUE
    several = [POINTER.CU_POINTER_ATTRIBUTE_IS_MANAGED, POINTER.CU_POINTER_ATTRIBUTE_MEMORY_TYPE]
    assert ok(cu.cuPointerGetAttributes(2, several, address)) == [False, 2]
    assert ok(cu.cuPointerGetAttributes(2, several, 4096)) == [False, 0]


def test_freed_addresses_are_handed_out_again_the_lowest_first(gpu: emulator.Driver) -> None:
    first, second, third = (alloc(size * MIB) for size in (8, 4, 4))
    ok(cu.cuMemFree(second))
    ok(cu.cuMemFree(first))
    assert [alloc(size * MIB) for size in (16, 2, 10)] == [third + 4 * MIB, first, first + 2 * MIB]


def test_reserved_addresses_are_handed_out_again(gpu: emulator.Driver) -> None:
    def reserve(nbytes: int, wish: int = 0) -> int:
        return int(ok(cu.cuMemAddressReserve(nbytes, 0, wish, 0)))

    first = reserve(4 * MIB)
    wished = reserve(4 * MIB, first + 8 * MIB)
    assert wished == first + 8 * MIB
    assert reserve(2 * MIB) == first + 4 * MIB
    ok(cu.cuMemAddressFree(first, 4 * MIB))
    assert reserve(6 * MIB) == first + 12 * MIB
    assert reserve(4 * MIB) == first


def test_a_new_machine_uses_no_address_of_the_one_before(gpu: emulator.Driver) -> None:
    address = alloc(8 * MIB)
    gpu.reset(devices=1)
    ok(cu.cuInit(0))
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
    assert alloc(8 * MIB) >= address + 8 * MIB


def test_addresses_rise_where_that_is_asked_for(gpu: emulator.Driver) -> None:
    gpu.reset(devices=1, reuse=False)
    ok(cu.cuInit(0))
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
    seen = set()
    for _ in range(50):
        address = alloc(GIB)
        assert address not in seen
        seen.add(address)
        ok(cu.cuMemFree(address))


def pool_number(pool: object, name: str) -> int:
    return int(ok(cu.cuMemPoolGetAttribute(pool, getattr(cu.CUmemPool_attribute, name))))


def test_pools_keep_memory_up_to_their_threshold(gpu: emulator.Driver) -> None:
    pool = ok(cu.cuDeviceGetDefaultMemPool(0))
    threshold = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    ok(cu.cuMemPoolSetAttribute(pool, threshold, cu.cuuint64_t(MIB)))
    address = ok(cu.cuMemAllocAsync(4 * MIB, 0))
    assert pool_number(pool, "CU_MEMPOOL_ATTR_USED_MEM_CURRENT") == 4 * MIB
    assert ok(cu.cuMemGetInfo())[0] == 8 * GIB - 4 * MIB
    ok(cu.cuMemFreeAsync(address, 0))
    assert pool_number(pool, "CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT") == 4 * MIB
    ok(cu.cuStreamSynchronize(0))
    assert pool_number(pool, "CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT") == MIB
    ok(cu.cuMemPoolTrimTo(pool, 0))
    assert ok(cu.cuMemGetInfo())[0] == 8 * GIB
    assert pool_number(pool, "CU_MEMPOOL_ATTR_USED_MEM_HIGH") == 4 * MIB


def test_own_pools_have_a_limit(gpu: emulator.Driver) -> None:
    wanted = cu.CUmemPoolProps()
    wanted.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = 1
    wanted.maxSize = MIB
    pool = ok(cu.cuMemPoolCreate(wanted))
    address = ok(cu.cuMemAllocFromPoolAsync(MIB, pool, 0))
    assert gpu.device_of(int(address)) == 1
    assert code(cu.cuMemAllocFromPoolAsync(1, pool, 0)) == OUT_OF_MEMORY
    ok(cu.cuMemFree(address))  # not in the order of a stream: allowed
    ok(cu.cuMemPoolDestroy(pool))
    ok(cu.cuDeviceSetMemPool(0, ok(cu.cuDeviceGetDefaultMemPool(0))))
    assert code(cu.cuDeviceSetMemPool(0, pool)) == INVALID_VALUE


def test_async_memory_follows_its_stream(gpu: emulator.Driver) -> None:
    one, other = stream(1), stream(1)
    gpu.hold(one)
    early = int(ok(cu.cuMemAllocAsync(100, one)))
    fill(early, 1, one)
    fill(early, 2, other)
    assert "before their stream has allocated them" in taken(gpu)[0]
    gpu.hold(other)
    fill(early, 3, other)
    ok(cu.cuMemFreeAsync(early, one))
    assert early not in gpu.live()
    gpu.release(other)
    used, freed = taken(gpu)
    assert "used by work that is pending on another stream" in used
    assert "not allocated" in freed


# --- virtual memory --------------------------------------------------------------------------


def wanted_of(device: int) -> cu.CUmemAllocationProp:
    wanted = cu.CUmemAllocationProp()
    wanted.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = device
    return wanted


def physical(nbytes: int, device: int = 0) -> tuple[object, object]:
    wanted = wanted_of(device)
    access = cu.CUmemAccessDesc()
    access.location = wanted.location
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return ok(cu.cuMemCreate(nbytes, wanted, 0)), access


def test_mapped_memory(gpu: emulator.Driver) -> None:
    step = 2 * MIB
    handle, access = physical(step)
    base = int(ok(cu.cuMemAddressReserve(64 * GIB, 0, 0, 0)))
    assert ok(cu.cuMemGetInfo())[0] == 8 * GIB - step
    for place in (base, base + step):
        ok(cu.cuMemMap(place, step, 0, handle, 0))
    assert code(cu.cuMemsetD8(base, 1, 8)) == INVALID_VALUE
    assert "without access" in taken(gpu)[0]
    ok(cu.cuMemSetAccess(base, 2 * step, [access], 1))
    assert [int(it) for it in ok(cu.cuMemGetAddressRange(base + step + 9))] == [base + step, step]
    assert code(cu.cuMemGetAddressRange(base + 2 * step)) == NOT_FOUND
    assert code(cu.cuIpcGetMemHandle(base)) == INVALID_VALUE
    ok(cu.cuMemsetD8(base + step - 8, 5, 16))  # across both pieces, which are the same memory
    assert peek(base, 8) == peek(base + step, 8) == b"\5" * 8
    assert gpu.reservations() == {base: 64 * GIB}
    assert gpu.live_handles() == 1
    ok(cu.cuMemRelease(handle))
    assert gpu.live_handles() == 0
    assert ok(cu.cuMemGetInfo())[0] == 8 * GIB - step
    assert code(cu.cuMemAddressFree(base, 64 * GIB)) == INVALID_VALUE
    assert "has memory mapped" in taken(gpu)[0]
    assert code(cu.cuMemcpyDtoD(base, base + 2 * step - 4, 8)) == INVALID_VALUE
    assert "cross the end" in taken(gpu)[0]
    ok(cu.cuMemUnmap(base, 2 * step))
    ok(cu.cuMemAddressFree(base, 64 * GIB))
    assert ok(cu.cuMemGetInfo())[0] == 8 * GIB
    assert gpu.live() == {}


def test_wrong_use_of_mapped_memory(gpu: emulator.Driver) -> None:
    step = 2 * MIB
    gpu.set_free(0, step)
    handle, access = physical(step)
    with pytest.raises(AssertionError, match="OUT_OF_MEMORY"):
        physical(step)
    base = int(ok(cu.cuMemAddressReserve(2 * step, 0, 0, 0)))
    ok(cu.cuMemMap(base, step, 0, handle, 0))
    assert code(cu.cuMemSetAccess(base, 2 * step, [access], 1)) == INVALID_VALUE
    ok(cu.cuMemSetAccess(base, step, [access], 1))
    assert code(cu.cuMemMap(base, step, 0, handle, 0)) == INVALID_VALUE
    queue = stream(1)
    gpu.hold(queue)
    fill(base, 1, queue)
    ok(cu.cuMemUnmap(base, step))
    gpu.release(queue)
    ok(cu.cuMemRelease(handle))
    assert code(cu.cuMemRelease(handle)) == INVALID_VALUE
    ok(cu.cuMemAddressFree(base, 2 * step))
    assert code(cu.cuMemAddressFree(base, 2 * step)) == INVALID_VALUE
    said = taken(gpu)
    for text, words in zip(
        said,
        [
            "not whole pieces",
            "is mapped already",
            "work that is pending",
            "not allocated",
            "released before",
            "twice",
        ],
        strict=True,
    ):
        assert words in text


def test_what_a_driver_refuses_of_mapped_memory_is_told(gpu: emulator.Driver) -> None:
    step = 2 * MIB
    handle, access = physical(2 * step)
    base = int(ok(cu.cuMemAddressReserve(4 * step, 0, 0, 0)))
    wrong = [
        (lambda: cu.cuMemAddressReserve(step + 1, 0, 0, 0), "no multiple"),
        (lambda: cu.cuMemMap(base + MIB, 2 * step, 0, handle, 0), "no multiple"),
        (lambda: cu.cuMemMap(base, step, 0, handle, 0), "a part of a handle"),
        (lambda: cu.cuMemMap(base, step, step, handle, 0), "a part of a handle"),
        (lambda: cu.cuMemMap(base + 3 * step, 2 * step, 0, handle, 0), "not in a reservation"),
        (lambda: cu.cuMemMap(1 << 30, 2 * step, 0, handle, 0), "not in a reservation"),
        (lambda: cu.cuMemMap(base, step, 0, base, 0), "is no handle"),
        (lambda: cu.cuMemRelease(base), "is no handle"),
        (lambda: cu.cuMemSetAccess(base, step, [access], 1), "not whole pieces"),
        (lambda: cu.cuMemUnmap(base, step), "not what was mapped"),
        (lambda: cu.cuMemAddressFree(base, step), "not all of the reservation"),
    ]
    for call, words in wrong:
        assert code(call()) == INVALID_VALUE
        assert words in taken(gpu)[0]
    ok(cu.cuMemMap(base, 2 * step, 0, handle, 0))
    for start, nbytes in ((base, step), (base + step, step), (base, 3 * step), (base, 0)):
        assert code(cu.cuMemUnmap(start, nbytes)) == INVALID_VALUE
        assert "not what was mapped" in taken(gpu)[0]
    ok(cu.cuMemUnmap(base, 2 * step))
    ok(cu.cuMemRelease(handle))
    ok(cu.cuMemAddressFree(base, 4 * step))


MAPPING_CALLS = {
    "cuMemAddressReserve": lambda base, handle, access: cu.cuMemAddressReserve(2 * MIB, 0, 0, 0),
    "cuMemCreate": lambda base, handle, access: cu.cuMemCreate(2 * MIB, wanted_of(0), 0),
    "cuMemMap": lambda base, handle, access: cu.cuMemMap(base + 2 * MIB, 2 * MIB, 0, handle, 0),
    "cuMemSetAccess": lambda base, handle, access: cu.cuMemSetAccess(base, 2 * MIB, [access], 1),
    "cuMemUnmap": lambda base, handle, access: cu.cuMemUnmap(base, 2 * MIB),
    "cuMemRelease": lambda base, handle, access: cu.cuMemRelease(handle),
    "cuMemAddressFree": lambda base, handle, access: cu.cuMemAddressFree(base, 4 * MIB),
}


@pytest.mark.parametrize("name", MAPPING_CALLS)
@pytest.mark.parametrize("error", ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_NOT_SUPPORTED"])
def test_each_call_of_mapping_fails_on_order_and_does_nothing(
    gpu: emulator.Driver, name: str, error: str
) -> None:
    handle, access = physical(2 * MIB)
    base = int(ok(cu.cuMemAddressReserve(4 * MIB, 0, 0, 0)))
    ok(cu.cuMemMap(base, 2 * MIB, 0, handle, 0))
    before = gpu.live(), gpu.reservations(), gpu.live_handles()
    gpu.fail(name, error)
    assert code(MAPPING_CALLS[name](base, handle, access)) == emulator.ERRORS[error]
    assert (gpu.live(), gpu.reservations(), gpu.live_handles()) == before
    assert taken(gpu) == []
    ok(cu.cuMemUnmap(base, 2 * MIB))
    ok(cu.cuMemRelease(handle))
    ok(cu.cuMemAddressFree(base, 4 * MIB))


@pytest.mark.parametrize(
    ("attribute", "change"),
    [
        (102, lambda wanted: None),
        (103, lambda wanted: setattr(wanted, "requestedHandleTypes", handle_type(1))),
        (110, lambda wanted: setattr(wanted.allocFlags, "gpuDirectRDMACapable", 1)),
        (128, lambda wanted: setattr(wanted, "requestedHandleTypes", handle_type(8))),
    ],
)
def test_a_device_that_lacks_what_is_wanted_of_memory_says_so(
    gpu: emulator.Driver, attribute: int, change: Callable
) -> None:
    wanted = wanted_of(0)
    change(wanted)
    gpu.set_attribute(0, attribute, 0)
    assert code(cu.cuMemCreate(2 * MIB, wanted, 0)) == emulator.ERRORS["CUDA_ERROR_NOT_SUPPORTED"]
    gpu.set_attribute(0, attribute, 1)
    ok(cu.cuMemRelease(ok(cu.cuMemCreate(2 * MIB, wanted, 0))))


def handle_type(number: int) -> object:
    return cu.CUmemAllocationHandleType(number)


def test_access_is_given_to_all_or_to_none(gpu: emulator.Driver) -> None:
    handle, mine = physical(2 * MIB)
    base = int(ok(cu.cuMemAddressReserve(2 * MIB, 0, 0, 0)))
    ok(cu.cuMemMap(base, 2 * MIB, 0, handle, 0))
    peer, nobody = cu.CUmemAccessDesc(), cu.CUmemAccessDesc()
    for it, number in ((peer, 1), (nobody, 9)):
        it.location.type = mine.location.type
        it.location.id = number
        it.flags = mine.flags
    assert code(cu.cuMemSetAccess(base, 2 * MIB, [mine, nobody], 2)) == INVALID_DEVICE
    assert code(cu.cuMemsetD8(base, 1, 8)) == INVALID_VALUE
    assert "without access" in taken(gpu)[0]
    gpu.library.emu_set_peers(False)
    assert code(cu.cuMemSetAccess(base, 2 * MIB, [mine, peer], 2)) == INVALID_DEVICE
    gpu.library.emu_set_peers(True)
    ok(cu.cuMemSetAccess(base, 2 * MIB, [mine, peer], 2))
    ok(cu.cuMemsetD8(base, 1, 8))
    assert int(ok(cu.cuMemGetAccess(peer.location, base))) == 3
    ok(cu.cuMemUnmap(base, 2 * MIB))
    ok(cu.cuMemRelease(handle))
    ok(cu.cuMemAddressFree(base, 2 * MIB))


def test_a_current_context_is_needed(driver: emulator.Driver) -> None:
    ok(cu.cuInit(0))
    for call in (lambda: cu.cuMemAlloc(1), lambda: cu.cuStreamCreate(0), cu.cuMemGetInfo):
        assert code(call()) == INVALID_CONTEXT
    one = enter(0)
    two = enter(1)
    assert int(ok(cu.cuCtxGetDevice())) == 1
    assert int(ok(cu.cuCtxPopCurrent())) == int(two)
    assert int(ok(cu.cuCtxGetDevice())) == 0
    elsewhere: list[int] = []
    thread = threading.Thread(target=lambda: elsewhere.append(code(cu.cuMemAlloc(1))))
    thread.start()
    thread.join()
    assert elsewhere == [INVALID_CONTEXT]
    ok(cu.cuCtxSetCurrent(two))
    assert int(ok(cu.cuCtxGetCurrent())) == int(two)
    assert int(one) != int(two)


def test_the_last_release_destroys(driver: emulator.Driver) -> None:
    context = enter()
    ok(cu.cuDevicePrimaryCtxRetain(0))
    assert driver.retained(0) == 2
    address, mark, queue = alloc(100), event(), stream()
    ok(cu.cuDevicePrimaryCtxRelease(0))
    assert ok(cu.cuDevicePrimaryCtxGetState(0)) == (0, 1)
    ok(cu.cuDevicePrimaryCtxRelease(0))
    assert ok(cu.cuDevicePrimaryCtxGetState(0)) == (0, 0)
    assert code(cu.cuMemAlloc(1)) == DESTROYED
    assert code(cu.cuCtxPushCurrent(context)) == DESTROYED
    assert driver.live() == {}
    assert (driver.live_events(), driver.live_streams()) == (0, 0)
    assert int(ok(cu.cuDevicePrimaryCtxRetain(0))) == int(context)
    assert ok(cu.cuMemGetInfo())[0] == 8 * GIB  # the handle that is current is good again
    assert code(cu.cuMemFree(address)) == INVALID_VALUE
    assert code(cu.cuEventQuery(mark)) == INVALID_HANDLE
    assert code(cu.cuStreamQuery(queue)) == INVALID_HANDLE
    assert len(taken(driver)) == 5


def test_a_release_too_many(driver: emulator.Driver) -> None:
    enter()
    ok(cu.cuDevicePrimaryCtxRelease(0))
    assert code(cu.cuDevicePrimaryCtxRelease(0)) == INVALID_CONTEXT
    assert "not retained" in taken(driver)[0]


def test_reset_of_a_context_takes_everything_but_the_count(gpu: emulator.Driver) -> None:
    address, queue = alloc(100), stream()
    gpu.hold(queue)
    fill(address, 1, queue)
    ok(cu.cuDevicePrimaryCtxReset(0))
    assert (gpu.live(), gpu.live_streams(), gpu.pending) == ({}, 0, 0)
    assert code(cu.cuCtxSynchronize()) == DESTROYED
    assert "after it was destroyed" in taken(gpu)[0]
    ok(cu.cuDevicePrimaryCtxRelease(0))
    assert code(cu.cuDevicePrimaryCtxRelease(0)) == INVALID_CONTEXT
    taken(gpu)


def test_a_library_may_keep_its_handles(gpu: emulator.Driver) -> None:
    context = ok(cu.cuCtxGetCurrent())
    address, mark, queue = alloc(100), event(), stream()
    gpu.reset()
    assert int(ok(cu.cuCtxGetCurrent())) == 0
    ok(cu.cuMemFree(address))  # what is left from the machine before is nobody's fault
    ok(cu.cuCtxPushCurrent(context))
    alloc(100)
    assert gpu.retained(0) == 0
    ok(cu.cuMemFree(address))
    ok(cu.cuEventDestroy(mark))
    ok(cu.cuStreamDestroy(queue))
    assert code(cu.cuStreamQuery(queue)) == INVALID_HANDLE


def test_events_and_streams_of_different_devices(gpu: emulator.Driver) -> None:
    mark, queue = event(), stream()
    enter(1)
    far = stream()
    assert code(cu.cuEventRecord(mark, far)) == INVALID_HANDLE
    assert "wrong context" in taken(gpu)[0]
    assert code(cu.cuEventRecord(mark, 0)) == INVALID_HANDLE  # the legacy stream of device 1
    assert "wrong context" in taken(gpu)[0]
    ok(cu.cuEventRecord(mark, queue))
    ok(cu.cuStreamWaitEvent(far, mark, 0))  # this is allowed across devices
    ok(cu.cuEventQuery(mark))


def test_work_waits_for_its_stream(gpu: emulator.Driver) -> None:
    queue, mark, address = stream(1), event(), alloc(8)
    gpu.hold(queue)
    fill(address, 1, queue)
    ok(cu.cuEventRecord(mark, queue))
    fill(address, 2, queue)
    assert peek(address) == b"\0"
    assert code(cu.cuEventQuery(mark)) == code(cu.cuStreamQuery(queue)) == NOT_READY
    assert gpu.pending == 3
    gpu.release(queue)
    assert peek(address) == b"\2"
    assert code(cu.cuEventQuery(mark)) == code(cu.cuStreamQuery(queue)) == SUCCESS


def test_the_legacy_stream_and_blocking_streams_wait_for_each_other(gpu: emulator.Driver) -> None:
    blocking, free, address = stream(0), stream(1), alloc(8)
    gpu.hold(blocking)
    fill(address, 1, blocking)
    fill(address, 2)  # legacy: behind what the blocking stream has
    fill(address, 3, blocking)  # behind the legacy stream
    fill(address + 4, 9, free, 1)
    assert peek(address, 5) == b"\0\0\0\0\t"
    assert code(cu.cuStreamQuery(0)) == NOT_READY
    gpu.release(blocking)
    assert peek(address) == b"\3"
    gpu.hold(0)
    fill(address, 4)
    fill(address, 5, blocking)
    assert peek(address) == b"\3"
    assert code(cu.cuStreamQuery(blocking)) == NOT_READY
    gpu.release(0)
    assert peek(address) == b"\5"


def test_the_legacy_streams_of_devices_are_apart(gpu: emulator.Driver) -> None:
    gpu.hold(0)
    near = alloc(8)
    fill(near, 1)
    enter(1)
    far = alloc(8)
    fill(far, 2)
    assert (peek(near), peek(far)) == (b"\0", b"\2")
    gpu.release(0, device=0)
    assert peek(near) == b"\1"


def test_an_event_orders_two_streams(gpu: emulator.Driver) -> None:
    one, two, mark, address = stream(1), stream(1), event(), alloc(8)
    gpu.hold(one)
    fill(address, 1, one)
    ok(cu.cuEventRecord(mark, one))
    ok(cu.cuStreamWaitEvent(two, mark, 0))
    fill(address, 2, two)
    fill(address, 3, one)
    ok(cu.cuEventRecord(mark, one))  # the wait is for the record before
    ok(cu.cuEventDestroy(mark))  # and needs the event no more
    assert peek(address) == b"\0"
    gpu.release(one)
    assert peek(address) in (b"\2", b"\3")
    ok(cu.cuStreamWaitEvent(two, event(), 0))  # never recorded: nothing to wait for
    ok(cu.cuStreamQuery(two))


def test_hold_all(gpu: emulator.Driver) -> None:
    queue, address = stream(1), alloc(8)
    gpu.hold_all()
    fill(address, 1, queue)
    fill(address + 4, 1, 0, 1)
    assert gpu.pending == 2
    gpu.release_all()
    assert peek(address, 5) == b"\1" * 5


@pytest.mark.parametrize("what", ["stream", "event", "context", "free", "copy", "host"])
def test_calls_that_wait(gpu: emulator.Driver, what: str) -> None:
    queue, mark, address = stream(0), event(), alloc(8)
    pinned = int(ok(cu.cuMemHostAlloc(8, 0)))
    gpu.hold(queue)
    fill(address, 1, queue)
    ok(cu.cuEventRecord(mark, queue))
    back = (ctypes.c_char * 8)()
    wait = {
        "stream": lambda: cu.cuStreamSynchronize(queue),
        "event": lambda: cu.cuEventSynchronize(mark),
        "context": cu.cuCtxSynchronize,
        "free": lambda: cu.cuMemFree(address),
        "copy": lambda: cu.cuMemcpyDtoH(back, address, 8),
        "host": lambda: cu.cuMemcpyDtoHAsync(back, address, 8, queue),
    }[what]
    ok(cu.cuMemcpyDtoHAsync(pinned, address, 8, queue))
    assert peek(pinned) == b"\0"
    timer = later(lambda: gpu.release(queue))
    ok(wait())
    timer.join()
    assert peek(pinned) == b"\1"
    assert what not in ("copy", "host") or back.raw == b"\1" * 8


def test_patience_has_an_end(gpu: emulator.Driver) -> None:
    gpu.set_patience(0.02)
    queue, address = stream(0), alloc(8)
    gpu.hold(queue)
    fill(address, 1, queue)
    back = (ctypes.c_char * 8)()
    assert code(cu.cuStreamSynchronize(queue)) == LAUNCH_TIMEOUT
    assert code(cu.cuMemcpyDtoH(back, address, 8)) == LAUNCH_TIMEOUT
    assert code(cu.cuMemFree(address)) == LAUNCH_TIMEOUT
    assert [text.split(":")[1] for text in taken(gpu)] == [" blocked on held work"] * 3
    assert back.raw == bytes(8)
    assert address in gpu.live()


def test_a_pageable_source_is_taken_at_once(gpu: emulator.Driver) -> None:
    queue, address = stream(1), alloc(8)
    pinned = int(ok(cu.cuMemHostAlloc(8, 0)))
    pageable = ctypes.create_string_buffer(b"before")
    gpu.hold(queue)
    ok(cu.cuMemcpyHtoDAsync(address, pageable, 4, queue))
    ok(cu.cuMemcpyHtoDAsync(address + 4, pinned, 4, queue))
    pageable.raw = b"after!!"
    ctypes.memmove(pinned, b"late", 4)
    gpu.release(queue)
    assert peek(address, 8) == b"befolate"


def test_host_functions_run_in_order_on_another_thread(gpu: emulator.Driver) -> None:
    queue, address = stream(1), alloc(8)
    seen: list[tuple[bytes, int]] = []
    called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
        lambda _: seen.append((peek(address), threading.get_native_id()))
    )
    fill(address, 1, queue)
    ok(cu.cuLaunchHostFunc(queue, cu.CUhostFn(ctypes.cast(called, ctypes.c_void_p).value), 0))
    fill(address, 2, queue)
    ok(cu.cuStreamSynchronize(queue))
    assert seen[0][0] == b"\1"
    assert seen[0][1] != threading.get_native_id()
    assert peek(address) == b"\2"


def test_what_a_stream_says_of_itself(gpu: emulator.Driver) -> None:
    queue = ok(cu.cuStreamCreateWithPriority(1, -2))
    assert ok(cu.cuStreamGetFlags(queue)) == 1
    assert ok(cu.cuStreamGetPriority(queue)) == -2
    assert int(ok(cu.cuStreamGetDevice(queue))) == 0
    assert int(ok(cu.cuStreamGetCtx(queue))) == int(ok(cu.cuCtxGetCurrent()))
    assert ok(cu.cuStreamGetId(queue)) != ok(cu.cuStreamGetId(0)) == ok(cu.cuStreamGetId(1))
    ok(cu.cuStreamDestroy(queue))
    assert code(cu.cuStreamGetFlags(queue)) == INVALID_HANDLE
    assert "was destroyed" in taken(gpu)[0]


def test_a_destroyed_stream_still_does_its_work(gpu: emulator.Driver) -> None:
    queue, address = stream(1), alloc(8)
    gpu.hold(queue)
    fill(address, 1, queue)
    ok(cu.cuStreamDestroy(queue))
    assert peek(address) == b"\0"
    gpu.release(queue)
    assert peek(address) == b"\1"


def test_elapsed_time(gpu: emulator.Driver) -> None:
    start, end = event(0), event(0)
    assert code(cu.cuEventElapsedTime(start, end)) == INVALID_HANDLE
    ok(cu.cuEventRecord(start, 0))
    ok(cu.cuEventRecord(end, 0))
    assert 0 <= ok(cu.cuEventElapsedTime(start, end)) < 1000
    assert gpu.live_events() == 2


def test_streams_of_threads(gpu: emulator.Driver) -> None:
    address = alloc(8)
    context = ok(cu.cuCtxGetCurrent())
    gpu.hold(2)
    fill(address, 1, 2)

    def other_thread() -> None:
        ok(cu.cuCtxSetCurrent(context))
        fill(address, 2, 2)

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert peek(address) == b"\2"  # it has a stream of its own
    gpu.release(2)
    assert peek(address) == b"\1"


def test_capture_forbids_what_would_break_it(gpu: emulator.Driver) -> None:
    queue, mark, address = stream(1), event(), alloc(8)
    ok(cu.cuStreamBeginCapture(queue, GLOBAL))
    capturing = cu.CUstreamCaptureStatus
    assert ok(cu.cuStreamIsCapturing(queue)) == capturing.CU_STREAM_CAPTURE_STATUS_ACTIVE
    fill(address, 1, queue)
    assert code(cu.cuMemAlloc(8)) == CAPTURE_UNSUPPORTED
    assert code(cu.cuMemFree(address)) == CAPTURE_UNSUPPORTED
    assert code(cu.cuEventQuery(mark)) == CAPTURE_UNSUPPORTED
    assert ok(cu.cuStreamIsCapturing(queue)) == capturing.CU_STREAM_CAPTURE_STATUS_INVALIDATED
    assert code(cu.cuStreamEndCapture(queue)) == CAPTURE_INVALIDATED
    assert peek(address) == b"\0"
    ok(cu.cuMemFree(address))


def test_a_relaxed_thread_may_allocate_during_capture(gpu: emulator.Driver) -> None:
    queue, mark = stream(1), event()
    ok(cu.cuStreamBeginCapture(queue, GLOBAL))
    before = ok(cu.cuThreadExchangeStreamCaptureMode(RELAXED))
    assert before == GLOBAL
    address = alloc(8)
    ok(cu.cuEventQuery(mark))
    assert ok(cu.cuThreadExchangeStreamCaptureMode(before)) == RELAXED
    fill(address, 1, queue)
    ok(cu.cuEventRecord(mark, queue))
    other = stream(1)
    ok(cu.cuStreamWaitEvent(other, mark, 0))  # joins
    assert int(ok(cu.cuStreamIsCapturing(other))) == 1
    graph = ok(cu.cuStreamEndCapture(queue))
    assert int(ok(cu.cuStreamIsCapturing(other))) == 0
    ok(cu.cuGraphDestroy(graph))
    assert peek(address) == b"\0"


def test_the_modes_of_capture(gpu: emulator.Driver) -> None:
    queue = stream(1)
    ok(cu.cuStreamBeginCapture(queue, RELAXED))
    address = alloc(8)
    ok(cu.cuStreamEndCapture(queue))
    ok(cu.cuStreamBeginCapture(queue, MODES.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    context, results = ok(cu.cuCtxGetCurrent()), []

    def other_thread() -> None:
        ok(cu.cuCtxSetCurrent(context))
        results.append(code(cu.cuMemFree(address)))

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert results == [SUCCESS]
    assert code(cu.cuMemAlloc(8)) == CAPTURE_UNSUPPORTED
    assert code(cu.cuStreamEndCapture(queue)) == CAPTURE_INVALIDATED


def test_the_legacy_stream_spoils_a_capture(gpu: emulator.Driver) -> None:
    queue, address = stream(0), alloc(8)
    ok(cu.cuStreamBeginCapture(queue, RELAXED))
    assert code(cu.cuMemsetD8Async(address, 1, 8, 0)) == CAPTURE_IMPLICIT
    assert code(cu.cuStreamEndCapture(queue)) == CAPTURE_INVALIDATED
    assert code(cu.cuStreamBeginCapture(0, RELAXED)) == CAPTURE_UNSUPPORTED


def test_calls_are_logged(gpu: emulator.Driver) -> None:
    queue = stream()
    gpu.clear()
    with gpu.counting() as counts:
        address = alloc(100)
        fill(address, 1, queue)
        cu.cuMemAlloc(9 * GIB)
    assert counts == {"cuMemAlloc": 2, "cuMemsetD8Async": 1}
    me = threading.get_native_id()
    assert gpu.calls == [
        emulator.Call("cuMemAlloc", me, SUCCESS, 100, address, None),
        emulator.Call("cuMemsetD8Async", me, SUCCESS, 8, address, int(queue)),
        emulator.Call("cuMemAlloc", me, OUT_OF_MEMORY, 9 * GIB, None, None),
    ]
    assert (gpu.count(), gpu.count("cuMemAlloc"), gpu.count("cuMemFree")) == (3, 2, 0)


def test_faults(gpu: emulator.Driver) -> None:
    gpu.fail("cuMemAlloc", at=2, times=2)
    results = [code(cu.cuMemAlloc(8)) for _ in range(5)]
    assert results == [0, OUT_OF_MEMORY, OUT_OF_MEMORY, 0, 0]
    assert len(gpu.live()) == 3
    gpu.fail("cuMemGetInfo", "CUDA_ERROR_UNKNOWN", times=None)
    assert [code(cu.cuMemGetInfo()) for _ in range(3)] == [999] * 3
    gpu.clear()
    ok(cu.cuMemGetInfo())
    gpu.fail("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", above=MIB)
    assert [code(cu.cuMemAlloc(n)) for n in (MIB, MIB + 1, MIB + 1)] == [0, 2, 2]
    address = alloc(8)
    gpu.fail("cuMemFree", 4)
    assert code(cu.cuMemFree(address)) == 4
    assert address in gpu.live()
    with pytest.raises(KeyError):
        gpu.fail("cuMemFree", "CUDA_ERROR_NO_SUCH")


def complaint_cases() -> dict[str, tuple[Callable[[SimpleNamespace], tuple], int, str]]:
    return {
        "freed twice": (lambda it: cu.cuMemFree(it.freed), INVALID_VALUE, "was freed twice"),
        "wild free": (lambda it: cu.cuMemFree(4096), INVALID_VALUE, "unknown pointer"),
        "inner free": (lambda it: cu.cuMemFree(it.live + 8), INVALID_VALUE, "not its start"),
        "host free": (lambda it: cu.cuMemFree(it.pinned), INVALID_VALUE, "not memory of a device"),
        "freed copy": (lambda it: cu.cuMemsetD8(it.freed, 1, 1), INVALID_VALUE, "not allocated"),
        "wild copy": (lambda it: cu.cuMemsetD8(4096, 1, 1), INVALID_VALUE, "not memory of a"),
        "long copy": (lambda it: cu.cuMemsetD8(it.live, 1, 101), INVALID_VALUE, "cross the end"),
        "event": (lambda it: cu.cuEventRecord(it.event, 0), INVALID_HANDLE, "was destroyed"),
        "event twice": (lambda it: cu.cuEventDestroy(it.event), INVALID_HANDLE, "was destroyed"),
        "wild event": (lambda it: cu.cuEventQuery(4096), INVALID_HANDLE, "is no event"),
        "stream": (lambda it: cu.cuStreamSynchronize(it.stream), INVALID_HANDLE, "was destroyed"),
        "stream twice": (lambda it: cu.cuStreamDestroy(it.stream), INVALID_HANDLE, "destroyed"),
        "wild stream": (lambda it: cu.cuStreamQuery(4096), INVALID_HANDLE, "is no stream"),
        "pinned": (lambda it: cu.cuMemFreeHost(it.busy), SUCCESS, "work that is pending"),
    }


@pytest.mark.parametrize("case", complaint_cases())
def test_complaints(gpu: emulator.Driver, case: str) -> None:
    queue = stream(1)
    it = SimpleNamespace(live=alloc(100), freed=alloc(100), event=event(), stream=stream())
    it.pinned, it.busy = (int(ok(cu.cuMemHostAlloc(8, 0))) for _ in range(2))
    ok(cu.cuMemFree(it.freed))
    ok(cu.cuEventDestroy(it.event))
    ok(cu.cuStreamDestroy(it.stream))
    gpu.hold(queue)
    ok(cu.cuMemcpyHtoDAsync(it.live, it.busy, 8, queue))
    act, result, words = complaint_cases()[case]
    assert code(act(it)) == result
    (text,) = taken(gpu)[:1]
    assert words in text
    taken(gpu)


def test_many_threads(gpu: emulator.Driver) -> None:
    context = ok(cu.cuCtxGetCurrent())

    def work() -> None:
        ok(cu.cuCtxSetCurrent(context))
        queue, mark = stream(1), event()
        for i in range(100):
            address = int(ok(cu.cuMemAllocAsync(512 + i, queue)))
            fill(address, i, queue)
            ok(cu.cuEventRecord(mark, queue))
            ok(cu.cuStreamWaitEvent(queue, mark, 0))
            ok(cu.cuMemFreeAsync(address, queue))
        ok(cu.cuStreamSynchronize(queue))

    assert run_all([work] * 8) == []
    assert gpu.live() == {}
    assert gpu.count("cuMemAllocAsync") == 800


# --- processes -------------------------------------------------------------------------------

USE = """
from cuda.bindings import driver as cu
cu.cuInit(0)
context = cu.cuDevicePrimaryCtxRetain(0)[1]
cu.cuCtxPushCurrent(context)
"""


def test_leaks_are_reported_at_the_end() -> None:
    done = script(USE + "cu.cuMemAlloc(100); cu.cuEventCreate(0)", BFC_EMULATOR_LEAKS="1")
    assert done.returncode == 99, done.stderr
    assert "bfc emulator: leaked 100 bytes of device memory" in done.stderr
    assert "leaked an event" in done.stderr
    assert "leaked the primary context of device 0, retained 1 times" in done.stderr
    clean = script(USE + "cu.cuDevicePrimaryCtxRelease(0)", BFC_EMULATOR_LEAKS="1")
    assert (clean.returncode, clean.stderr) == (0, "")


def test_a_forked_child_has_no_driver() -> None:
    done = script(
        USE
        + """
import os
child = os.fork()
if not child:
    os._exit(int(cu.cuMemGetInfo()[0]))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(cu.cuMemGetInfo()[0]))
"""
    )
    assert done.stdout.split() == [str(NOT_INITIALIZED), "0"], done.stderr


def test_the_default_stream_may_be_that_of_the_thread() -> None:
    done = script(
        USE
        + """
driver = cuda_emulator.load()
address = int(cu.cuMemAlloc(8)[1])
driver.hold(2)
cu.cuMemsetD8Async(address, 1, 8, 0)
cu.cuMemsetD8(address, 1, 8)
print(driver.pending, driver.calls[-2].stream, driver.calls[-1].stream)
""",
        CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM="1",
    )
    assert done.stdout.split() == ["2", "2", "2"], done.stderr


def test_an_old_driver_lacks_functions() -> None:
    done = script(
        """
driver = cuda_emulator.load()
driver.hide_newer(11010)
driver.hide("cuMemGetInfo")
from cuda.bindings import driver as cu
cu.cuInit(0)
for call in (lambda: cu.cuMemAllocAsync(1, 0), cu.cuMemGetInfo):
    try:
        call()
    except RuntimeError as error:
        print(error)
"""
    )
    assert [line.split()[1].strip('"') for line in done.stdout.splitlines()] == [
        "cuMemAllocAsync",
        "cuMemGetInfo_v2",
    ], (done.stdout, done.stderr)


def test_cuda_core_runs_on_it(driver: emulator.Driver) -> None:
    core = pytest.importorskip("cuda.core")
    device = core.Device(0)
    device.set_current()
    queue = device.create_stream()
    buffer = device.allocate(1000, stream=queue)
    assert driver.device_of(int(buffer.handle)) == 0
    left = device.allocate(1000, stream=queue)
    buffer.close()
    mark = queue.record()
    mark.sync()
    assert mark.is_done
    assert list(driver.live()) == [int(left.handle)]
    driver.reset()
    del left, mark, queue  # what is left of the machine before goes without a word
    device.set_current()
    assert driver.live() == {}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["numba.cuda", "numba_cuda_mlir.cuda"])
def test_numba_runs_on_it(driver: emulator.Driver, name: str) -> None:
    numpy = pytest.importorskip("numpy")
    cuda = pytest.importorskip(name)
    data = numpy.arange(1000)
    array = cuda.to_device(data)
    assert len(driver.live()) == 1
    assert (array.copy_to_host() == data).all()
    queue, mark = cuda.stream(), cuda.event()
    mark.record(queue)
    mark.synchronize()
    queue.synchronize()
    pinned = cuda.pinned_array(10)
    managed = cuda.managed_array(10)
    managed[:] = 5
    kinds = {it.kind for it in driver.allocations()}
    assert kinds == {"device", "host", "managed"}
    driver.reset()
    del pinned, managed, array  # what is left of the machine before goes without a word
    cuda.current_context().deallocations.clear()
