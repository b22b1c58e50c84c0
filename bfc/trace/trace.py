"""A trace: what a program asked an allocator for, as arrays of numbers."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bfc.errors import TraceError
from bfc.trace._replay import Run, find_fault

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from bfc._allocator import Allocator

ALLOC, FREE = 0, 1
#: Larger arrays in a file are refused: 2**28 events are 4 GiB of addresses alone.
MOST_EVENTS = 1 << 28


@dataclass(frozen=True)
class Replay:
    """What a replay came to. Sizes are bytes; peaks are over the replay, `peak_bytes_live` of what
    was asked for."""

    addresses: NDArray[np.uint64]
    failed: int
    seconds: float
    peak_bytes_live: int
    peak_bytes_in_use: int
    peak_bytes_reserved: int

    @property
    def events(self) -> int:
        return len(self.addresses)

    @property
    def ns_per_event(self) -> float:
        return self.seconds * 1e9 / self.events if self.events else 0.0


class Trace:
    """An allocation history.

    Arrays of one length: `op` (0 allocates, 1 frees), `id` (the allocation's number), `size`
    (bytes; 0 at a free) and `stream` (ordinal of the owning stream; None: all 0). An id may be used
    again once it is freed; ids never freed are live at the end. `meta` is any JSON value. Raises
    TraceError where the events make no sense.

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

        self.op = _column("op", op, np.uint8)
        self.id = _column("id", id, np.uint32)
        self.size = _column("size", size, np.uint64)
        self.stream = (
            np.zeros(len(self.op), np.uint16)
            if stream is None
            else _column("stream", stream, np.uint16)
        )
        self.meta = meta
        lengths = {len(self.op), len(self.id), len(self.size), len(self.stream)}
        if len(lengths) > 1:
            raise TraceError(f"op, id, size and stream differ in length: {sorted(lengths)}")
        self._numbers, self._number_count = _dense(self.id)
        fault = find_fault(self.op, self._numbers, self.size, self._number_count)
        if fault is not None:
            raise TraceError(f"event {fault[0]}: {fault[1]}")

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
        frees = self.op[order] == FREE
        change[order[frees]] = -change[order[np.flatnonzero(frees) - 1]]
        return int(np.cumsum(change).argmax())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Reads an `.npz` with these arrays, and a JSON text `meta` if it has one. Nothing in it is
        executed.

        Raises TraceError, in one line that names the file and the fault, and OSError where it
        cannot be opened.
        """
        import numpy as np

        try:
            with open(path, "rb") as raw:
                if not zipfile.is_zipfile(raw):
                    raise TraceError("it is no .npz archive")
                raw.seek(0)
                with np.load(raw, allow_pickle=False) as file:
                    columns = {name: _member(file, name) for name in ("op", "id", "size")}
                    stream = _member(file, "stream") if "stream" in file.files else None
                    meta = _meta(file)
            return cls(**columns, stream=stream, meta=meta)
        except TraceError as error:
            raise TraceError(f"{os.fspath(path)}: {error}") from None
        except OSError:
            raise
        except (
            Exception
        ) as error:  # BadZipFile, zlib.error, and what else a damaged archive provokes
            fault = " ".join(f"{type(error).__name__}: {error}".split())
            raise TraceError(f"{os.fspath(path)}: it is damaged ({fault})") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an `.npz` that `load`, or any NumPy, reads."""
        import numpy as np

        with open(path, "wb") as file:
            np.savez_compressed(
                file,
                op=self.op,
                id=self.id,
                size=self.size,
                stream=self.stream,
                meta=json.dumps(self.meta),
            )

    def closed(self) -> Trace:
        """This trace, and behind it a free of everything that it leaves live: it can be replayed
        again and again."""
        import numpy as np

        last = np.full(self._number_count, -1, np.int64)
        last[self._numbers] = np.arange(len(self))
        open_at = last[(last >= 0)]
        open_at = np.sort(open_at[self.op[open_at] == ALLOC])
        return Trace(
            np.concatenate([self.op, np.full(len(open_at), FREE, np.uint8)]),
            np.concatenate([self.id, self.id[open_at]]),
            np.concatenate([self.size, np.zeros(len(open_at), np.uint64)]),
            np.concatenate([self.stream, self.stream[open_at]]),
            meta=self.meta,
        )

    def replay(
        self, allocator: Allocator, *, progress: Callable[[int], None] | None = None
    ) -> Replay:
        """Runs every event through an allocator, in one compiled loop with the GIL released.

        A refused allocation counts as failed and its free is passed over. What the trace leaves
        live stays live: `closed()` frees it. `progress` is called now and then with the number of
        events done. Where a sub-allocator raises, what the replay has allocated is freed, and the
        error goes on.
        """
        import numpy as np

        addresses = np.empty(len(self), np.uint64)
        handles = np.empty(self._number_count, np.uint32)
        run = Run(allocator, self.op, self._numbers, self.size, self.stream, handles, addresses)
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
    """One contiguous, one-dimensional array of the right type; TraceError where values do not fit
    into it."""
    import numpy as np

    array = np.asarray(values)
    if array.ndim != 1:
        raise TraceError(f"{name} has {array.ndim} dimensions: it must have one")
    if array.size and array.dtype.kind not in "iu":
        raise TraceError(f"{name} holds {array.dtype}: it must hold integers")
    top = np.iinfo(dtype).max
    if array.size and array.dtype != dtype and (int(array.min()) < 0 or int(array.max()) > top):
        raise TraceError(f"{name} holds numbers outside 0 to {top}")
    return np.ascontiguousarray(array, dtype)


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
    return inverse.astype(np.uint32), len(unique)


def _member(file: Any, name: str) -> NDArray[Any]:
    if name not in file.files:
        raise TraceError(f"it holds no array {name!r}")
    info = file.zip.getinfo(f"{name}.npy")
    if info.file_size > 8 * MOST_EVENTS + 4096:
        raise TraceError(
            f"{name} unpacks to {info.file_size} bytes: at most {MOST_EVENTS} events are read"
        )
    array: NDArray[Any] = file[name]
    return array


def _meta(file: Any) -> Any:
    if "meta" not in file.files:
        return None
    try:
        return json.loads(str(_member(file, "meta").item()))
    except ValueError as error:
        raise TraceError(f"its meta is no JSON ({error})") from None
