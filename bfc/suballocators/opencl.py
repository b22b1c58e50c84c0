"""Memory of an OpenCL device, through pyopencl: buffers, or shared virtual memory (SVM)."""

from __future__ import annotations

import bisect
import ctypes
import operator
from dataclasses import dataclass
from typing import Any, SupportsIndex

from bfc.devices import Availability, Device
from bfc.drivers.opencl import platform as _opencl
from bfc.drivers.opencl import queues as _queues
from bfc.errors import DeviceUnavailableError, SubAllocatorError
from bfc.interpreter._process import ForkSafeLock
from bfc.suballocators.base import SubAllocator
from bfc.units import as_int, format_bytes, parse_bytes

#: Where invented addresses start: above every address that a process can have.
MADE_UP = 1 << 60
#: The gap between two regions, so that the end of one is never the start of another.
GAP = 1 << 16

_lock = ForkSafeLock()
_next_address = MADE_UP
#: NVIDIA's driver 580 crashes where threads make memory resident at once.
_making = ForkSafeLock()


def _take_addresses(nbytes: int, alignment: int) -> int:
    """A range that no other region of this process has or had."""
    global _next_address
    with _lock:
        address = (_next_address + alignment - 1) // alignment * alignment
        _next_address = address + nbytes + GAP
    return address


@dataclass(slots=True)
class Region:
    """The memory of one `alloc`."""

    address: int
    nbytes: int
    memory: Any  # a pyopencl.Buffer or pyopencl.SVMAllocation


class OpenCLSubAllocator(SubAllocator):
    """Memory of one OpenCL device. A region is one buffer, or one SVM allocation.

    Parameters
    ----------
    context : pyopencl.Context, optional
        A context, whose first device is used. None is a shared context of device `index`.
    svm : bool, optional
        Use shared virtual memory, whose addresses are real and can be used in kernels. Otherwise
        regions are OpenCL buffers, which have no addresses: each gets a range of made-up ones, from
        which `locate` finds the buffer and the offset.
    index : int, optional
        The device's number, all platforms counted together.
    capacity : int or str, optional
        How many bytes can be live at once, as a number or a string such as "4 GiB". None is all
        memory of the device.
    profiling : bool, optional
        Make its own queue record when each command starts and ends (`Event.profile`).

    Attributes
    ----------
    context : pyopencl.Context
        The context.
    queue : pyopencl.CommandQueue
        Stream 0: an in-order queue of its own.
    live_bytes : int
        The bytes that were allocated and not freed.

    Raises
    ------
    DeviceUnavailableError
        If pyopencl, a driver, the device or SVM is missing: `pip install 'bfc-allocator[opencl]'`.
    TypeError
        If `context` is not a context.
    DriverError
        If OpenCL fails, now or in a later call.

    Notes
    -----
    Streams other than 0 are `pyopencl.CommandQueue` objects of the same context, or their
    `int_ptr`. Each is kept alive as long as somebody else holds it, too. Every region is made
    resident at once, so that a full device is noticed here, and not when a kernel runs.

    In a forked child freeing does nothing, all else raises SubAllocatorError, and no other
    sub-allocator can be made.

    Examples
    --------
    >>> import bfc
    >>> if bfc.opencl.is_available():
    ...     with bfc.BFCAllocator(bfc.OpenCLSubAllocator(capacity="64 MiB")) as allocator:
    ...         buffer = allocator.allocate(4).from_host(b"abcd")
    ...         assert bytes(buffer.to_host()) == b"abcd"
    """

    supports_coalescing = False
    asynchronous = True
    streams_are_handles = True
    may_be_unordered = True
    supports_virtual_memory = Availability(False, "OpenCL has no calls that map memory")

    def __init__(
        self,
        context: Any = None,
        *,
        svm: bool = False,
        index: SupportsIndex = 0,
        capacity: SupportsIndex | str | None = None,
        profiling: bool = False,
    ) -> None:
        cl = _opencl.load()
        if context is None:
            context = _opencl.default_context(as_int(index))
        elif not isinstance(context, cl.Context):
            raise TypeError(f"context is a pyopencl.Context, not {type(context).__name__}")
        self._cl = cl
        self.context = context
        self.svm = bool(svm)
        with _opencl.in_words("asking the context for its device"):
            self.cl_device = context.devices[0]
            self.name = str(self.cl_device.name).strip()
            self.granularity = max(256, _power_of_two(self.cl_device.mem_base_addr_align // 8))
            self.largest_block = int(self.cl_device.max_mem_alloc_size)
            total = int(self.cl_device.global_mem_size)
            self.device = Device("opencl", _opencl.ordinal_of(self.cl_device))
        if svm:
            self.granularity = 256
            self.largest_block -= self.granularity  # each request includes room for the alignment
            if not _opencl.has_svm(self.cl_device):
                raise DeviceUnavailableError(
                    f"{self.name} has no shared virtual memory: take svm=False"
                )
        self.total_bytes = total if capacity is None else parse_bytes(capacity)
        with _opencl.in_words("clCreateCommandQueue"):
            properties = cl.command_queue_properties.PROFILING_ENABLE if profiling else 0
            self.queue = cl.CommandQueue(context, self.cl_device, properties)
        self._queues = _queues.Queues(context, self.queue)
        self._home = _opencl.Home()
        self.default_stream_alias = self._queues.own.handle
        self.live_bytes = 0
        self._lock = ForkSafeLock()
        # In order of addresses. It is replaced, never changed, so that look-ups need no lock.
        self._regions: tuple[tuple[int, ...], tuple[Region, ...]] = (), ()

    def __repr__(self) -> str:
        live, total = format_bytes(self.live_bytes), format_bytes(self.total_bytes)
        kind = ", SVM" if self.svm else ""
        return f"OpenCLSubAllocator({self.device.ordinal}{kind}: {total}, {live} live)"

    def memory_info(self) -> tuple[int, int]:
        """How much memory is left, as far as this sub-allocator knows.

        OpenCL does not tell how much other programs use.

        Returns
        -------
        tuple of (int, int)
            Free and total bytes.
        """
        return max(0, self.total_bytes - self.live_bytes), self.total_bytes

    # -- regions -----------------------------------------------------------------------------------

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        self._home.check()
        nbytes = operator.index(nbytes)
        if nbytes < 1:
            raise ValueError(f"a block has 1 byte or more, not {nbytes}")
        region, is_set_aside = None, False
        try:
            with self._lock:
                largest = self.largest_block or 0
                if nbytes > largest or self.live_bytes + nbytes > self.total_bytes:
                    return None
                is_set_aside, self.live_bytes = True, self.live_bytes + nbytes
            region = self._make(max(alignment, self.granularity), nbytes)
            self._change_regions(add=region)
            return region.address, nbytes
        except BaseException as error:
            if is_set_aside:
                self._give_up(nbytes)
            if region is not None:
                self._change_regions(remove=region)
                region.memory.release()
            if not isinstance(error, self._cl.Error):
                raise
            if _opencl.is_no_room(error):
                return None
            call = "clSVMAlloc" if self.svm else "clCreateBuffer"
            raise _opencl.failure(error, f"{call}({nbytes} bytes)") from error

    def _make(self, alignment: int, nbytes: int) -> Region:
        cl = self._cl
        memory: Any
        if self.svm:
            flags = cl.svm_mem_flags.READ_WRITE
            memory = cl.SVMAllocation(self.context, nbytes + alignment, 0, flags)
            address = (memory.svm_ptr + alignment - 1) // alignment * alignment
        else:
            memory = cl.Buffer(self.context, cl.mem_flags.READ_WRITE, nbytes)
            address = _take_addresses(nbytes, alignment)
        try:
            with _making:
                self._make_resident(memory)
        except BaseException:
            memory.release()
            raise
        return Region(address, nbytes, memory)

    def _make_resident(self, memory: Any) -> None:
        cl, queue = self._cl, self.queue
        undefined = cl.mem_migration_flags.CONTENT_UNDEFINED
        if not self.svm:
            cl.enqueue_migrate_mem_objects(queue, [memory], undefined)
        elif self.cl_device._get_cl_version() >= (2, 1) and hasattr(cl, "enqueue_svm_migrate_mem"):
            cl.enqueue_svm_migrate_mem(queue, [memory], undefined)
        else:  # OpenCL 2.0, or a pyopencl before 2025
            cl.enqueue_svm_memfill(queue, memory, b"\0")
        queue.finish()

    def free(self, address: int, nbytes: int) -> None:
        if not self._home.is_here:
            return  # in a child; the lock may be held by a thread of the parent
        with self._lock:
            region = self._region_at(address, 1)
            if region is None or (region.address, region.nbytes) != (address, nbytes):
                raise SubAllocatorError(f"free({address:#x}, {nbytes}) is not a live block")
            self._change_regions(remove=region)
        try:
            self._release(region)
        except BaseException:
            self._change_regions(add=region)
            raise
        self._give_up(nbytes)

    def _change_regions(self, *, add: Region | None = None, remove: Region | None = None) -> None:
        with self._lock:
            while True:
                before = self._regions
                regions = [region for region in before[1] if region is not remove]
                regions += [add] if add is not None else []
                regions.sort(key=lambda region: region.address)
                after = tuple(region.address for region in regions), tuple(regions)
                if self._regions is before:  # a finaliser in this thread may have changed them
                    self._regions = after
                    return

    def _release(self, region: Region) -> None:
        """A buffer is freed when the commands that use it have finished; SVM is freed at once."""
        if self.svm:
            self._queues.finish()
        with _opencl.in_words("clSVMFree" if self.svm else "clReleaseMemObject"):
            region.memory.release()

    def _give_up(self, nbytes: int) -> None:
        with self._lock:
            self.live_bytes -= nbytes

    # -- from addresses to OpenCL's objects --------------------------------------------------------

    def _region_at(self, address: int, nbytes: int) -> Region | None:
        """The region that holds these bytes; None if the address is in no region."""
        starts, regions = self._regions
        place = bisect.bisect_right(starts, address) - 1
        if place < 0:
            return None
        region = regions[place]
        left = region.address + region.nbytes - address
        if left <= 0:
            return None
        if not 0 <= nbytes <= left:
            raise SubAllocatorError(f"{nbytes} bytes at {address:#x} reach past the region's end")
        return region

    def locate(self, address: int, nbytes: int = 1) -> tuple[Any, int]:
        """The buffer and the offset of an address. No driver call.

        Parameters
        ----------
        address : int
            Any address of a live region.
        nbytes : int, optional
            How many bytes from there must lie in the region.

        Returns
        -------
        tuple of (pyopencl.Buffer, int)
            The region's buffer, and the offset in bytes.

        Raises
        ------
        SubAllocatorError
            If that is not inside a live region, or with `svm`, where there are no buffers.
        """
        if self.svm:
            raise SubAllocatorError(f"{self!r} has real addresses, and no buffers")
        region = self._region_at(address, nbytes)
        if region is None:
            raise SubAllocatorError(f"{address:#x} lies in no region of {self!r}")
        return region.memory, address - region.address

    def sub_buffer(self, address: int, nbytes: int) -> Any:
        """Make a buffer of some bytes of a live region, for kernels.

        Parameters
        ----------
        address : int
            Any address of a live region with the device's alignment, such as that of any
            allocation.
        nbytes : int
            The size in bytes.

        Returns
        -------
        pyopencl.Buffer
            It keeps the region alive, but not the allocation: if that is freed meanwhile, others
            may write there.

        Raises
        ------
        SubAllocatorError
            If that is not inside a live region, is not aligned, or with `svm`.

        Notes
        -----
        Cost: one driver call, about 200 ns.
        """
        memory, offset = self.locate(address, nbytes)
        try:
            return memory.get_sub_region(offset, nbytes)
        except self._cl.Error as error:
            call = f"clCreateSubBuffer({offset}, {nbytes})"
            raise _opencl.failure(error, call) from error

    def exchange_address(self, address: int) -> tuple[int, int]:
        if self.svm:
            raise BufferError("DLPack has OpenCL memory as a cl_mem, and SVM has none")
        memory, offset = self.locate(address)
        return int(memory.int_ptr), offset

    # -- queues ------------------------------------------------------------------------------------

    def is_ordered(self, stream: int) -> bool:
        self._home.check()
        return self._queues.find(stream).is_ordered

    def stream_id(self, stream: int) -> int:
        self._home.check()
        return self._queues.find(stream).number

    def fence(self, stream: int) -> _queues.MarkerFence | None:
        if not self._home.is_here:
            return None
        queue = self._queues.find(stream)
        with _opencl.in_words(f"clEnqueueMarker on the queue {queue.handle:#x}"):
            event = self._cl.enqueue_marker(queue.queue)
            queue.queue.flush()  # a command that is not submitted never finishes
        return _queues.MarkerFence(self._home, queue, event)

    def order(self, first: int, then: int) -> None:
        self._home.check()
        before, after = self._queues.find(first), self._queues.find(then)
        if before is after and before.is_ordered:
            return
        with _opencl.in_words(f"making queue {after.handle:#x} wait for {before.handle:#x}"):
            event = self._cl.enqueue_marker(before.queue)
            before.queue.flush()  # otherwise the two queues would wait for ever
            self._cl.enqueue_barrier(after.queue, wait_for=[event])

    def synchronize(self) -> None:
        """Wait for all work that was queued on the queues of this sub-allocator."""
        self._home.check()
        self._queues.finish()

    def copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        self._home.check()
        if nbytes == 0:
            return
        target, origin = self._region_at(destination, nbytes), self._region_at(source, nbytes)
        for address, region in ((destination, target), (source, origin)):
            if region is None and address >= MADE_UP:
                raise SubAllocatorError(f"{address:#x} lies in no region of {self!r}")
        if target is None and origin is None:
            raise SubAllocatorError(f"neither {destination:#x} nor {source:#x} is of {self!r}")
        queue = self._queues.find(stream)
        with _opencl.in_words(f"a copy of {nbytes} bytes on the queue {queue.handle:#x}"):
            if not queue.is_ordered:
                self._cl.enqueue_barrier(queue.queue)
            if self.svm:
                self._copy_svm(queue.queue, destination, source, nbytes)
            else:
                self._copy(queue.queue, (target, destination), (origin, source), nbytes)

    def _copy(
        self,
        queue: Any,
        to: tuple[Region | None, int],
        start: tuple[Region | None, int],
        nbytes: int,
    ) -> None:
        (target, destination), (origin, source) = to, start
        copy = self._cl.enqueue_copy
        if target is None and origin is not None:
            offset = source - origin.address
            copy(queue, _host(destination, nbytes), origin.memory, src_offset=offset)
        elif origin is None and target is not None:
            offset = destination - target.address
            copy(queue, target.memory, _host(source, nbytes), dst_offset=offset)
        elif target is not None and origin is not None:
            copy(
                queue,
                target.memory,
                origin.memory,
                byte_count=nbytes,
                src_offset=source - origin.address,
                dst_offset=destination - target.address,
            ).wait()

    def _copy_svm(self, queue: Any, destination: int, source: int, nbytes: int) -> None:
        svm = self._cl.SVM
        to, start = svm(_host(destination, nbytes)), svm(_host(source, nbytes))
        # Not is_blocking: pyopencl would hold the GIL meanwhile.
        self._cl.enqueue_copy(queue, to, start, is_blocking=False).wait()


def _host(address: int, nbytes: int) -> Any:
    """Memory at a real address, as an object that pyopencl accepts."""
    return (ctypes.c_ubyte * nbytes).from_address(address)


def _power_of_two(number: int) -> int:
    """The next power of two, or the number itself."""
    return 1 << max(0, int(number) - 1).bit_length()
