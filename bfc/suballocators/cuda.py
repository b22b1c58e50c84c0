"""Memory of a CUDA device, through the driver."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Literal, SupportsIndex

from bfc.devices import Availability, Device
from bfc.drivers.cuda import _device, calls
from bfc.errors import DeviceUnavailableError, DriverError, SubAllocatorError
from bfc.interpreter._process import ForkSafeLock
from bfc.suballocators._cuda_pages import CUDAPages
from bfc.suballocators.base import SubAllocator
from bfc.units import as_int, format_bytes

Kind = Literal["device", "managed", "pinned", "async"]
HandleType = Literal["none", "posix", "fabric"]

MIB = 1 << 20
COMPUTE_CAPABILITY_MAJOR = 75  # numbers of CUdevice_attribute
CONCURRENT_MANAGED_ACCESS = 89

#: How much memory TensorFlow leaves to the driver and others, by compute capability (TensorFlow's
#: behaviour, 2.19).
RESERVE_BELOW_2_GIB = 225 * MIB
RESERVES = {7: 1050 * MIB, 8: 1536 * MIB}
OLDEST_RESERVE, NEWEST_RESERVE = 500 * MIB, 1800 * MIB
#: TensorFlow's upper limit for a pool of pinned memory.
PINNED_LIMIT = 128 << 30


class CUDASubAllocator(SubAllocator):
    """Memory of one CUDA device, in the primary context.

    CuPy, numba, PyTorch and the runtime API use that context too: an address is valid in all of
    them.

    Parameters
    ----------
    device : int, optional
        The device's ordinal.
    kind : {"device", "managed", "pinned", "async"}, optional
        Memory of the device (cuMemAlloc), managed memory (cuMemAllocManaged), host memory that the
        device reaches (cuMemHostAlloc), or memory of the device's current pool (cuMemAllocAsync).
    handle_type : {"none", "posix", "fabric"}, optional
        What other processes may get to share pages (`create`): nothing, a file descriptor, or a
        handle for other machines too. A device without fabric handles gives descriptors;
        `handle_type` then says so.
    peers : iterable of int, optional
        Further devices that get access to mapped memory. `enable_peer` adds one later.

    Raises
    ------
    DeviceUnavailableError
        If there is no driver, no such device or no such memory, or cuda-bindings (12.9 or 13) is
        not installed: `pip install 'bfc-allocator[cuda]'`.
    DriverError
        If the driver fails, now or in a later call.
    ValueError
        If `kind` is not one of the four, `handle_type` is not one of the three, or the device has
        no such handles.
    SubAllocatorError
        If a peer cannot access the device's memory.

    Notes
    -----
    The driver is loaded and the context retained here, not at import. The context is released with
    the last reference to it.

    In a forked child, and after a reset of the context (`cudaDeviceReset`, numba's `cuda.close()`),
    the memory is gone: freeing and closing do nothing then, and all other driver calls raise
    DriverError. An allocation that finds a free chunk makes no driver call, and does not notice.

    Memory of the kind "device" can be mapped, too (`supports_virtual_memory`), if the device and
    its driver can. To the driver each page of such memory is a buffer of its own:
    cudaIpcGetMemHandle fails, and registration for RDMA covers only the first page. Access by
    cudaDeviceEnablePeerAccess does not cover it; `peers` do. If RDMA is possible with mapped memory
    on the device, pages are made for it.

    Examples
    --------
    >>> import bfc
    >>> if bfc.cuda.is_available():
    ...     allocator = bfc.BFCAllocator(bfc.CUDASubAllocator(), memory_limit="1 GiB")
    """

    supports_coalescing = False  # the driver takes back what it gave, block by block
    asynchronous = True
    default_stream_alias = 1
    streams_are_handles = True
    thread_streams = frozenset({2})

    def __init__(
        self,
        device: SupportsIndex = 0,
        *,
        kind: Kind = "device",
        handle_type: HandleType = "none",
        peers: Iterable[SupportsIndex] = (),
    ) -> None:
        ordinal = as_int(device)
        if handle_type not in _device.HANDLE_TYPES:
            names = ", ".join(map(repr, _device.HANDLE_TYPES))
            raise ValueError(f"handle_type is one of {names}, not {handle_type!r}")
        self._memory = _device.DeviceMemory(ordinal, kind)
        self.kind = kind
        self.device = Device(
            {"managed": "cuda_managed", "pinned": "cuda_host"}.get(kind, "cuda"), ordinal
        )
        self.stream_ordered = kind != "pinned"
        self.total_bytes = _physical_memory() if kind == "pinned" else int(self._memory.total_bytes)
        self.native = self._memory.native()
        self._host_accessible = kind == "pinned" or (
            kind == "managed" and bool(self._memory.attribute(CONCURRENT_MANAGED_ACCESS))
        )
        self._handle_type = handle_type
        self._maps: Availability | None = None
        self._own_pages: CUDAPages | None = None
        self._opening = ForkSafeLock()
        if handle_type != "none":
            self._pages  # noqa: B018  # this finds out whether the device has such handles
        for peer in peers:
            self.enable_peer(peer)

    def __repr__(self) -> str:
        live, total = format_bytes(self.live_bytes), format_bytes(self.total_bytes)
        kind = "" if self.kind == "device" else f", {self.kind}"
        return f"CUDASubAllocator({self.device.ordinal}{kind}: {total}, {live} live)"

    @property
    def _fences_are_native(self) -> bool:  # type: ignore[override]
        return getattr(self.fence, "__func__", None) is CUDASubAllocator.fence

    @property
    def live_bytes(self) -> int:
        """The bytes that were allocated and not freed, including pages."""
        pages = self._own_pages
        return self._memory.live_bytes + (pages.books.page_bytes if pages is not None else 0)

    @property
    def name(self) -> str:
        """The driver's name for the device."""
        return self._memory.name

    @property
    def host_accessible(self) -> bool:
        return self._host_accessible

    def memory_info(self) -> tuple[int, int]:
        """How much memory the device has now, counting all processes on it. One driver call.

        Returns
        -------
        tuple of (int, int)
            Free and total bytes.
        """
        return self._memory.memory_info()

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        return self._memory.alloc(alignment, nbytes)

    def free(self, address: int, nbytes: int) -> None:
        self._memory.free(address, nbytes)

    def free_idle(self, address: int, nbytes: int) -> None:
        self._memory.free(address, nbytes, True)

    def alloc_registered(
        self, alignment: int, nbytes: int, threads: int = 1
    ) -> tuple[int, int] | None:
        """Give a pinned block as `alloc` does, but with cuMemHostRegister. `free` takes it back.

        Parameters
        ----------
        alignment : int
            As in `alloc`.
        nbytes : int
            As in `alloc`.
        threads : int, optional
            How many threads touch the pages before they are pinned.

        Returns
        -------
        tuple of (int, int), or None
            As from `alloc`.

        Raises
        ------
        ValueError
            If this sub-allocator is not of the kind "pinned".
        """
        if self.kind != "pinned":
            raise ValueError(f"only pinned memory is registered: {self!r} is of another kind")
        return self._memory.alloc_registered(alignment, nbytes, threads)

    def fence(self, stream: int) -> _device.EventFence | None:
        return self._memory.fence(stream)

    def order(self, first: int, then: int) -> None:
        self._memory.order(first, then)

    def wait(self, stream: int) -> None:
        """Wait for one stream of this device, whichever device is current: cuStreamSynchronize.

        Parameters
        ----------
        stream : int
            A handle. 0 is the default stream.

        Raises
        ------
        DriverError
            If the wait fails, or the stream is being captured.
        """
        self._memory.wait(stream)

    def stream_id(self, stream: int) -> int:
        return self._memory.stream_id(stream)

    def check_stream(self, stream: int) -> None:
        if stream > calls.PER_THREAD and not calls.belongs(
            stream, calls.device(self.device.ordinal)
        ):
            raise ValueError(
                f"stream {stream:#x} belongs to another device than {self.device}, where this "
                "memory is: capture with an allocator of its own device"
            )

    def capture_id(self, stream: int) -> int:
        if stream <= calls.LEGACY:
            return 0  # the default stream cannot capture, and may not be asked while others do
        if stream > calls.PER_THREAD and not self._memory.is_capturing(stream):
            return 0
        status, number, *_graph = calls.call("cuStreamGetCaptureInfo", stream)
        return int(number) or 1 if int(status) else 0

    def capture_terminals(self, stream: int) -> tuple[int, ...]:
        if stream <= calls.LEGACY:
            return ()
        _status, _number, _graph, nodes, *_edges, count = calls.call(
            "cuStreamGetCaptureInfo", stream
        )
        return tuple(int(node) for node in (nodes or ())[:count])

    def capture_dependencies(self, node: int) -> tuple[int, ...]:
        *_none, count = calls.call("cuGraphNodeGetDependencies", node, 0)
        if not count:
            return ()
        nodes, *_edges = calls.call("cuGraphNodeGetDependencies", node, count)
        return tuple(int(node) for node in nodes[:count])

    def copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        self._memory.copy(destination, source, nbytes, stream)

    def _fill(self, address: int, nbytes: int, byte: int) -> None:
        """Fills memory of this device with a byte, and waits until that is done."""
        self._memory.fill(address, nbytes, byte, self._copy_stream())

    def _copy_stream(self) -> int:
        """A stream for copies that no other work waits for, and that wait for none."""
        return self._memory.copy_stream()

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        self._memory.synchronize()

    # -- memory that is mapped --------------------------------------------------------------------

    @property
    def supports_virtual_memory(self) -> Availability:  # type: ignore[override]
        """Whether memory of this kind, device and driver can be mapped. Printed, it says why.

        The first call asks the driver.
        """
        if self._maps is None:
            if self.kind != "device":
                return Availability(
                    False, f'only memory of the kind "device" is mapped, not "{self.kind}"'
                )
            try:
                why_not = _device.why_not(self.device.ordinal)
            except (DeviceUnavailableError, DriverError) as error:
                return Availability(False, str(error))
            self._maps = Availability(
                not why_not, why_not or f"device {self.device.ordinal} and its driver map memory"
            )
        return self._maps

    @property
    def mapping_granularity(self) -> int:  # type: ignore[override]
        """As the driver says: 2 MiB on most devices. 0 if memory cannot be mapped."""
        return self._pages.books.granularity if self.supports_virtual_memory else 0

    @property
    def handle_type(self) -> HandleType:
        """What other processes may get to share pages: "none", "posix" or "fabric".

        "fabric" becomes "posix" if the device gives no fabric handles, perhaps only with the first
        page.
        """
        pages = self._own_pages
        return self._handle_type if pages is None else pages.driver.handle_type

    @property
    def _pages(self) -> CUDAPages:
        if self._own_pages is None:
            if not self.supports_virtual_memory:
                self._refuse_to_map()
            with self._opening:
                if self._own_pages is None:  # another thread may have been faster
                    self._own_pages = CUDAPages(self._memory, self._handle_type)
        return self._own_pages

    @property
    def native_mapping(self) -> object | None:  # type: ignore[override]
        """The driver's calls; None if memory cannot be mapped."""
        return self._pages.native() if self.supports_virtual_memory else None

    def _leave_free(self, nbytes: int) -> None:
        """From now on memory is mapped only where that leaves the device so many bytes free."""
        if self.supports_virtual_memory:
            self._pages.driver.leave_free(nbytes)

    @property
    def peers(self) -> tuple[int, ...]:
        """The other devices that have access to mapped memory, in order."""
        return () if self._own_pages is None else self._own_pages.peers

    def enable_peer(self, device: SupportsIndex) -> None:
        """Give another device access to all mapped memory: what is mapped now, and later.

        One driver call for each run of mapped addresses. If one fails, access is taken back. To
        enable a device again does nothing.

        Parameters
        ----------
        device : int
            Its ordinal.

        Raises
        ------
        SubAllocatorError
            If this sub-allocator maps no memory, or the device cannot reach it.
        DriverError
            If the driver fails.
        """
        pages, peer = self._pages, as_int(device)
        if peer != self.device.ordinal and not _device.can_access(self.device.ordinal, peer):
            raise SubAllocatorError(
                f"device {peer} cannot access memory of device {self.device.ordinal}: "
                "`nvidia-smi topo -m` shows which devices reach each other"
            )
        pages.enable_peer(peer)

    def allocation_limit(self) -> int:
        """What TensorFlow takes by default: the memory that is free now, minus a reserve.

        Returns
        -------
        int
            In bytes. The reserve, for the driver and others, is 225 MiB if less than 2 GiB are
            free, otherwise 500 MiB up to compute capability 6, 1050 for 7, 1536 for 8, and 1800
            from 9 on; if the free memory is below the reserve, there is none. For pinned memory it
            is half of the machine's memory, and at most 128 GiB.
        """
        if self.kind == "pinned":
            return min(PINNED_LIMIT, self.total_bytes // 2)
        free, _total = self.memory_info()
        reserve = self._reserve(free)
        return free - reserve if reserve < free else free

    def _reserve(self, free: int) -> int:
        if free < 2 << 30:
            return RESERVE_BELOW_2_GIB
        major = self._memory.attribute(COMPUTE_CAPABILITY_MAJOR)
        return RESERVES.get(major, OLDEST_RESERVE if major < 7 else NEWEST_RESERVE)


def _physical_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
