"""A GPU made of integers: addresses that nobody touches, for tests, replays and a laptop."""

from __future__ import annotations

from collections import defaultdict
from typing import SupportsIndex

from bfc.devices import Device
from bfc.errors import SubAllocatorError
from bfc.interpreter._forks import ForkSafeLock
from bfc.streams import StreamLike, stream_handle
from bfc.suballocators.base import SubAllocator
from bfc.units import format_bytes, parse_bytes


class SimulatedFence:
    """The fence of a `SimulatedSubAllocator`: done once `finish` or `wait` was called."""

    def __init__(self, device: SimulatedSubAllocator, stream: int) -> None:
        self._device = device
        self._stream = stream
        self._round = device._rounds[stream]

    def done(self) -> bool:
        return (
            self._stream not in self._device._held
            or self._device._rounds[self._stream] > self._round
        )

    def wait(self) -> None:
        """Call `finish`: nothing else lets a simulated stream finish."""
        if not self.done():
            self._device.finish(self._stream)


class SimulatedSubAllocator(SubAllocator):
    """A GPU made of integers: it hands out rising addresses, and no address is used twice.

    Parameters
    ----------
    capacity : int or str
        How many bytes can be live at once, as a number or a text such as "4 GiB".
    base : int, optional
        The first address.
    alignment : int, optional
        A power of two, in bytes, that addresses are rounded up to.
    gap : int, optional
        Bytes that are left out between two blocks.
    supports_coalescing : bool, optional
        Accept a run of neighbouring blocks in `free`.
    max_bytes : int or str, optional
        Refuse any one call above this.

    Attributes
    ----------
    calls : list of (str, int, int or None)
        The log: "alloc" or "free", the bytes, and the address, which is None for a refusal.
    live : dict of int to int
        The bytes of each live block, by address.
    live_bytes : int
        Their sum.

    Raises
    ------
    ValueError
        If an argument is negative, or `alignment` is not a power of two.

    Examples
    --------
    >>> device = SimulatedSubAllocator("1 GiB")
    >>> device.alloc(256, 4096), device.alloc(256, 2 << 30)
    ((1099511627776, 4096), None)
    >>> device.calls
    [('alloc', 4096, 1099511627776), ('alloc', 2147483648, None)]
    """

    device = Device("simulated")

    def __init__(
        self,
        capacity: SupportsIndex | str,
        *,
        base: int = 1 << 40,
        alignment: int = 2 << 20,
        gap: int = 0,
        supports_coalescing: bool = False,
        max_bytes: SupportsIndex | str | None = None,
    ) -> None:
        self.total_bytes = parse_bytes(capacity)
        self.max_bytes = None if max_bytes is None else parse_bytes(max_bytes)
        if base < 0 or gap < 0 or alignment < 1 or alignment & (alignment - 1):
            raise ValueError("base and gap are at least 0, and alignment is a power of two")
        self.alignment = alignment
        self.gap = gap
        self.supports_coalescing = supports_coalescing
        self.calls: list[tuple[str, int, int | None]] = []
        self.live: dict[int, int] = {}
        self.live_bytes = 0
        self._lock = ForkSafeLock()
        self._next = base
        self._fail_in = 0
        self._held: set[int] = set()
        self._rounds: defaultdict[int, int] = defaultdict(int)

    def __repr__(self) -> str:
        total, live = format_bytes(self.total_bytes), format_bytes(self.live_bytes)
        return f"SimulatedSubAllocator({total}, {live} live)"

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        block = None
        try:
            with self._lock:
                if self._refuses(nbytes):
                    self.calls.append(("alloc", nbytes, None))
                else:
                    block = self._take(alignment, nbytes)
            return block
        except BaseException:
            if block is not None:
                SimulatedSubAllocator.free(self, *block)
            raise

    def _take(self, alignment: int, nbytes: int) -> tuple[int, int]:
        step = max(alignment, self.alignment)
        address = (self._next + step - 1) // step * step
        before = self._next, self.live_bytes
        try:
            self.live[address] = nbytes
            self.live_bytes += nbytes
            self._next = address + nbytes + self.gap
            block = address, nbytes
            self.calls.append(("alloc", nbytes, address))
            return block
        except BaseException:
            self.live.pop(address, None)
            self._next, self.live_bytes = before
            raise

    def _refuses(self, nbytes: int) -> bool:
        if self._fail_in:
            self._fail_in -= 1
            if not self._fail_in:
                return True
        if self.max_bytes is not None and nbytes > self.max_bytes:
            return True
        return self.live_bytes + nbytes > self.total_bytes

    def free(self, address: int, nbytes: int) -> None:
        with self._lock:
            blocks = self._run_of_blocks(address, nbytes)
            left = self.live_bytes - nbytes
            self.calls.append(("free", nbytes, address))
            for block in blocks:
                del self.live[block]
            self.live_bytes = left

    def _run_of_blocks(self, address: int, nbytes: int) -> list[int]:
        """The blocks, end to end, that a range consists of."""
        start, left = address, nbytes
        blocks = []
        while left > 0 and start in self.live and (start == address or self.supports_coalescing):
            blocks.append(start)
            left -= self.live[start]
            start += self.live[start]
        if left or not blocks:
            raise SubAllocatorError(
                f"free({address:#x}, {nbytes}) is not a live block, or a run of live blocks"
            )
        return blocks

    def memory_info(self) -> tuple[int, int]:
        """How much memory is left.

        Returns
        -------
        tuple of (int, int)
            Free and total bytes.
        """
        return max(0, self.total_bytes - self.live_bytes), self.total_bytes

    def fail_at(self, n: int) -> None:
        """Refuse one of the next allocations, however small it is.

        Parameters
        ----------
        n : int
            Which one: 1 is the next. 0 cancels it.

        Raises
        ------
        ValueError
            If `n` is negative.
        """
        if n < 0:
            raise ValueError("fail_at counts from 1; 0 takes it back")
        self._fail_in = n

    @property
    def asynchronous(self) -> bool:  # type: ignore[override]
        """True while a stream is held."""
        return bool(self._held)

    def hold(self, stream: StreamLike) -> None:
        """Leave what is queued on a stream from now on unfinished, until `finish`.

        Parameters
        ----------
        stream : int or stream object
            Which one.
        """
        self._held.add(stream_handle(stream))

    def finish(self, stream: StreamLike) -> None:
        """Let everything queued on a stream finish, and hold it no longer.

        Parameters
        ----------
        stream : int or stream object
            Which one.
        """
        handle = stream_handle(stream)
        self._held.discard(handle)
        self._rounds[handle] += 1

    def fence(self, stream: int) -> SimulatedFence | None:
        return SimulatedFence(self, stream) if stream in self._held else None
