"""A policy written in Python: the class to derive from, and its replay.

It stands beside what compares policies, since it is for experiments, and above traces. So
`Trace.replay` does not import it: it takes the replay that an object brings as `_run`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self, SupportsIndex

from bfc.errors import ClosedError, PolicyError, SubAllocatorError
from bfc.libraries import NDArray, np
from bfc.snapshots.snapshot import OwnerBytes, Snapshot, Stats
from bfc.suballocators.base import SubAllocator, resolve_limit
from bfc.trace.timeline import sampled
from bfc.trace.trace import ALLOCATE, FREE
from bfc.units import as_int, parse_bytes
from bfc_tools.study.ground import Block, Ground

#: Regions begin at multiples of this, as those of the compiled policies.
ALIGNMENT = 256
#: How often a replay calls `progress`.
EVENTS_BETWEEN_REPORTS = 4096


class PythonPolicy(ABC):
    """A policy of your own, to be replayed beside the compiled ones.

    Write `allocate` and `free`, and `release` if the policy keeps memory that it could give back.
    They call `take` and `give_back` to get regions from the device and to return them.
    `Trace.replay` and `bfc.study.compare` take such a policy where they take an allocator, and
    return the same types; `bfc replay` and `bfc report` take it as `--policy module:Class`.

    Parameters
    ----------
    sub_allocator : SubAllocator
        Where regions come from.
    memory_limit : int, str or float, optional
        The most that the policy may take: bytes, or a fraction of the device as a float. The
        default is all that the device has.

    Attributes
    ----------
    sub_allocator : SubAllocator
        As given.
    memory_limit : int
        The most that the policy may take, in bytes.

    Notes
    -----
    What the policy answers is checked: a block has at least the bytes that were asked for, lies in
    a region and overlaps no other block, and a region that goes back has nothing in use in it. A
    broken rule, or an error that the policy raises, is a `PolicyError` that names the event. The
    policy is closed then.

    An own `__init__` calls `super().__init__(sub_allocator)` first. Close the policy, or use it in
    a `with` block: its regions do not go back by themselves.

    Cost: a few microseconds for each event, and the time of the policy itself. One thread at a
    time.

    Examples
    --------
    >>> import bfc
    >>> from bfc.study import PythonPolicy
    >>> class OneRegionEach(PythonPolicy):
    ...     def allocate(self, size, stream):
    ...         region = self.take(size)
    ...         return None if region is None else region[0]
    ...     def free(self, address):
    ...         self.give_back(address)
    >>> trace = bfc.Trace(op=[0, 0, 1], id=[0, 1, 0], size=[3 << 20, 1 << 20, 0])
    >>> with OneRegionEach(bfc.SimulatedSubAllocator("1 GiB")) as policy:
    ...     result = trace.replay(policy)
    >>> result.peak_bytes_reserved >> 20, result.failed
    (4, 0)
    """

    _run: ClassVar[Callable[..., PythonRun]]

    def __init__(
        self,
        sub_allocator: SubAllocator,
        *,
        memory_limit: SupportsIndex | str | float | None = None,
    ) -> None:
        self.sub_allocator = sub_allocator
        self.memory_limit = resolve_limit(memory_limit, sub_allocator)
        self._ground = Ground(sub_allocator.supports_coalescing)
        self._calls = self._allocations = self._largest = 0
        self._peak_in_use = self._peak_reserved = 0
        self._is_closed = False
        # What is being done, for errors: the event, and the call of the policy.
        self._event, self._doing = -1, ""

    # What a policy of your own defines

    @abstractmethod
    def allocate(self, size: int, stream: int) -> int | tuple[int, int] | None:
        """Find a block.

        Parameters
        ----------
        size : int
            The bytes that are asked for, at least 1.
        stream : int
            The number of the stream in the trace.

        Returns
        -------
        int, tuple of (int, int), or None
            The address; or the address and the bytes of the block, if it is larger than `size`,
            so that these count as in use; or None to refuse the request.
        """

    @abstractmethod
    def free(self, address: int) -> None:
        """Take a block back.

        Parameters
        ----------
        address : int
            As `allocate` has returned it.
        """

    def release(self) -> None:
        """Give back what is cached, as `torch.cuda.empty_cache()` does; by default nothing."""
        return

    # What a policy calls

    def take(self, nbytes: SupportsIndex | str) -> tuple[int, int] | None:
        """Take a region from the device. To be called by the policy.

        Parameters
        ----------
        nbytes : int or str
            Its size in bytes, at least 1.

        Returns
        -------
        tuple of (int, int), or None
            The address, a multiple of 256, and the bytes; None if the device refuses, or if the
            region would exceed `memory_limit`.

        Raises
        ------
        ClosedError
            If the policy is closed.
        PolicyError
            If `nbytes` is 0.
        """
        self._check_open()
        wanted = parse_bytes(nbytes)
        if not wanted:
            raise self._error("take(0)", "a region has at least 1 byte")
        if self._ground.reserved + wanted > self.memory_limit:
            return None
        self._calls += 1
        region = self.sub_allocator.alloc(max(ALIGNMENT, self.sub_allocator.granularity), wanted)
        if region is None:
            return None
        self._ground.add_region(*region)
        self._peak_reserved = max(self._peak_reserved, self._ground.reserved)
        return region

    def give_back(self, address: int) -> None:
        """Give a region back to the device. To be called by the policy.

        Parameters
        ----------
        address : int
            The first of a region, as `take` returned it.

        Raises
        ------
        ClosedError
            If the policy is closed.
        PolicyError
            If no region begins there, or a block in it is in use. Nothing has changed then.
        """
        self._check_open()
        fault = self._ground.fault_in_giving_back(address)
        if fault:
            raise self._error(f"give_back({_shown(address)})", fault)
        self._calls += 1
        self.sub_allocator.free(address, self._ground.remove_region(address))

    @property
    def regions(self) -> Mapping[int, int]:
        """The bytes of each region that the policy has, by address. It cannot be changed."""
        return MappingProxyType(self._ground.regions)

    # What an allocator has, too

    def stats(self) -> Stats:
        """The figures of this moment, as those of an allocator.

        Returns
        -------
        Stats
            `largest_free_block_bytes` is the longest range of a region without blocks in use,
            whatever pieces the policy has it in.
        """
        ground = self._ground
        owners: dict[str, int] = OwnerBytes()
        for block in ground.blocks.values():
            owners[block.owner] += block.nbytes
        return Stats(
            num_allocs=self._allocations,
            bytes_in_use=ground.in_use,
            peak_bytes_in_use=self._peak_in_use,
            largest_alloc_size=self._largest,
            bytes_limit=self.memory_limit,
            bytes_reserved=ground.reserved,
            peak_bytes_reserved=self._peak_reserved,
            largest_free_block_bytes=ground.largest_free,
            pool_bytes=ground.reserved,
            peak_pool_bytes=self._peak_reserved,
            by_owner=owners,
        )

    def snapshot(self) -> Snapshot:
        """The regions and blocks of this moment, as those of an allocator.

        Returns
        -------
        Snapshot
            What is free between two blocks is one chunk, whatever pieces the policy has it in.
        """
        regions = tuple(self._ground.as_regions())
        return Snapshot(str(self.sub_allocator.device), self.stats(), regions)

    def close(self) -> None:
        """Give all regions back to the device. Every later call but this raises a ClosedError."""
        if self._is_closed:
            return
        self._is_closed = True
        for block in list(self._ground.blocks):
            self._ground.remove(block)
        for address in list(self._ground.regions):
            self.sub_allocator.free(address, self._ground.remove_region(address))

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self.sub_allocator.device}: {self._ground}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Called for what is missing: all that is set up below, without `super().__init__`."""
            kind = type(self).__name__
            if "_ground" not in self.__dict__ and not name.startswith("__"):
                raise ClosedError(
                    f"this policy was never set up: {kind}.__init__ must begin with "
                    "super().__init__(sub_allocator)"
                )
            raise AttributeError(f"{kind!r} object has no attribute {name!r}")

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this policy was closed, and its memory given back")

    def _error(self, what: str, fault: str) -> PolicyError:
        where = f"event {self._event}: " if self._event >= 0 else ""
        during = f" in {self._doing}" if self._doing and what != self._doing else ""
        name = type(self).__name__
        return PolicyError(f"{where}{name}.{what}{during}: {fault}", self._event)


class PythonRun:
    """One replay under a policy, with the members of `bfc.allocators._play.Run`."""

    def __init__(
        self,
        policy: PythonPolicy,
        op: NDArray[np.uint8],
        number: NDArray[np.uint32],
        size: NDArray[np.uint64],
        stream: NDArray[np.uint16],
        handles: NDArray[np.uint32],
        addresses: NDArray[np.uint64],
        owner: NDArray[np.uint16] | None = None,
        owners: Sequence[str] = (),
        events: NDArray[np.intp] | None = None,
    ) -> None:
        """`events` are the numbers of the events in their trace, if some of it are left out."""
        policy._check_open()
        self._policy, self._addresses = policy, addresses
        names = [""] * len(op) if owner is None else [owners[at] for at in owner.tolist()]
        self._numbers = range(len(op)) if events is None else events.tolist()
        columns = (op.tolist(), number.tolist(), size.tolist(), stream.tolist(), names)
        self._events = list(zip(*columns, strict=True))
        #: The address and the bytes asked for of what is live, by the trace's allocation number.
        self._live: dict[int, tuple[int, int]] = {}
        self._live_bytes = 0
        self._rows: array[int] | None = None
        self._samples = self._calls_before = self._most_noted = 0
        self.failed = 0
        self.seconds = 0.0
        self.peak_bytes_live = self.peak_bytes_in_use = self.peak_bytes_reserved = 0

    def keep_timeline(self, samples: int, rebuilt: int = 0) -> None:
        """Makes `play` keep figures over time, from the last of the `rebuilt` events on."""
        self._rows, self._samples = array("Q"), samples

    def timeline_rows(self) -> bytes:
        """The rows that `keep_timeline` asked for, as bytes: seven 64-bit numbers each."""
        assert self._rows is not None
        rows = np.frombuffer(self._rows, np.uint64).reshape(-1, 7)
        shown: bytes = rows[sampled([*rows[:, 1:4].T], self._samples)].tobytes()
        return shown

    def play(
        self,
        progress: Callable[[int], None] | None = None,
        rebuilt: int = 0,
        give_up: bool = False,
    ) -> bool:
        """Runs every event. The figures begin behind the first `rebuilt` events. The answer is
        True. `give_up` is of no use: it is for policies that place blocks as recorded. After an
        error the policy is closed: nobody knows what its books say."""
        policy = self._policy
        self._addresses[:] = 0
        self._calls_before = policy._calls
        before = policy._peak_in_use, policy._peak_reserved
        try:
            for event, row in enumerate(self._events):
                if event == rebuilt:
                    self._begin(event)
                self._play_one(event, *row)
                if event >= rebuilt:
                    self._note(event)
                if progress is not None and (event + 1) % EVENTS_BETWEEN_REPORTS == 0:
                    progress(event + 1)
            if rebuilt >= len(self._events):
                self._begin(rebuilt)
            if progress is not None:
                progress(len(self._events))
        except BaseException:
            policy.close()
            raise
        finally:
            policy._event, policy._doing = -1, ""
            self.peak_bytes_in_use = policy._peak_in_use
            self.peak_bytes_reserved = policy._peak_reserved
            policy._peak_in_use = max(policy._peak_in_use, before[0])
            policy._peak_reserved = max(policy._peak_reserved, before[1])
        return True

    def _begin(self, event: int) -> None:
        """The peaks and the timeline begin before this event."""
        policy = self._policy
        policy._peak_in_use, policy._peak_reserved = policy._ground.in_use, policy._ground.reserved
        self.peak_bytes_live = self._live_bytes
        if event and self._rows is not None:
            self._note(event - 1)

    def _play_one(
        self, event: int, op: int, number: int, size: int, stream: int, owner: str
    ) -> None:
        self._policy._check_open()
        if op == ALLOCATE:
            if size:
                self._allocate(event, number, size, stream, owner)
        elif op == FREE:
            address, size = self._live.pop(number, (0, 0))
            if size:
                self._live_bytes -= size
                self._policy._ground.remove(address)
                self._call(event, "free", address)
        else:
            self._call(event, "release")

    def _allocate(self, event: int, number: int, size: int, stream: int, owner: str) -> None:
        policy = self._policy
        answer = self._call(event, "allocate", size, stream)
        if answer is None:
            self.failed += 1
            return
        address, nbytes = self._read(answer, size)
        policy._allocations += 1
        block = Block(address, nbytes, size, stream, policy._allocations, policy._event, owner)
        fault = policy._ground.place(block)
        if fault:
            raise self._wrong(answer, fault)
        policy._largest = max(policy._largest, nbytes)
        policy._peak_in_use = max(policy._peak_in_use, policy._ground.in_use)
        self._addresses[event] = address
        self._live[number] = address, size
        self._live_bytes += size
        self.peak_bytes_live = max(self.peak_bytes_live, self._live_bytes)

    def _read(self, answer: Any, size: int) -> tuple[int, int]:
        """The address and the bytes of an answer."""
        pair = answer if isinstance(answer, tuple) else (answer, size)
        try:
            address, nbytes = (as_int(number) for number in pair)
        except (TypeError, ValueError):
            wanted = "an answer is an address, an address and the bytes of the block, or None"
            raise self._wrong(answer, wanted) from None
        if nbytes < size:
            raise self._wrong(answer, f"the block has {nbytes} bytes, and {size} were asked for")
        return address, nbytes

    def _wrong(self, answer: object, fault: str) -> PolicyError:
        policy = self._policy
        shown = _shown(answer)
        return policy._error(policy._doing, f"the answer is {shown}: {fault}")

    def _call(self, event: int, method: str, *arguments: int) -> Any:
        """What a method of the policy answers. Its errors become a PolicyError."""
        policy = self._policy
        said = ", ".join(map(_shown, arguments) if method == "free" else map(str, arguments))
        policy._event, policy._doing = self._numbers[event], f"{method}({said})"
        begun = time.perf_counter()
        try:
            return getattr(policy, method)(*arguments)
        except (PolicyError, SubAllocatorError, ClosedError):
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise policy._error(policy._doing, f"it raised {text}") from error
        finally:
            self.seconds += time.perf_counter() - begun

    def _note(self, event: int) -> None:
        """Adds the figures after an event to the timeline."""
        policy, ground, rows = self._policy, self._policy._ground, self._rows
        if rows is None:
            return
        most = policy._peak_reserved
        is_new_peak = most > max(self._most_noted, ground.reserved)  # within the event
        for reserved in (most, ground.reserved) if is_new_peak else (ground.reserved,):
            calls = policy._calls - self._calls_before
            rows.extend((event, self._live_bytes, ground.in_use, reserved))
            rows.extend((ground.largest_free, self.failed, calls))
        self._most_noted = max(self._most_noted, most)


PythonPolicy._run = PythonRun  # which `Trace.replay` looks for


def _shown(value: object) -> str:
    """An address in hexadecimal, and anything else as it is."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return hex(value) if type(value) is int and value > 1 << 20 else repr(value)
