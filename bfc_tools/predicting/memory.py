"""The memory of the device that is not there: PyTorch's allocator, and all that happened to it.

Of free blocks of one size PyTorch takes the one with the lowest address, so what is reserved
depends on the addresses that the driver gives. On an H200 under Linux (driver 580) they fall: the
driver takes 32 MiB of addresses, or a multiple, below those that it has, and what is left of them
goes to later requests that fit. Of 18 recorded programs, 13 then need what they needed there to
the byte, eight with addresses that rise. Where libraries lie between them, the driver jumps from
one gap to another, which nobody can know before: `Prediction.reserved_range` tries some. PyTorch
2.13 and later take the block whose segment is the oldest, so that addresses do not matter.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from bfc.errors import OutOfMemoryError, SettingsError
from bfc.libraries import np, torch
from bfc.policies._caching import CachingAllocator
from bfc.pytorch.settings import CachingSettings
from bfc.suballocators.simulated import CUDA_CHUNK, CUDA_HIGHEST, SimulatedSubAllocator
from bfc.trace import Trace
from bfc.trace.trace import ALLOCATE, FREE, RELEASE
from bfc_tools.predicting.kinds import OTHER
from bfc_tools.predicting.places import Places, is_machinery
from bfc_tools.predicting.rules.interface import Doubt

#: The memory of a device that never refuses.
ENOUGH = 1 << 45
#: The variables of PyTorch's settings, the one that counts first.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def simulated_driver(nbytes: int, seed: int | None = None) -> SimulatedSubAllocator:
    """A device that gives addresses as CUDA's driver does; with a seed, in another process."""
    return SimulatedSubAllocator(nbytes, base=CUDA_HIGHEST, chunk=CUDA_CHUNK, seed=seed)


class Allocation:
    """One allocation on the device. Its number is never used again, and its address is 0 once it
    was freed. `made` is the node of autograd that made it, and the operator."""

    __slots__ = ("address", "event", "made", "nbytes", "number", "watch")

    def __init__(self, number: int, nbytes: int, address: int, event: int) -> None:
        self.number, self.nbytes, self.address, self.event = number, nbytes, address, event
        self.made: tuple[object, str] | None = None
        self.watch: object = None


class Refused(NamedTuple):
    """A request that was refused: where in the history, its bytes, its stack, and what was live,
    reserved and free then."""

    event: int
    nbytes: int
    stack: int
    live: int
    reserved: int
    free: int


class Events(NamedTuple):
    """Events that follow from earlier ones: of each the operation, the number of the allocation and
    its size, and, by the name of the column, the bytes of the others."""

    op: Any
    number: Any
    size: Any
    places: dict[str, bytes]


class Doubted(NamedTuple):
    """A size that is not known: how many events were before it, the number of the allocation (-1 if
    nothing is counted), and what is not known of it."""

    event: int
    number: int
    doubt: Doubt


class History:
    """All that happened, in columns: of each event, and of each allocation by its number."""

    def __init__(self) -> None:
        self.op, self.id, self.size = array("B"), array("I"), array("Q")
        self.stream, self.owner, self.stack = array("H"), array("H"), array("I")
        self.phase = array("B")
        #: Of each allocation.
        self.kinds, self.made_for = array("B"), array("I")
        self._streams: dict[int, int] = {0: 0}

    def __len__(self) -> int:
        return len(self.op)

    def add(
        self, op: int, number: int, nbytes: int, stream: int, owner: int, stack: int, phase: int
    ) -> None:
        self.op.append(op)
        self.id.append(number)
        self.size.append(nbytes)
        self.stream.append(self._streams.setdefault(stream, len(self._streams)) if stream else 0)
        self.owner.append(owner)
        self.stack.append(stack)
        self.phase.append(phase)

    def extend(self, events: Events) -> None:
        self.op.frombytes(events.op.tobytes())
        for column, values in ((self.id, events.number), (self.size, events.size)):
            column.frombytes(values.astype(column.typecode).tobytes())
        for name in ("stream", "owner", "stack", "phase", "kinds", "made_for"):
            getattr(self, name).frombytes(events.places[name])


class Peaks:
    """What is `live` of what the program asked for, and the most of the whole run. `in_graph` says
    whether that was live where the graph of a backward pass is made."""

    def __init__(self) -> None:
        # `allocated` and `reserved` are as of the last `note_peaks`.
        self.live = self.requested = self.allocated = self.reserved = 0
        self.in_graph = False

    def add(self, nbytes: int, most: int | None = None) -> None:
        """Adds to what is live (less, if negative); `most` is the highest that was reached in
        between, beside what was live before."""
        reached = self.live + (nbytes if most is None else most)
        self.live += nbytes
        if reached > self.requested:
            self.requested, self.in_graph = reached, torch.is_grad_enabled()


class Memory:
    """The device's memory of so many bytes. If it is `limited`, the device runs out of it;
    otherwise it only says how much it has.

    `settings` are as in PYTORCH_CUDA_ALLOC_CONF; None is what that variable has when the program
    allocates first. `rules` is the version of PyTorch whose allocator it is, and `different` names
    the rules in which the program's own version differs from it; None: in the order of free blocks.
    `total` is what the device says it has, of which a program may allow itself a fraction.
    """

    def __init__(
        self,
        nbytes: int,
        settings: str | None,
        limited: bool,
        places: Places,
        total: int,
        rules: str = "2.15",
        different: frozenset[str] | None = frozenset(),
    ) -> None:
        #: Whether the variable is read again at the first allocation, as PyTorch does.
        self.from_environment = settings is None
        settings = settings_in_force(settings)
        self.nbytes, self.settings, self.limited, self.places = nbytes, settings, limited, places
        self.rules, self.different, self.total = rules, different, total
        source = simulated_driver(nbytes if limited else ENOUGH)
        self.allocator = CachingAllocator(source, settings=settings, torch=rules)
        self.history, self.peaks = History(), Peaks()
        self.kept: dict[Hashable, Allocation] = {}
        self.dumped: list[str] = []
        #: What the program wants to be called before it runs out of memory.
        self.observers: list[Callable[[int, int, int, int], object]] = []
        #: How many events there were at the end of each step.
        self.step_ends: list[int] = []
        #: Of the memory, what the program allows itself, if it says so; whether it ended because
        #: there was none, and the requests that were refused.
        self.chosen_fraction: float | None = None
        self.ran_out = False
        self.refusals: list[Refused] = []
        #: The sizes that are not known.
        self.doubted: list[Doubted] = []
        if limited:
            self._set_limit()
        self.lock = threading.RLock()

    def allocate(self, nbytes: int, operator: str, kind: int = OTHER) -> Allocation:
        """Allocates; raises torch.OutOfMemoryError where the device has too little."""
        places, history = self.places, self.history
        if self.from_environment:
            self._read_environment()
        with self.lock:
            stream = places.stream()
            try:
                address = self.allocator.allocate_raw(nbytes, stream)
            except OutOfMemoryError:
                self._note_refusal(nbytes, operator)
                for tell in self.observers:
                    tell(0, nbytes, self.nbytes, self.free_bytes)
                raise out_of_memory(self, nbytes) from None
            made = Allocation(len(history.kinds), nbytes, address, len(history))
            self.peaks.add(nbytes)
            owner, stack, phase, line = places.now(operator)
            history.kinds.append(kind or places.kind())
            history.made_for.append(line)
            history.add(ALLOCATE, made.number, nbytes, stream, owner, stack, phase)
            return made

    def _note_refusal(self, nbytes: int, operator: str) -> None:
        _, stack, _, _ = self.places.now(operator)
        held = int(self.stats()["reserved_bytes.all.current"])
        place = len(self.history), nbytes, stack
        self.refusals.append(Refused(*place, self.peaks.live, held, self.free_bytes))

    def doubt(self, what: Doubt, made: Allocation | None) -> None:
        """Notes that a size is not known, where nothing is counted now, or of what was made."""
        number = -1 if made is None else made.number
        self.doubted.append(Doubted(len(self.history), number, what))

    @property
    def fraction(self) -> float:
        """Of the device's memory, what PyTorch may take."""
        if self.chosen_fraction is not None:
            return self.chosen_fraction
        return CachingSettings().apply(self.settings).per_process_memory_fraction

    def limit_of(self, usable: int, total: int) -> int:
        """What PyTorch may take of a device that has so many bytes, and leaves it so many."""
        return usable if self.fraction >= 1 else min(usable, round(self.fraction * total))

    def limit_to(self, fraction: float) -> None:
        """As `torch.cuda.set_per_process_memory_fraction`."""
        self.chosen_fraction = fraction
        if self.limited:
            self._set_limit()

    def _set_limit(self) -> None:
        limit = self.limit_of(self.nbytes, self.total)
        self.allocator.set_memory_fraction(limit / self.nbytes)

    @property
    def free_bytes(self) -> int:
        """What the device has left."""
        held = int(self.stats()["reserved_bytes.all.current"])
        return max(0, self.nbytes - held)

    def _read_environment(self) -> None:
        """Takes the settings that the program itself has put into the variable until now."""
        self.from_environment = False
        text = settings_in_force(None)
        if text != self.settings:
            self.set_settings(text)

    def set_settings(self, text: str) -> None:
        """As `torch.cuda.memory._set_allocator_settings`."""
        self.allocator.set_settings(text)
        self.settings, self.from_environment = text, False

    def free_kept_by_blas(self) -> None:
        """Frees the workspaces of cuBLAS and cuBLASLt: the next products make new ones."""
        for key in list(self.kept):
            if isinstance(key, tuple) and key[0] in ("cublas", "cublaslt"):
                self.free(self.kept.pop(key))

    def free(self, made: Allocation) -> None:
        """Frees; does nothing if it was freed."""
        with self.lock:
            if made.address:
                address, made.address = made.address, 0
                self.allocator.deallocate_raw(address)
                self.peaks.add(-made.nbytes)
                self.history.add(FREE, made.number, made.nbytes, 0, 0, 0, self.places.phase)

    def play(self, events: Events, addresses: dict[int, int]) -> None:
        """Lets events happen that follow from earlier ones. `addresses` are those of what they
        free, by numbers, and get those of what they allocate."""
        allocate, free = self.allocator.allocate_raw, self.allocator.deallocate_raw
        stream = self.places.stream()
        numbers = events.number.tolist()
        with self.lock:
            for born, number, nbytes in zip(
                (events.op == ALLOCATE).tolist(), numbers, events.size.tolist(), strict=True
            ):
                if born:
                    addresses[number] = allocate(nbytes, stream)
                else:
                    free(addresses.pop(number))
            live = np.cumsum(np.where(events.op == ALLOCATE, events.size, -events.size))
            if len(live):
                self.peaks.add(int(live[-1]), most=int(live.max()))
            self.history.extend(events)

    def know(self, made: Allocation, kind: int, owner: int) -> None:
        """Notes what an allocation is for, and whose it is; 0 leaves the owner as it is."""
        self.history.kinds[made.number] = kind
        if owner:
            self.history.owner[made.event] = owner

    def empty_cache(self) -> None:
        with self.lock:
            self.allocator.empty_cache()
            self.history.add(RELEASE, 0, 0, 0, 0, 0, self.places.phase)

    def reset_peaks(self) -> None:
        """As `torch.cuda.reset_peak_memory_stats()`; the peaks of the whole run are kept."""
        self.note_peaks()
        self.allocator.reset_peak_stats()

    def note_peaks(self) -> Peaks:
        """Keeps the peaks until now, beside those that the program may reset, and returns them."""
        stats, peaks = self.stats(), self.peaks
        peaks.allocated = max(peaks.allocated, stats["allocated_bytes.all.peak"])
        peaks.reserved = max(peaks.reserved, stats["reserved_bytes.all.peak"])
        return peaks

    def record(self, enabled: str | None, context: str | None, most: int | None) -> None:
        """Begins or ends the history that a snapshot holds."""
        self.allocator.record_history(enabled, context=context, max_entries=most)

    def snapshot(self) -> dict[str, Any]:
        """What `torch.cuda.memory._snapshot()` returns, without our own frames."""
        found = self.allocator.snapshot().to_torch()
        cleaned: dict[int, list[Any]] = {}

        def clean(holder: dict[str, Any]) -> None:
            frames = holder.get("frames")
            if frames:
                if id(frames) not in cleaned:
                    kept = [one for one in frames if not is_machinery(one["filename"])]
                    cleaned[id(frames)] = kept
                holder["frames"] = cleaned[id(frames)]

        for segment in found["segments"]:
            clean(segment)
            for block in segment["blocks"]:
                clean(block)
        for entries in found["device_traces"]:
            for entry in entries:
                clean(entry)
        return found

    def stats(self) -> dict[str, int]:
        """The statistics, as `torch.cuda.memory_stats()` returns them."""
        return self.allocator.memory_stats()

    def trace(self, meta: Any) -> Trace:
        """All events until now."""
        history, places = self.history, self.places
        return Trace(
            history.op,
            history.id,
            history.size,
            history.stream,
            owner=history.owner,
            stack=history.stack,
            owners=list(places.owners),
            frames=list(places.frames),
            stacks=list(places.stacks) or [(0, 0)],
            meta=meta,
        )


def settings_in_force(given: str | None) -> str:
    """The text of the settings: what was given, or else that of PyTorch's variables. Raises
    SettingsError, which names where a wrong text stands."""
    named, text = "settings", given
    if text is None:
        named = next((name for name in VARIABLES if os.environ.get(name)), "")
        text = os.environ.get(named, "") if named else ""
    try:
        CachingSettings().apply(text)
    except SettingsError as error:
        raise SettingsError(f"{named}: {error}") from error
    return text


def out_of_memory(memory: Memory, nbytes: int) -> Exception:
    """The error that PyTorch raises, with its sentence."""
    from bfc.units import format_bytes

    stats = memory.stats()
    live, held = stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"]
    limit = memory.limit_of(memory.nbytes, memory.total)
    allowed = f"{format_bytes(limit)} allowed; " if memory.fraction < 1 else ""
    error: Exception = torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {format_bytes(nbytes)}. GPU 0 has a total capacity "
        f"of {format_bytes(memory.total)} of which {format_bytes(memory.free_bytes)} is free. "
        f"{allowed}Of the allocated memory {format_bytes(live)} is allocated by PyTorch, and "
        f"{format_bytes(held - live)} is reserved by PyTorch but unallocated. (predicted by bfc)"
    )
    return error
