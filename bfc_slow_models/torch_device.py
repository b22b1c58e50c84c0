"""The device that PyTorch's model runs on, and what all subjects of a comparison share."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bfc.devices import Availability
from bfc.errors import InvalidPointerError, OutOfMemoryError, SettingsError, SubAllocatorError
from bfc.suballocators.base import SubAllocator
from bfc.suballocators.simulated_captures import SimulatedCaptures
from bfc_slow_models.torch_words import OUT_OF_MEMORY, Call, Failure, Operation


class Refused(Exception):  # noqa: N818 - an answer, not an error of ours
    """What upstream throws, on its way to becoming a `Failure` of this kind."""

    def __init__(self, kind: str, text: str = "") -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text


#: Our errors in the peer's words. A subclass stands before its base.
KINDS: tuple[tuple[type[Exception], str], ...] = (
    (OutOfMemoryError, "oom"),
    (SettingsError, "value"),
    (SubAllocatorError, "driver"),
    (InvalidPointerError, "internal"),
    (RuntimeError, "internal"),
)


def answers(method: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: what the method refuses becomes its answer."""

    @functools.wraps(method)
    def answer(*arguments: Any) -> Any:
        try:
            return method(*arguments)
        except Refused as refused:
            return Failure(refused.kind, refused.text)
        except tuple(kind for kind, _ in KINDS) as error:
            kind = next(name for one, name in KINDS if isinstance(error, one))
            return Failure(kind, str(error))

    return answer


# The device ------------------------------------------------------------------------------------


@dataclass
class Queue:
    """The work of a stream: how many events were recorded there, and how many of them are over."""

    recorded: int = 0
    finished: int = 0
    held: bool = False

    def finish(self) -> None:
        self.finished, self.held = self.recorded, False


@dataclass(frozen=True)
class Event:
    """An event, which is also a fence for an allocator of ours."""

    device: StandIn
    stream: int
    position: int

    @property
    def is_over(self) -> bool:
        return self.position <= self.device.queues[self.stream].finished

    def done(self) -> bool:
        self.device.calls.append(("event_query", self.stream, self.is_over))
        return self.is_over

    def wait(self) -> None:
        """Waiting is what lets a stream finish, since nothing else runs here."""
        self.device.calls.append(("event_synchronize", self.stream, None))
        if not self.is_over:
            self.device.queues[self.stream].finish()


class StandIn(SubAllocator):
    """The peer's stand-in for the CUDA runtime, in Python; it is a sub-allocator, too.

    Its log, `calls`, has the peer's words, but names an event by its stream alone: see
    `calls_by_stream`.
    """

    asynchronous = True
    supports_virtual_memory = Availability(True, "the stand-in maps memory")
    mapping_granularity = 2 << 20

    def __init__(
        self,
        capacity: int = 80 << 30,
        base: int = 1 << 40,
        alignment: int = 2 << 20,
        gap: int = 0,
        reserve_base: int = 1 << 44,
        placement: str = "rise",
    ) -> None:
        self.total_bytes = capacity
        self.alignment, self.gap, self.base = alignment, gap, base
        #: "rise": no address comes twice. "reuse": the lowest with room. "fall": below the last.
        self.placement = placement
        self.live: dict[int, int] = {}
        self.queues: defaultdict[int, Queue] = defaultdict(Queue)
        self.calls: list[Call] = []
        self.captures = SimulatedCaptures()
        self.reserved: dict[int, int] = {}
        self.pages: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self._next, self._next_reserved, self._next_page = base, reserve_base, 1
        #: What fails on order, by the kind of call; "" stands for all that take memory.
        self._faults: dict[str, tuple[int, int]] = {}

    @property
    def live_bytes(self) -> int:
        return sum(self.live.values()) + sum(self.pages.values())

    @property
    def free_bytes(self) -> int:
        return max(self.total_bytes - self.live_bytes, 0)

    def resize(self, capacity: int) -> None:
        """Make the device larger or smaller. What is live stays."""
        self.total_bytes = capacity

    def malloc(self, nbytes: int) -> int | None:
        """The address, or None for lack of memory. Any other error is raised."""
        if self._refuses("malloc", nbytes, self._refusal("malloc", nbytes)):
            return None
        address = self._place(nbytes)
        self.live[address] = nbytes
        self.calls.append(("malloc", nbytes, address))
        return address

    def _place(self, nbytes: int) -> int:
        if self.placement == "reuse":
            return self._first_gap(nbytes)
        if self.placement == "fall":
            self._next = (self._next - nbytes - self.gap) // self.alignment * self.alignment
            return self._next
        address = self._aligned(self._next)
        self._next = address + nbytes + self.gap
        return address

    def _first_gap(self, nbytes: int) -> int:
        address = self._aligned(self.base)
        for start, size in sorted(self.live.items()):
            if address + nbytes + self.gap <= start:
                break
            address = max(address, self._aligned(start + size + self.gap))
        return address

    def _aligned(self, address: int) -> int:
        return -(-address // self.alignment) * self.alignment

    def _strike(self, kind: str) -> int:
        """The error that is on order for this call, 0 for none."""
        left, code = self._faults.get(kind, (0, 0))
        self._faults[kind] = left - 1, code
        return code if left == 1 else 0

    def _refusal(self, kind: str, nbytes: int) -> int:
        own, growth = self._strike(kind), self._strike("")
        return growth or own or (OUT_OF_MEMORY if nbytes > self.free_bytes else 0)

    def _refuses(self, kind: str, nbytes: int, code: int) -> bool:
        """Logs a refusal. An error other than a lack of memory is raised."""
        if not code:
            return False
        self.calls.append((kind, nbytes, None))
        if code != OUT_OF_MEMORY:
            raise SubAllocatorError(f"error {code}")
        return True

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        address = self.malloc(nbytes)
        return None if address is None else (address, nbytes)

    def free(self, address: int, nbytes: int) -> None:
        if self.live.get(address) != nbytes:
            raise SubAllocatorError(f"free({address:#x}, {nbytes}) is no block")
        self.calls.append(("free", self.live.pop(address), address))

    def memory_info(self) -> tuple[int, int]:
        return self.free_bytes, self.total_bytes

    def fence(self, stream: int) -> Event:
        queue = self.queues[stream]
        queue.recorded += 1
        if not queue.held:
            queue.finished = queue.recorded
        self.calls.append(("event_record", stream, None))
        return Event(self, stream, queue.recorded)

    def capture_id(self, stream: int) -> int:
        return self.captures.id_of(stream)

    def capture_terminals(self, stream: int) -> tuple[int, ...]:
        return self.captures.terminals(stream)

    def capture_dependencies(self, node: int) -> tuple[int, ...]:
        return self.captures.dependencies(node)

    def hold(self, stream: int) -> None:
        """What is queued on the stream from now on stays unfinished until `finish`, or a wait."""
        self.queues[stream].held = True

    def finish(self, stream: int) -> None:
        """Everything queued on the stream has finished, and nothing more is held there."""
        self.queues[stream].finish()

    def finish_events(self, stream: int, count: int) -> None:
        """Finishes the `count` oldest unfinished events of a stream, which stays held."""
        queue = self.queues[stream]
        queue.finished += min(count, queue.recorded - queue.finished)

    def fail_at(self, n: int, code: int = OUT_OF_MEMORY, kind: str | None = None) -> None:
        """Refuse the n-th call from now (1 is the next) with this error; 0 takes it back.

        Counted are the calls of one kind, such as "map", or all that take memory.
        """
        self._faults[kind or ""] = n, code

    # Virtual memory

    def reserve(self, nbytes: int) -> int | None:
        """Addresses with nothing behind them, following the last ones."""
        if self._refuses("reserve", nbytes, self._strike("reserve")):
            return None
        address = self._next_reserved
        self._next_reserved += -(-nbytes // self.mapping_granularity) * self.mapping_granularity
        self.reserved[address] = nbytes
        self.calls.append(("reserve", nbytes, address))
        return address

    def unreserve(self, address: int, nbytes: int) -> None:
        if self.reserved.get(address) != nbytes or self._holds_any(address, nbytes):
            raise SubAllocatorError(f"unreserve({address:#x}, {nbytes}) is no empty reservation")
        del self.reserved[address]
        self.calls.append(("unreserve", nbytes, address))

    def create(self, nbytes: int) -> int | None:
        """A page: memory without an address."""
        if self._refuses("create", nbytes, self._refusal("create", nbytes)):
            return None
        page, self._next_page = self._next_page, self._next_page + 1
        self.pages[page] = nbytes
        self.calls.append(("create", nbytes, page))
        return page

    def release(self, page: int) -> None:
        if page not in self.pages:
            raise SubAllocatorError(f"{page} is no page")
        self.calls.append(("release", self.pages.pop(page), page))

    def map(self, address: int, pages: Sequence[int]) -> None:
        """All or nothing: where one of the calls fails, what was mapped is unmapped again."""
        at = address
        try:
            for page in pages:
                self._map_page(at, page)
                at += self.pages[page]
        except SubAllocatorError:
            if at > address:
                self.unmap(address, at - address)
            raise

    def _map_page(self, address: int, page: int) -> None:
        nbytes = self.pages[page]
        self._fail_mapping("map", nbytes)
        room = any(
            start <= address and address + nbytes <= start + size
            for start, size in self.reserved.items()
        )
        if not room or self._holds_any(address, nbytes):
            raise SubAllocatorError(f"{address:#x} is not free to be mapped")
        self.mapped[address] = nbytes
        self.calls.append(("map", nbytes, address))

    def set_access(self, address: int, nbytes: int) -> None:
        self._fail_mapping("access", nbytes)
        if not self._mappings(address, nbytes):
            raise SubAllocatorError(f"not all of {address:#x} is mapped")
        self.calls.append(("access", nbytes, address))

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmaps whole mappings, in one call."""
        self._fail_mapping("unmap", nbytes)
        mappings = self._mappings(address, nbytes)
        if not mappings:
            raise SubAllocatorError(f"not all of {address:#x} is mapped")
        for start in mappings:
            del self.mapped[start]
        self.calls.append(("unmap", nbytes, address))

    def wait(self, stream: int) -> None:
        """Waits for all that is queued on the stream."""
        self.calls.append(("wait", 0, stream))
        self.finish(stream)

    def _fail_mapping(self, kind: str, nbytes: int) -> None:
        code = self._strike(kind)
        if self._refuses(kind, nbytes, code):
            raise SubAllocatorError(f"error {code}")

    def _holds_any(self, address: int, nbytes: int) -> bool:
        return any(
            start < address + nbytes and address < start + size
            for start, size in self.mapped.items()
        )

    def _mappings(self, address: int, nbytes: int) -> list[int]:
        """Where the mappings begin that fill these addresses; empty if they are not filled."""
        found, at = [], address
        while at < address + nbytes and at in self.mapped:
            found.append(at)
            at += self.mapped[at]
        return found if at == address + nbytes else []


# Subjects --------------------------------------------------------------------------------------


class Subject:
    """What the model and ours have in common: the device, the slots, and `run`."""

    def __init__(self, **device: Any) -> None:
        self.device = StandIn(**device)
        self.hold, self.finish = self.device.hold, self.device.finish
        self.finish_events, self.fail_at = self.device.finish_events, self.device.fail_at
        self.resize = self.device.resize
        self.capture_wait = self.device.captures.wait
        self.current_stream = 0
        self._slots: dict[int, int] = {}

    def close(self) -> None:
        """Does what the peer's `close` does: nothing is freed."""

    def run(self, operations: Iterable[Operation]) -> list[Any]:
        """What each operation answers, as `TorchPeer.run`."""
        return [self._one(*operation) for operation in operations]

    def _one(self, name: str, *arguments: Any) -> Any:
        found = getattr(self, name)
        return found(*arguments) if callable(found) else found

    @property
    def calls(self) -> list[Call]:
        """The device's log."""
        return list(self.device.calls)

    @property
    def live_bytes(self) -> int:
        """The bytes that the device has given out."""
        return self.device.live_bytes

    def capture(self, stream: int, captures: bool = True) -> None:
        """Makes a stream the current one, and begins or ends a capture there, if need be."""
        self.current_stream = stream
        if captures and not self.device.capture_id(stream):
            self.device.captures.begin(stream)
        elif not captures and self.device.capture_id(stream):
            self.device.captures.end(stream)

    def capture_work(self, stream: int) -> None:
        """A stream that captures is given something to do, which becomes a node of the graph."""
        self.device.captures.work(stream)

    @answers
    def malloc(self, nbytes: int, stream: int = 0, slot: int | None = None) -> int:
        """The address. 0 bytes have address 0."""
        return self.place_in_slot(nbytes, stream, slot)

    def place_in_slot(self, nbytes: int, stream: int, slot: int | None) -> int:
        if slot is not None:
            self._slots[slot] = 0
        address = self._malloc(nbytes, stream)
        if slot is not None:
            self._slots[slot] = address
        return address

    @answers
    def allocate(self, nbytes: int, stream: int = 0, slot: int | None = None) -> int:
        """As `malloc`; it leaves `stream` the current one. In upstream only this refuses 2**60
        bytes and more at once; here both do."""
        self.current_stream = stream
        return self.place_in_slot(nbytes, stream, slot)

    def _slot(self, slot: int) -> int:
        if slot not in self._slots:
            raise Refused("other", "no such slot")
        return self._slots[slot]

    @answers
    def free(self, address: int) -> None:
        """Free; 0 is a no-op."""
        if address:
            self._free(address)

    @answers
    def free_slot(self, slot: int) -> None:
        address = self._slot(slot)
        del self._slots[slot]
        if address:
            self._free(address)

    @answers
    def record_stream(self, address: int, stream: int) -> None:
        """The block is used on this stream too."""
        if address:
            self._record_stream(address, stream)

    @answers
    def record_stream_slot(self, slot: int, stream: int) -> None:
        address = self._slot(slot)
        if address:
            self._record_stream(address, stream)

    def _malloc(self, nbytes: int, stream: int) -> int:
        raise NotImplementedError

    def _free(self, address: int) -> None:
        raise NotImplementedError

    def _record_stream(self, address: int, stream: int) -> None:
        raise NotImplementedError
