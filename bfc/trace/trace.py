"""A trace: what a program asked an allocator for, as arrays of numbers."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from bfc.allocators._play import Run, find_fault
from bfc.errors import TraceError
from bfc.files import replacing
from bfc.trace.files import open_regular

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from bfc.allocators._allocator import Allocator

#: The most events that a file may hold.
MOST_EVENTS = 1 << 28
#: What each array of a file may unpack to, in bytes, and all together: 2**28 events in a trace's
#: own types (1, 4, 8 and 2 bytes), or 2**27 where every number takes 8.
MOST_BYTES = {
    "op": 1 << 30,
    "id": 1 << 30,
    "size": 2 << 30,
    "stream": 1 << 30,
    "meta": 64 << 20,
    "torch_addresses": 512 << 20,
}
MOST_BYTES_IN_ALL = (4 << 30) + MOST_BYTES["meta"]
#: The list of `meta["torch"]` that may be as long as the trace, and is an array in a file.
ADDRESSES = "torch_addresses"
#: What an array's header may take on top of that.
HEADER_BYTES = 4096


@dataclass(frozen=True)
class Replay:
    """What a replay came to. Sizes are bytes, and peaks are over the replay alone.

    `addresses` holds one for each event: 0 at a free, at a refused allocation and at one of 0
    bytes. `failed` counts the allocations that were refused for want of memory. `seconds` is the
    time in the compiled loop, with what the sub-allocator took and without `progress`.
    `peak_bytes_live` is of what the trace asked for; `peak_bytes_in_use` (whole chunks) and
    `peak_bytes_reserved` (regions) are the allocator's, with what else lives in it.
    """

    addresses: NDArray[np.uint64]
    failed: int
    seconds: float
    peak_bytes_live: int
    peak_bytes_in_use: int
    peak_bytes_reserved: int

    @property
    def events(self) -> int:
        """How many events were replayed."""
        return len(self.addresses)

    @property
    def ns_per_event(self) -> float:
        """Nanoseconds an event; 0 of an empty trace."""
        return self.seconds * 1e9 / self.events if self.events else 0.0


class Trace:
    """An allocation history.

    Arrays of one length: `op` (0 allocates, 1 frees), `id` (the allocation's number), `size`
    (bytes; 0 at a free) and `stream` (ordinal of the owning stream; None: all 0). An id may be used
    again once it is freed; ids never freed are live at the end. `meta` is any JSON value. Raises
    TraceError where the events make no sense. The arrays are copied, and cannot be changed.

    >>> import bfc
    >>> trace = bfc.Trace(op=[0, 0, 1], id=[0, 1, 0], size=[1000, 300, 0])
    >>> result = trace.replay(bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB")))
    >>> [hex(address) for address in result.addresses]
    ['0x10000000000', '0x10000000400', '0x0']
    """

    def __init__(
        self,
        op: ArrayLike,
        id: ArrayLike,
        size: ArrayLike,
        stream: ArrayLike | None = None,
        *,
        meta: Any = None,
    ) -> None:
        import numpy as np

        ops = _column("op", op, np.uint8)
        ids = _column("id", id, np.uint32)
        sizes = _column("size", size, np.uint64)
        streams = _column(
            "stream", np.zeros(len(ops), np.uint8) if stream is None else stream, np.uint16
        )
        lengths = {len(ops), len(ids), len(sizes), len(streams)}
        if len(lengths) > 1:
            raise TraceError(f"op, id, size and stream differ in length: {sorted(lengths)}")
        numbers, count = _dense(ids)
        fault = find_fault(ops, numbers, sizes, count)
        if fault is not None:
            raise TraceError(f"event {fault[0]}: {fault[1]}")
        self._op, self._id, self._size, self._stream = ops, ids, sizes, streams
        self._numbers, self._number_count = numbers, count
        self.meta = meta

    @property
    def op(self) -> NDArray[np.uint8]:
        """0 where an event allocates, 1 where it frees. Read-only, as are the others."""
        return self._op

    @property
    def id(self) -> NDArray[np.uint32]:
        """The number of the allocation that an event makes or frees."""
        return self._id

    @property
    def size(self) -> NDArray[np.uint64]:
        """The bytes that an event asks for; at a free, whatever was given there."""
        return self._size

    @property
    def stream(self) -> NDArray[np.uint16]:
        """The ordinal of the stream that owns the allocation."""
        return self._stream

    def __reduce__(self) -> tuple[object, ...]:
        # A copy or a pickle is checked again: its arrays come back as ones that can be changed.
        return type(self), (self.op, self.id, self.size, self.stream), {"meta": self.meta}

    def __len__(self) -> int:
        return len(self.op)

    def __repr__(self) -> str:
        return f"<bfc.Trace, {len(self)} events>"

    def __getitem__(self, events: slice) -> Trace:
        """The first events: `trace[:n]`. Another part would free what it does not allocate."""
        if (
            not isinstance(events, slice)
            or events.start not in (None, 0)
            or events.step not in (None, 1)
        ):
            raise TypeError("a trace is cut as trace[:n] only")
        return Trace(
            self.op[events], self.id[events], self.size[events], self.stream[events], meta=self.meta
        )

    def fullest_event(self) -> int:
        """The event after which most bytes are live, as asked for; -1 of an empty trace."""
        import numpy as np

        if len(self) == 0:
            return -1
        # In a stable sort by id each free stands right behind its allocation.
        order = np.argsort(self._numbers, kind="stable")
        change = self.size.astype(np.int64)
        frees = self.op[order].astype(bool)
        change[order[frees]] = -change[order[np.flatnonzero(frees) - 1]]
        return int(np.cumsum(change).argmax())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Reads an `.npz` with these arrays, of any integer type that holds their numbers, and a
        JSON text `meta` if it has one. An array `torch_addresses` becomes the list
        `meta["torch"]["addresses"]`. Nothing in it is executed.

        Raises TraceError, in one line that names the file and the fault, and OSError where it
        cannot be opened. What is no regular file (a FIFO, a device), and files of more than 2**28
        events, or that unpack to more than some 4 GiB, are refused before they are unpacked. Cost:
        O(n), and while it reads about twice the memory of the arrays.
        """
        try:
            with open_regular(path) as raw:
                if not zipfile.is_zipfile(raw):
                    raise TraceError("it is no .npz archive")
                with zipfile.ZipFile(raw) as archive:
                    members = _members(archive)
                    arrays = {name: _array(archive, info) for name, info in members.items()}
            text, addresses = arrays.pop("meta", None), arrays.pop(ADDRESSES, None)
            return cls(**arrays, meta=_joined(None if text is None else _meta(text), addresses))
        except TraceError as error:
            raise TraceError(f"{os.fspath(path)}: {error}") from None
        except OSError:
            raise
        except (
            Exception
        ) as error:  # BadZipFile, zlib.error, and what else a damaged archive provokes
            fault = " ".join(f"{type(error).__name__}: {error}".split())
            raise TraceError(f"{os.fspath(path)}: it cannot be read ({fault})") from None

    @classmethod
    def from_torch(
        cls, source: str | os.PathLike[str] | IO[bytes], *, device: int | None = None
    ) -> Trace:
        """Reads a memory snapshot of PyTorch: what `torch.cuda.memory._dump_snapshot`, or
        `Snapshot.dump`, wrote to a path or a binary file. `device` is needed where the file holds
        the history of several.

        Nothing in the file is executed, whatever it holds: it is not given to Python's unpickler,
        and all but numbers, texts, lists and dicts of text keys is refused. Raises TraceError, in
        one line that names the fault and where it stands, and OSError. What is no regular file
        (a FIFO, a device), files of more than 1 GiB, or 2**25 events of a device, are refused, and
        files whose lists stand for more entries, segments and blocks than one for 12 bytes (they
        share them, which PyTorch does not do).
        Cost: O(n log n) steps, each with a look at what is live, and for a recording some 7
        times the file's size in memory; no file takes 100 times its size and 32 MiB.

        First come events that rebuild what was live before the history began: for each segment,
        every block and every hole between them is allocated by address, and then the holes are
        freed. The history follows: an allocation with the bytes asked for, and a free where it was
        completed (an allocation whose free still waits at the end stays live). Streams are
        numbered by their first use, and 0 stays 0. At the end just what the file says is live.

        `meta["torch"]` says what else is known: "device"; "streams", the handles by their number;
        "settings", the allocator's; "first_recorded_event", the number of events made up before
        the history; "addresses", where the recorded run placed each allocation (0 at a free);
        "segments" and "segment_events", [event, address, size] of each segment taken, and
        [action, event, address, size, stream] of each entry about one, by the event before which
        it came; "oom", [event, size, free bytes of the device]; "waiting_at_the_end";
        "frees_completed_later", the blocks that waited for another stream;
        "private_pool_allocations", whose pool a trace cannot name; "segments_not_exact", of the
        segments whose layout no requests give; "blocks_of_unsure_size", of the blocks before the
        history that may have been up to 1 MiB larger, which the file does not say; "repairs", how
        often something was added or left out because the history contradicts itself (none in a
        whole recording); and "unknown_actions".

        >>> import io, pickle, bfc
        >>> block = {"size": 2097152, "requested_size": 0, "state": "inactive"}
        >>> segment = {"address": 1 << 40, "total_size": 2097152, "blocks": [block]}
        >>> events = [
        ...     {"action": action, "addr": 1 << 40, "size": 1000, "stream": 0}
        ...     for action in ("alloc", "free_requested", "free_completed")
        ... ]
        >>> content = pickle.dumps({"segments": [segment], "device_traces": [events]}, protocol=4)
        >>> trace = bfc.Trace.from_torch(io.BytesIO(content))
        >>> start = trace.meta["torch"]["first_recorded_event"]
        >>> trace.op[start:].tolist(), trace.size[start:].tolist()
        ([0, 1], [1000, 0])
        """
        from bfc.pytorch.reader import read

        return read(source, device)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an `.npz` that `load`, or any NumPy, reads: compressed, and at `path` as it is
        given, with no ending added.

        `meta["torch"]["addresses"]` is written as an array. Raises TypeError or ValueError where
        `meta` is no JSON, TraceError where `load` would refuse the file for its size (2**28 events,
        2**26 addresses, or 2**24 characters of other `meta`), and OSError. A file that was there is
        replaced once the new one is whole, which is written to the same folder: after an error it
        is as it was.

        >>> import pathlib, tempfile, bfc
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "run.npz")
        ...     bfc.Trace([0], [0], [1000], meta={"model": "small"}).save(path)
        ...     bfc.Trace.load(path).meta
        {'model': 'small'}
        """
        import numpy as np

        rest, addresses = _apart(self.meta)
        meta = np.array(json.dumps(rest))
        most = MOST_BYTES[ADDRESSES] // 8
        numbers: dict[str, Any] = {} if addresses is None else {ADDRESSES: addresses}
        if (
            len(self) > MOST_EVENTS
            or meta.nbytes > MOST_BYTES["meta"]
            or any(len(array) > most for array in numbers.values())
        ):
            raise TraceError(
                f"{os.fspath(path)}: a file holds at most {MOST_EVENTS} events, {most} addresses "
                f"and a meta of {MOST_BYTES['meta'] // 4} characters"
            )
        with replacing(path) as file:
            np.savez_compressed(
                file,
                op=self.op,
                id=self.id,
                size=self.size,
                stream=self.stream,
                meta=meta,
                **numbers,
            )

    def closed(self) -> Trace:
        """This trace, and behind it a free of everything that it leaves live, the oldest first: it
        can be replayed again and again. Cost: O(n), and a copy of the arrays.

        >>> import bfc
        >>> trace = bfc.Trace(op=[0, 0, 1], id=[0, 1, 0], size=[1000, 300, 0])
        >>> trace.closed().op.tolist(), trace.closed().id.tolist()
        ([0, 0, 1, 1], [0, 1, 0, 1])
        """
        import numpy as np

        last = np.full(self._number_count, -1, np.int64)
        last[self._numbers] = np.arange(len(self))
        open_at = last[(last >= 0)]
        open_at = np.sort(open_at[~self.op[open_at].astype(bool)])
        return Trace(
            np.concatenate([self.op, np.ones(len(open_at), np.uint8)]),
            np.concatenate([self.id, self.id[open_at]]),
            np.concatenate([self.size, np.zeros(len(open_at), np.uint64)]),
            np.concatenate([self.stream, self.stream[open_at]]),
            meta=self.meta,
        )

    def replay(
        self, allocator: Allocator, *, progress: Callable[[int], None] | None = None
    ) -> Replay:
        """Runs every event through an allocator, in one compiled loop with the GIL released.

        A refused allocation counts as failed, without a wait for `retry_seconds`, and its free is
        passed over. What the trace leaves live stays live: `closed()` frees it. `progress` is
        called now and then with the number of events done.

        Other threads may use the allocator: their calls and the replay take turns, and a turn of
        the replay is some 1000s of events. What they allocate counts in the peaks of chunks and
        regions. For those the peaks of `allocator.stats()` start again with the replay; at its end
        they are put back, or stay where the replay went higher. Two replays at once on one
        allocator mix up each other's peaks.

        Raises ClosedError (also where it is closed meanwhile), SubAllocatorError, MemoryError where
        the host has no room for the bookkeeping, KeyboardInterrupt, and what `progress` raises:
        what the replay has allocated is freed then.
        """
        import numpy as np

        addresses = np.empty(len(self), np.uint64)
        handles = np.empty(self._number_count, np.uint32)
        # The trace's ordinals are no handles, and nothing is queued anywhere: one stream will do.
        are_handles = getattr(allocator.sub_allocator, "streams_are_handles", False)
        stream = np.zeros_like(self.stream) if are_handles else self.stream
        run = Run(allocator, self.op, self._numbers, self.size, stream, handles, addresses)
        run.play(progress)
        return Replay(
            addresses,
            run.failed,
            run.seconds,
            run.peak_bytes_live,
            run.peak_bytes_in_use,
            run.peak_bytes_reserved,
        )


def _column(name: str, values: ArrayLike, dtype: type) -> NDArray[Any]:
    """A copy of one dimension and of the right type; TraceError where values do not fit into it."""
    import numpy as np

    array = np.asarray(values)
    if array.ndim != 1:
        raise TraceError(f"{name} has {array.ndim} dimensions: it must have one")
    if array.size and array.dtype.kind not in "iu":
        raise TraceError(f"{name} holds {array.dtype}: it must hold integers")
    top = np.iinfo(dtype).max
    if array.size and array.dtype != dtype and (int(array.min()) < 0 or int(array.max()) > top):
        raise TraceError(f"{name} holds numbers outside 0 to {top}")
    return _fixed(array, dtype)


def _fixed(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """A copy that nobody can change, as it lies in bytes: compiled code relies on its numbers."""
    import numpy as np

    return np.ndarray(len(array), dtype, array.astype(dtype, copy=False).tobytes())


def _dense(ids: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], int]:
    """The ids as indices into a table that is no larger than a few times the events, whatever the
    ids are."""
    import numpy as np

    if len(ids) == 0:
        return ids, 0
    top = int(ids.max()) + 1
    if top <= 4 * len(ids) + 1024:
        return ids, top
    unique, inverse = np.unique(ids, return_inverse=True)
    return _fixed(inverse, np.uint32), len(unique)


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The arrays of a file by name; TraceError where one is missing, or they are too large to be a
    trace. Nothing is unpacked, and no more than this is unpacked later."""
    by_file = {info.filename: info for info in archive.infolist()}
    found = {name: by_file[f"{name}.npy"] for name in MOST_BYTES if f"{name}.npy" in by_file}
    for name in ("op", "id", "size"):
        if name not in found:
            raise TraceError(f"it holds no array {name!r}")
    for name, info in found.items():
        if info.file_size > MOST_BYTES[name] + HEADER_BYTES:
            raise TraceError(
                f"{name} unpacks to {info.file_size} bytes: at most {MOST_BYTES[name]} are read"
            )
    total = sum(info.file_size for info in found.values())
    if total > MOST_BYTES_IN_ALL + len(found) * HEADER_BYTES:
        raise TraceError(f"it unpacks to {total} bytes: at most {MOST_BYTES_IN_ALL} are read")
    return found


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    from numpy.lib.format import read_array

    with archive.open(info) as member:
        array: NDArray[Any] = read_array(member, allow_pickle=False)
    if array.size > MOST_EVENTS:
        raise TraceError(f"{info.filename} holds {array.size} numbers: at most {MOST_EVENTS}")
    return array


def _apart(meta: Any) -> tuple[Any, NDArray[np.uint64] | None]:
    """The meta without the addresses of a recording, and these; None where they are no list of
    numbers that an array can hold."""
    import numpy as np

    torch = meta.get("torch") if isinstance(meta, dict) else None
    if not isinstance(torch, dict) or not isinstance(addresses := torch.get("addresses"), list):
        return meta, None
    if not all(type(address) is int and 0 <= address < 1 << 64 for address in addresses):
        return meta, None
    rest = {name: value for name, value in torch.items() if name != "addresses"}
    return meta | {"torch": rest}, np.array(addresses, np.uint64)


def _joined(meta: Any, addresses: NDArray[Any] | None) -> Any:
    """What `_apart` took apart."""
    import numpy as np

    if addresses is None:
        return meta
    torch = meta.get("torch") if isinstance(meta, dict) else None
    if not isinstance(torch, dict):
        raise TraceError(f"it holds {ADDRESSES}, but no meta of a recording")
    torch["addresses"] = _column(ADDRESSES, addresses, np.uint64).tolist()
    return meta


def _meta(text: NDArray[Any]) -> Any:
    try:
        return json.loads(str(text.item()))
    except ValueError as error:
        raise TraceError(f"its meta is no JSON ({error})") from None
