"""Memory for a framework's OpenCL back end: a pool for each device."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, SupportsIndex

from bfc.allocators._allocator import Allocator
from bfc.buffers._scopes import current_stream
from bfc.devices import Device
from bfc.drivers.opencl import platform as _opencl
from bfc.drivers.opencl import queues as _queues
from bfc.errors import (
    ClosedError,
    DeviceUnavailableError,
    InvalidPointerError,
    SubAllocatorError,
)
from bfc.interpreter._process import ForkSafeLock
from bfc.policies._bfc import BFCAllocator
from bfc.policies._caching import CachingAllocator
from bfc.pytorch.rules import NEWEST, rules_of
from bfc.streams import StreamLike, stream_handle
from bfc.suballocators.opencl import OpenCLSubAllocator

Policy = Literal["caching", "bfc"]
_POLICIES: dict[str, Callable[..., Allocator]] = {"caching": CachingAllocator, "bfc": BFCAllocator}


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """The figures of one device. Sizes are those of whole blocks, after rounding.

    Attributes
    ----------
    current_bytes : int
        The bytes that are allocated. Never reset.
    peak_bytes : int
        The most since `reset_peak_stats`.
    reserved_bytes : int
        The bytes that were taken from the driver. Never reset.
    peak_reserved_bytes : int
        The most since `reset_peak_stats`.
    allocations : int
        Since `reset_accumulated_stats`, as are those below.
    frees : int
        How many.
    failures : int
        The allocations that found no memory, or that the driver failed.
    allocated_bytes : int
        The bytes of all allocations.
    freed_bytes : int
        The bytes of all frees.
    """

    current_bytes: int = 0
    peak_bytes: int = 0
    reserved_bytes: int = 0  # taken from the driver
    peak_reserved_bytes: int = 0
    allocations: int = 0
    frees: int = 0
    failures: int = 0  # allocations that found no memory, or that the driver failed
    allocated_bytes: int = 0
    freed_bytes: int = 0


class _Handle(NamedTuple):
    """What is kept of a handle that is live."""

    place: _Place
    block_bytes: int
    stream: StreamLike


class _Place:
    """One device: its pool, made when it is first asked for, and its counts."""

    def __init__(self, ordinal: int, context: Any) -> None:
        self.ordinal = ordinal
        self.context = context  # None: the shared one of the device
        self.pool: Allocator | None = None
        self.lock = ForkSafeLock()  # a finaliser may free a handle inside any call below
        self.current_bytes = self.peak_bytes = 0
        self.clear_counts()

    def clear_counts(self) -> None:
        self.allocations = self.frees = self.failures = 0
        self.allocated_bytes = self.freed_bytes = 0

    def count_allocation(self, nbytes: int) -> None:
        with self.lock:
            self.allocations += 1
            self.allocated_bytes += nbytes
            self.current_bytes += nbytes
            if self.current_bytes > self.peak_bytes:  # not max(): a finaliser could run in a call
                self.peak_bytes = self.current_bytes

    def count_free(self, nbytes: int) -> None:
        with self.lock:
            self.frees += 1
            self.freed_bytes += nbytes
            self.current_bytes -= nbytes

    def count_failure(self) -> None:
        with self.lock:
            self.failures += 1

    def stats(self) -> DeviceStats:
        pool = None if self.pool is None or self.pool.closed else self.pool.stats()
        with self.lock:
            return DeviceStats(
                self.current_bytes,
                self.peak_bytes,
                0 if pool is None else pool.pool_bytes,
                0 if pool is None else pool.peak_pool_bytes,
                self.allocations,
                self.frees,
                self.failures,
                self.allocated_bytes,
                self.freed_bytes,
            )


class DeviceAllocator:
    """An allocator for the OpenCL back end of a framework, with one pool for each device.

    Its methods are those of PyTorch's `c10::Allocator` and `c10::DeviceAllocator`. A pool is made
    when its device is first used. A handle is an int that knows its device: `mem` makes an OpenCL
    object of it, `locate` its buffer and byte offset. 0 is the empty handle.

    Parameters
    ----------
    policy : {"caching", "bfc"}, optional
        PyTorch's policy, or TensorFlow's.
    settings : str, optional
        The settings of PyTorch's policy.
    torch : str, optional
        The version of PyTorch whose rules that policy follows, as in `bfc.CachingAllocator`. None
        is the newest that bfc has.
    svm : bool, optional
        Use shared virtual memory.
    devices : sequence of pyopencl.Device or pyopencl.Context, optional
        None is every device that there is.
    profiling : bool, optional
        Let the pools' own queues note when each command starts and ends.
    **options : object
        Other arguments of `bfc.CachingAllocator` or `bfc.BFCAllocator`, the same for each device.

    Attributes
    ----------
    policy : str
        As given.
    torch : str or None
        The version; None under TensorFlow's policy.

    Raises
    ------
    ValueError
        If `policy` is neither of the two, `settings` or `torch` are given to "bfc", or bfc does not
        have the rules of the version `torch`.
    TypeError
        If `torch` is not a str, or `devices` is not a sequence of devices or contexts.

    Notes
    -----
    Any thread may use it. Source: `c10/core/Allocator.h` and `c10/core/CachingDeviceAllocator.h` of
    PyTorch 2.11.

    Examples
    --------
    >>> import bfc
    >>> if bfc.opencl.is_available():
    ...     with bfc.opencl.DeviceAllocator("bfc", memory_limit="64 MiB") as memory:
    ...         handle = memory.allocate(1000)
    ...         assert memory.device_stats().current_bytes == 1024
    ...         memory.raw_delete(handle)
    """

    def __init__(
        self,
        policy: Policy = "caching",
        *,
        settings: str = "",
        torch: str | None = None,
        svm: bool = False,
        devices: Sequence[Any] | None = None,
        profiling: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(policy, str) or policy not in _POLICIES:
            raise ValueError(f"policy is 'caching' or 'bfc', not {policy!r}")
        if (settings or torch is not None) and policy != "caching":
            raise ValueError("settings and torch are PyTorch's: they need policy='caching'")
        if settings:
            options["settings"] = settings
        if policy == "caching":
            torch = options["torch"] = rules_of(NEWEST if torch is None else torch).version
        self.policy = policy
        self.torch = torch
        self._svm = svm
        self._profiling = profiling
        self._options = options
        self._given = None if devices is None else _contexts_of(devices)
        self._places: list[_Place] | None = None
        self._live: dict[int, _Handle] = {}
        self._lock = ForkSafeLock()
        self._closed = False
        self._deleter = self.raw_delete

    def __repr__(self) -> str:
        opened = [place for place in self._places or () if place.pool is not None]
        return f"<bfc.opencl.DeviceAllocator, {self.policy}, {len(opened)} device(s) in use>"

    # -- devices -----------------------------------------------------------------------------------

    def device_count(self) -> int:
        """How many devices it can allocate on.

        Returns
        -------
        int
            0 if OpenCL is not available.
        """
        return len(self._known())

    def initialized(self) -> bool:
        """Whether it can be used. Opens no device.

        Returns
        -------
        bool
            True if there is a device, and it was not closed.
        """
        return not self._closed and self.device_count() > 0

    def allocator(self, device: SupportsIndex = 0) -> Allocator:
        """The pool of a device, for snapshots, traces and all else that bfc has.

        Parameters
        ----------
        device : int, optional
            The number of the device.

        Returns
        -------
        Allocator
            A `CachingAllocator` or a `BFCAllocator`.

        Raises
        ------
        DeviceUnavailableError
            If there is no such device.
        ClosedError
            If it was closed.
        """
        return self._pool_of(self._at(device))

    def _known(self) -> list[_Place]:
        if self._places is not None:
            return self._places
        with self._lock:
            if self._places is None:
                contexts = [None] * _opencl.device_count() if self._given is None else self._given
                if not contexts:
                    return []
                self._places = [_Place(i, context) for i, context in enumerate(contexts)]
            return self._places

    def _at(self, device: SupportsIndex) -> _Place:
        places, ordinal = self._known(), operator.index(device)
        if not 0 <= ordinal < len(places):
            why = "" if places else f" ({_opencl.availability()[1]})"
            raise DeviceUnavailableError(
                f"there is no device {ordinal}: this allocator has {len(places)}, counted from 0"
                f"{why}"
            )
        return places[ordinal]

    def _pool_of(self, place: _Place) -> Allocator:
        if place.pool is None:
            with self._lock:
                if self._closed:
                    raise ClosedError("this allocator is closed")
                if place.pool is None:
                    source = OpenCLSubAllocator(
                        place.context,
                        svm=self._svm,
                        index=place.ordinal,
                        profiling=self._profiling,
                    )
                    source.device = Device("opencl", place.ordinal)
                    place.pool = _POLICIES[self.policy](source, **self._options)
        return place.pool

    # -- c10::Allocator ----------------------------------------------------------------------------

    def allocate(
        self, nbytes: SupportsIndex, device: SupportsIndex = 0, stream: StreamLike | None = None
    ) -> int:
        """Allocate bytes on a device.

        Parameters
        ----------
        nbytes : int
            The size in bytes.
        device : int, optional
            The number of the device.
        stream : pyopencl.CommandQueue or int, optional
            The queue that uses the memory first. If it runs its work in any order, the memory is
            reused only when all that was queued there at the free has finished. None is that of
            `bfc.use_stream`, or else the pool's own queue.

        Returns
        -------
        int
            A handle; 0 for 0 bytes, which counts as no allocation.

        Raises
        ------
        DeviceUnavailableError
            If there is no such device.
        OutOfMemoryError
            If there is no memory.
        TypeError
            If an argument has the wrong type.
        ValueError
            If `nbytes` is negative or above 2**63 - 1.
        SubAllocatorError
            If the device failed, or `stream` is not a queue of this device's context.
        ClosedError
            If it was closed.

        Notes
        -----
        Cost: as `Allocator.allocate_raw`, and about 1.2 us.
        """
        place = self._at(device)
        try:
            pool = self._pool_of(place)
            if stream is None:
                stream = current_stream()
            if stream is None:
                stream = pool.stream or 0
            handle = pool.allocate_raw(nbytes, stream)
        except (MemoryError, SubAllocatorError) as error:
            if not isinstance(error, _queues.WrongQueueError):
                place.count_failure()
            raise
        if handle:
            block_bytes = pool.allocated_size(handle)
            self._live[handle] = _Handle(place, block_bytes, stream)
            place.count_allocation(block_bytes)
        return handle

    def raw_deleter(self) -> Callable[[int], None]:
        """The function that frees a handle: `raw_delete`.

        Returns
        -------
        callable
            The same object each time.
        """
        return self._deleter

    def raw_delete(self, handle: int) -> None:
        """Free a handle.

        Parameters
        ----------
        handle : int
            A live handle. 0 does nothing.

        Raises
        ------
        InvalidPointerError
            If it is not a live handle of this allocator.
        SubAllocatorError
            If another queue has used the memory, and the device fails when it is asked about it.
            The handle stays live.

        Notes
        -----
        While the interpreter finalises, it does nothing.
        """
        if handle == 0 or sys.is_finalizing():
            return
        known = self._live.pop(handle, None)
        if known is None:
            raise InvalidPointerError(
                f"{handle!r} is not a live handle of this allocator: it was freed already, or is "
                f"another's"
            )
        pool = known.place.pool
        assert pool is not None
        try:
            pool.deallocate_raw(handle)
        except BaseException:
            self._live[handle] = known
            raise
        known.place.count_free(known.block_bytes)

    def copy_data(self, destination: int, source: int, nbytes: SupportsIndex) -> None:
        """Copy bytes between two handles of one device, and wait until that is done.

        The copy comes after what is queued on the queues that they were allocated for.

        Parameters
        ----------
        destination : int
            A live handle, or 0.
        source : int
            A live handle, or 0.
        nbytes : int
            How many bytes; 0 does nothing.

        Raises
        ------
        InvalidPointerError
            If a handle is not live.
        ValueError
            If the handles are on two devices, or one of them has fewer bytes.
        DriverError
            If OpenCL fails.
        """
        count = operator.index(nbytes)
        to, start = (None if it == 0 else self._find(it) for it in (destination, source))
        if to is None or start is None:
            if count:
                raise ValueError(f"{count} bytes cannot be copied: the handle 0 has none")
            return
        if to.place is not start.place:
            raise ValueError(
                f"the handles are of devices {to.place.ordinal} and {start.place.ordinal}: "
                f"copy_data stays on one"
            )
        pool = to.place.pool
        assert pool is not None
        least = min(pool.requested_size(handle) for handle in (destination, source))
        if not 0 <= count <= least:
            raise ValueError(f"{count} bytes cannot be copied: the handles have {least}")
        if destination == source or count == 0:
            return
        device = pool.sub_allocator
        before, after = stream_handle(start.stream), stream_handle(to.stream)
        device.order(before, after)
        device.copy(destination, source, count, after)

    # -- c10::DeviceAllocator ----------------------------------------------------------------------

    def empty_cache(self, device: SupportsIndex | None = None) -> int:
        """Give memory that nothing uses back to the driver.

        Parameters
        ----------
        device : int, optional
            The number of the device; None is all of them.

        Returns
        -------
        int
            The bytes given back.
        """
        places = self._known() if device is None else [self._at(device)]
        return sum(place.pool.empty_cache() for place in places if place.pool is not None)

    def record_stream(self, handle: int, stream: StreamLike) -> None:
        """Tell the allocator that another queue uses this memory.

        Once freed, the memory is not reused before the work that was queued there at the time of
        the free has finished.

        Parameters
        ----------
        handle : int
            A live handle. 0 does nothing.
        stream : pyopencl.CommandQueue or int
            The other queue. The queue that it was allocated for is ignored, if that is in order.

        Raises
        ------
        InvalidPointerError
            If it is not a live handle of this allocator.
        """
        if handle != 0:
            pool = self._find(handle).place.pool
            assert pool is not None
            pool.record_stream(handle, stream)

    def device_stats(self, device: SupportsIndex = 0) -> DeviceStats:
        """The figures of a device.

        Parameters
        ----------
        device : int, optional
            The number of the device.

        Returns
        -------
        DeviceStats
            All 0 if it was not used yet.
        """
        return self._at(device).stats()

    def reset_accumulated_stats(self, device: SupportsIndex = 0) -> None:
        """Restart the counts of allocations, frees and failures, and their bytes, from 0.

        Parameters
        ----------
        device : int, optional
            The number of the device.
        """
        place = self._at(device)
        with place.lock:
            place.clear_counts()
        if place.pool is not None:
            place.pool.reset_accumulated_stats()

    def reset_peak_stats(self, device: SupportsIndex = 0) -> None:
        """Restart the peaks from what is current.

        Parameters
        ----------
        device : int, optional
            The number of the device.
        """
        place = self._at(device)
        with place.lock:
            place.peak_bytes = place.current_bytes
        if place.pool is not None:
            place.pool.reset_peak_stats()

    def memory_info(self, device: SupportsIndex = 0) -> tuple[int, int]:
        """How much memory a device has, as far as this allocator knows.

        Parameters
        ----------
        device : int, optional
            The number of the device.

        Returns
        -------
        tuple of (int, int)
            Free and total bytes.
        """
        return self.allocator(device).sub_allocator.memory_info()

    # -- OpenCL's objects --------------------------------------------------------------------------

    def device_of(self, handle: int) -> int:
        """The number of the device that a handle is on.

        Parameters
        ----------
        handle : int
            A live handle.

        Returns
        -------
        int
            From 0.

        Raises
        ------
        InvalidPointerError
            If it is not a live handle of this allocator.
        """
        return self._find(handle).place.ordinal

    def locate(self, handle: int) -> tuple[Any, int]:
        """The buffer that holds a handle's memory. No driver call.

        Parameters
        ----------
        handle : int
            A live handle.

        Returns
        -------
        tuple of (pyopencl.Buffer, int)
            The buffer, and the offset in bytes.

        Raises
        ------
        InvalidPointerError
            If it is not a live handle of this allocator.
        SubAllocatorError
            If `svm` is on: handles are addresses then.
        """
        return self._source(handle).locate(handle)

    def mem(self, handle: int) -> Any:
        """Make a buffer of just a handle's memory, for kernels. One driver call.

        Parameters
        ----------
        handle : int
            A live handle.

        Returns
        -------
        pyopencl.Buffer
            It does not keep the handle from being freed.

        Raises
        ------
        InvalidPointerError
            If it is not a live handle of this allocator.
        SubAllocatorError
            If `svm` is on: handles are addresses then.
        """
        pool = self._find(handle).place.pool
        assert pool is not None
        return self._source(handle).sub_buffer(handle, pool.requested_size(handle))

    def _source(self, handle: int) -> OpenCLSubAllocator:
        source = self.allocator(self._find(handle).place.ordinal).sub_allocator
        assert isinstance(source, OpenCLSubAllocator)
        return source

    def _find(self, handle: int) -> _Handle:
        known = self._live.get(handle)
        if known is None:
            raise InvalidPointerError(f"{handle!r} is not a live handle of this allocator")
        return known

    def close(self) -> None:
        """Give everything back, with live handles or without. Closing twice does nothing.

        Raises
        ------
        BufferError
            If the memory of a device is in use elsewhere. That device stays open.
        SubAllocatorError
            If a device fails. All are closed first, and the first error is raised; closing again
            tries that device again.
        """
        faults = []
        with self._lock:
            self._closed = True
            for place in self._places or ():
                try:
                    if place.pool is not None:
                        place.pool.close()
                except Exception as error:
                    faults.append(error)
                if place.pool is None or place.pool.closed:
                    self._forget(place)
        if faults:
            raise faults[0]

    def _forget(self, closed: _Place) -> None:
        for handle, known in list(self._live.items()):
            if known.place is closed:
                self._live.pop(handle, None)
        with closed.lock:
            closed.current_bytes = 0

    def __enter__(self) -> DeviceAllocator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _contexts_of(devices: Sequence[Any]) -> list[Any]:
    try:
        each = iter(devices)
    except TypeError:
        raise TypeError(
            "devices are a list of pyopencl.Device or Context objects, not one "
            f"{type(devices).__name__}"
        ) from None
    return [_context_of(device) for device in each]


def _context_of(device: Any) -> Any:
    cl = _opencl.load()
    if isinstance(device, cl.Context):
        return device
    if not isinstance(device, cl.Device):
        raise TypeError(f"a device is a pyopencl.Device or Context, not {type(device).__name__}")
    with _opencl.in_words("clCreateContext"):
        return cl.Context([device])
