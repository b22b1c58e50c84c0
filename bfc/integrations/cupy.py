"""CuPy arrays in a bfc pool.

    with bfc.use(a, "cupy"): ...                                    # process-wide
    with cupy.cuda.using_allocator(bfc.integrations.cupy.allocator(a)): ...   # this thread only

Memory that CuPy's own pool has cached stays there; `cupy.get_default_memory_pool().
free_all_blocks()` gives it back. CuPy's memory hooks see only that pool.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bfc.integrations._shared import Allocators, OneOrMore, by_device, client, no_allocator

INSTALL = "cupy-cuda13x   (cupy-cuda12x for CUDA 12)"


def lookups(cupy: Any) -> tuple[Callable[[], int], Callable[[], Any]]:
    """The functions that return CuPy's current device and current stream.

    Parameters
    ----------
    cupy : module
        CuPy.

    Returns
    -------
    tuple of (callable, callable)
        For the device and the stream.
    """
    return cupy.cuda.device.get_device_id, cupy.cuda.get_current_stream


def allocator(allocators: OneOrMore) -> Callable[[int], Any]:
    """Make what `cupy.cuda.using_allocator` and `cupy.cuda.set_allocator` take.

    Parameters
    ----------
    allocators : Allocator, list of Allocator, or dict of int to Allocator
        One, or one for each device.

    Returns
    -------
    callable
        It takes bytes and returns a `MemoryPointer`, and raises what `Allocator.allocate` does, or
        DeviceUnavailableError if the device has no allocator.

    Notes
    -----
    The memory is for CuPy's current stream, on its current device. It is freed when the last array
    on it is collected, and reused after what that stream has queued then. If another stream uses
    it, call `allocator.record_stream(array.data.ptr, stream)`. The stream object is kept until
    then; the owner of an `ExternalStream` must keep it.

    Cost: as `allocate`, and two small objects of CuPy. Source: `cupy.cuda.memory`.
    """
    pools = by_device(allocators)
    cupy = client("cupy", INSTALL)
    memory, pointer = cupy.cuda.UnownedMemory, cupy.cuda.MemoryPointer
    current_device, current_stream = lookups(cupy)

    def allocate(nbytes: int) -> Any:
        device = current_device()
        pool = pools.get(device) or no_allocator(pools, device)
        stream = current_stream()
        # Reading `ptr` is cheaper than asking the object, which only other streams need.
        buffer = pool.allocate(nbytes, stream if stream.ptr else 0)
        # An explicit device saves CuPy a driver call, which would fail for an address of 0.
        return pointer(memory(buffer.ptr, nbytes, buffer, device), 0)

    return allocate


def install(allocators: Allocators) -> Callable[[], None]:
    """Let CuPy allocate from these allocators.

    Parameters
    ----------
    allocators : dict of int to Allocator
        By device.

    Returns
    -------
    callable
        It puts CuPy's previous allocator back, unless another was set meanwhile.
    """
    ours = allocator(allocators)
    cuda = client("cupy", INSTALL).cuda
    before = _for_all_threads(lambda: _swap(cuda, ours))
    return lambda: _for_all_threads(lambda: _swap(cuda, before, only_if=ours))


def _swap(cuda: Any, new: Any, only_if: Any = None) -> Any:
    old = cuda.get_allocator()
    if only_if is None or old is only_if:
        cuda.set_allocator(new)
    return old


def _for_all_threads(action: Callable[[], Any]) -> Any:
    """Runs an action in a thread of its own. In this thread `using_allocator` may be active, and
    then CuPy shows that allocator, and not the one for all threads."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(action).result()
