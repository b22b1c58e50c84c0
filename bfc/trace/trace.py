"""A trace: the requests of a program to an allocator, as arrays of numbers."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, ClassVar, Protocol

from bfc.allocators._allocator import Allocator
from bfc.allocators._play import Run, find_fault
from bfc.errors import TraceError
from bfc.files import named_in_errors, read_arrays, replacing
from bfc.libraries import NDArray, frame_of, np
from bfc.pytorch.rules import VERSIONS
from bfc.suballocators.base import SubAllocator
from bfc.trace import from_snapshot, rmm_log
from bfc.trace._occupancy import fill_cells
from bfc.trace.anonymous import public_meta
from bfc.trace.beginning import AS_PLACED, AS_RECORDED, Beginning, frees_of, gaps_in
from bfc.trace.iterations import Iterations, iterations_of, marked
from bfc.trace.pools import actions_of, checked_marks, checked_pools
from bfc.trace.tables import FrameTable, checked_owners, checked_stacks
from bfc.trace.timeline import Occupancy, Timeline
from bfc.units import format_bytes

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from pandas import DataFrame

    from bfc.snapshots.snapshot import Frame, Snapshot


class Replays(Protocol):
    """What a trace is replayed on beside an `Allocator`: a policy that is written in Python."""

    sub_allocator: SubAllocator
    #: What makes one replay, with the arguments and the members of `bfc.allocators._play.Run`.
    _run: ClassVar[Callable[..., Any]]


#: What an event does. A release gives back to the device all that the allocator caches.
ALLOCATE, FREE, RELEASE = 0, 1, 2
#: The most events that a file may hold.
MOST_EVENTS = 1 << 28
#: The most bytes that each array of a file may unpack to, and all arrays together: 2**28 events in
#: a trace's own types (1, 4, 8 and 2 bytes), or 2**27 if every number takes 8.
MOST_BYTES = {
    "op": 1 << 30,
    "id": 1 << 30,
    "size": 2 << 30,
    "stream": 1 << 30,
    "meta": 64 << 20,
    "torch_addresses": 512 << 20,
    "time_us": 2 << 30,
    "owner": 512 << 20,
    "stack": 1 << 30,
    "owners": 64 << 20,
    "stacks": 1 << 30,
    "pool": 512 << 20,
    "pools": 1 << 20,
    "pool_marks": 64 << 20,
    "frames": 512 << 20,
    "frame_texts": 256 << 20,
    "frame_text_ends": 256 << 20,
    "address": 2 << 30,
    "segment_event": 64 << 20,
    "segment_address": 64 << 20,
    "segment_size": 64 << 20,
}
MOST_BYTES_IN_ALL = (4 << 30) + MOST_BYTES["meta"]
#: What a file has of the events beside the first four, and the arrays of the table of frames.
EXTRA = {"time_us": "uint64", "owner": "uint16", "stack": "uint32", "pool": "uint16"}
TABLES = ("owners", "frames", "stacks", "pools", "pool_marks")
FRAME_ARRAYS = ("frame_texts", "frame_text_ends", "frames")
#: The list of `meta["torch"]` that may be as long as the trace, and is an array in a file.
ADDRESSES = "torch_addresses"
#: Where a run on a GPU was placed: of each event, and of each segment.
PLACED = ("address", "segment_event", "segment_address", "segment_size")


@dataclass(frozen=True)
class Replay:
    """The result of a replay. Sizes are bytes, and peaks are those of the replay alone.

    Attributes
    ----------
    addresses : numpy.ndarray of uint64, shape (events,)
        One for each event: 0 for a free, a release, a refused allocation, and one of 0 bytes.
    failed : int
        The allocations that were refused for lack of memory.
    seconds : float
        The time in the compiled loop, including the sub-allocator but not `progress`.
    peak_bytes_live : int
        The most that the trace had asked for and not freed.
    peak_bytes_in_use : int
        The most in use in the allocator, in whole chunks; other users of it count too.
    peak_bytes_reserved : int
        The most that the allocator held in regions; other users of it count too.
    timeline : Timeline or None
        The figures over time, if `replay` was given `samples`.
    beginning : str
        Of a recording that began in mid-run, where the replay put what was live then: "as recorded"
        or "as placed" by the allocator. Empty where the trace knows its own beginning.
    skipped : int
        The events that were left out: of the gaps between the blocks that were live then.
    """

    addresses: NDArray[np.uint64]
    failed: int
    seconds: float
    peak_bytes_live: int
    peak_bytes_in_use: int
    peak_bytes_reserved: int
    timeline: Timeline | None = None
    beginning: str = ""
    skipped: int = 0

    def _repr_html_(self) -> str:
        """What a notebook shows: the timeline, if there is one, and the figures."""
        from bfc.snapshots import inline

        caption = f"a replay of {self.events} events, {self.failed} refused"
        peaks = {
            "reserved": self.peak_bytes_reserved,
            "in use": self.peak_bytes_in_use,
            "live": self.peak_bytes_live,
        }
        rows = [(name, format_bytes(peak), peak) for name, peak in peaks.items()]
        parts = [inline.table(("peak", "", "bytes"), rows)]
        if self.timeline is not None:
            found = self.timeline
            names = ("reserved", "in_use", "live")
            columns = {name.replace("_", " "): getattr(found, name).tolist() for name in names}
            parts = [inline.lines(caption, found.event.tolist(), columns, self.events), *parts]
        return inline.framed(caption, *parts)

    def to_frame(self) -> DataFrame:
        """The figures as one row of a table of pandas, to be joined with those of other replays.

        Returns
        -------
        pandas.DataFrame
            Columns are the attributes that are numbers, `events` and `ns_per_event`.

        Raises
        ------
        DeviceUnavailableError
            If pandas is not installed.

        Examples
        --------
        >>> import bfc
        >>> trace = bfc.Trace(op=[0, 1], id=[0, 0], size=[1000, 0])
        >>> result = trace.replay(bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")))
        >>> int(result.to_frame()["peak_bytes_reserved"][0]) >> 20
        2
        """
        names = [name for name in self.__annotations__ if name not in ("addresses", "timeline")]
        named = ("events", *names, "ns_per_event")
        return frame_of({name: [getattr(self, name)] for name in named})

    @property
    def events(self) -> int:
        """The number of events that were replayed."""
        return len(self.addresses)

    @property
    def ns_per_event(self) -> float:
        """Nanoseconds for each event that was not left out; 0 if there is none."""
        played = self.events - self.skipped
        return self.seconds * 1e9 / played if played else 0.0


class Trace:
    """An allocation history, as arrays of one length.

    Parameters
    ----------
    op : array_like of int
        0 allocates, 1 frees, and 2 releases what the allocator caches, as
        `torch.cuda.empty_cache()` does.
    id : array_like of int
        The number of the allocation. It may be used again after its free; what is never freed is
        live at the end. A release names no allocation: its id is 0.
    size : array_like of int
        The bytes that are asked for; at a free, anything; at a release, 0.
    stream : array_like of int, optional
        The ordinal of the stream that owns the allocation; None is 0 for all.
    time_us : array_like of int, optional
        When, in microseconds since 1970.
    owner : array_like of int, optional
        Whose allocation it is: a number of `owners`.
    stack : array_like of int, optional
        The calls that led to the event: a number of `stacks`; 0 where it is not known.
    owners : iterable of str, optional
        The names of the owners. By convention the first is "", for allocations without an owner.
    frames : iterable of (str, int, str), optional
        Places in a program: file, line, function.
    stacks : array_like of int, shape (stacks, 2), optional
        Rows of two numbers: the parent, which is the index of an earlier row, and the innermost
        frame, which is an index of `frames`. Row 0 is the empty stack, (0, 0).
    pool : array_like of int, optional
        The private pool that it is for, a number of `pools`; 0 is the default pool. A free needs
        none. A release with a pool gives back what that pool caches, once nobody holds it; with 0,
        all that may go.
    pools : array_like of int, shape (pools, 2), optional
        The ids of the pools, of two numbers each. Row 0 is (0, 0), the default pool. PyTorch's are
        (n, 0) for captured graphs and (0, n) for `MemPool`.
    pool_marks : array_like of int, shape (marks, 3) or (marks, 4), optional
        What becomes of pools: an event, before which it happens; 0 where the capture of a graph
        into the pool begins, 1 where it ends, 2 where a scope such as `use_mem_pool` begins, 3
        where it ends, 4 where nobody holds the pool any more, 5 where a stream belongs to the
        capture, so that nobody can wait for it, and 6 where it does so no more; the number of the
        pool; and that of the stream, of marks 5 and 6.
    meta : JSON value, optional
        Anything that JSON can hold.

    Attributes
    ----------
    meta : JSON value
        As given.

    Raises
    ------
    TraceError
        If the events are not a history: a free of what is not live, an id that is live already, a
        release with an id or a size, arrays of different lengths or types, or a number that is not
        in its table.

    Notes
    -----
    The arrays are copied, and cannot be changed.

    A pool is held from the first allocation from it, or the first capture or scope, until a mark
    says that it is not. What a pool that is held caches goes to nobody else.

    Examples
    --------
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
        time_us: ArrayLike | None = None,
        owner: ArrayLike | None = None,
        stack: ArrayLike | None = None,
        owners: Iterable[str] = (),
        frames: Iterable[tuple[str, int, str]] = (),
        stacks: ArrayLike = (),
        pool: ArrayLike | None = None,
        pools: ArrayLike = (),
        pool_marks: ArrayLike = (),
        meta: Any = None,
    ) -> None:
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
        fault = find_fault(ops, ids, numbers, sizes, count)
        if fault is not None:
            raise TraceError(f"event {fault[0]}: {fault[1]}")
        names, table = checked_owners(owners), FrameTable.of(frames)
        tree = checked_stacks(stacks if len(stacks) else [[0, 0]], len(table))  # type: ignore[arg-type]
        extra = {
            name: None if values is None else _column(name, values, np.dtype(EXTRA[name]).type)
            for name, values in (
                ("time_us", time_us),
                ("owner", owner),
                ("stack", stack),
                ("pool", pool),
            )
        }
        pool_ids = checked_pools(pools)
        tables = {"owner": len(names), "stack": len(tree), "pool": len(pool_ids)}
        _check_extra(extra, len(ops), tables)
        self._pool_ids = pool_ids
        self._pool_marks = checked_marks(pool_marks, len(ops), len(pool_ids))
        self._op, self._id, self._size, self._stream = ops, ids, sizes, streams
        self._numbers, self._number_count = numbers, count
        self._freed_at: NDArray[np.int64] | None = None
        self._structure: Iterations | None = None
        self._extra, self._owners, self._frames, self._stacks = extra, names, table, tree
        self.meta = meta

    @property
    def op(self) -> NDArray[np.uint8]:
        """What an event does, as a read-only uint8 array.

        0 allocates, 1 frees, 2 releases what is cached.
        """
        return self._op

    @property
    def id(self) -> NDArray[np.uint32]:
        """The number of the allocation that an event makes or frees. A read-only uint32 array.

        0 at a release.
        """
        return self._id

    @property
    def size(self) -> NDArray[np.uint64]:
        """The bytes that an event asks for; at a free, as given. A read-only uint64 array."""
        return self._size

    @property
    def stream(self) -> NDArray[np.uint16]:
        """The ordinal of the stream that owns the allocation. A read-only uint16 array."""
        return self._stream

    @property
    def time_us(self) -> NDArray[np.uint64] | None:
        """When each event was, in microseconds since 1970. A read-only uint64 array, or None."""
        return self._extra["time_us"]

    @property
    def owner(self) -> NDArray[np.uint16] | None:
        """Whose allocation it is, a number of `owners`. A read-only uint16 array, or None."""
        return self._extra["owner"]

    @property
    def stack(self) -> NDArray[np.uint32] | None:
        """The calls that led to it, a number of `stacks`. A read-only uint32 array, or None."""
        return self._extra["stack"]

    @property
    def owners(self) -> tuple[str, ...]:
        """The names of the owners."""
        return self._owners

    @property
    def frames(self) -> FrameTable:
        """Places in the program. Each becomes a `bfc.Frame` when it is looked at."""
        return self._frames

    @property
    def stacks(self) -> NDArray[np.uint32]:
        """Each stack's parent and innermost frame. A read-only uint32 array of two columns."""
        return self._stacks

    @property
    def pool(self) -> NDArray[np.uint16] | None:
        """The private pool of an event, a number of `pools`. A read-only uint16 array, or None."""
        return self._extra["pool"]

    @property
    def pools(self) -> NDArray[np.uint64]:
        """The ids of the private pools. A read-only uint64 array of two columns."""
        return self._pool_ids

    @property
    def pool_marks(self) -> NDArray[np.int64]:
        """What becomes of pools: rows of event, mark, pool, stream. A read-only int64 array."""
        return self._pool_marks

    def frames_of(self, event: int) -> tuple[Frame, ...]:
        """The calls that led to an event.

        Parameters
        ----------
        event : int
            Its index.

        Returns
        -------
        tuple of Frame
            The innermost first; empty if they are not known.

        Examples
        --------
        >>> import bfc
        >>> frames = [("train.py", 7, "main"), ("model.py", 3, "forward")]
        >>> stacks = [(0, 0), (0, 0), (1, 1)]
        >>> trace = bfc.Trace([0], [0], [512], stack=[2], frames=frames, stacks=stacks)
        >>> [frame.name for frame in trace.frames_of(0)]
        ['forward', 'main']
        """
        at = 0 if self.stack is None else int(self.stack[event])
        found = []
        while at:
            parent, frame = self._stacks[at].tolist()
            found.append(self._frames[frame])
            at = parent
        return tuple(found)

    def _columns(self) -> dict[str, Any]:
        """The arguments of the constructor, except `meta`."""
        return {
            "op": self.op,
            "id": self.id,
            "size": self.size,
            "stream": self.stream,
            **self._extra,
            "owners": self._owners,
            "frames": self._frames,
            "stacks": self._stacks,
            "pools": self._pool_ids,
            "pool_marks": self._pool_marks,
        }

    def _bare(self, meta: Any) -> Trace:
        """The same events without times, owners and stacks: what a replay needs."""
        columns = self.op, self.id, self.size, self.stream
        pools, marks = self._pool_ids, self._pool_marks
        return Trace(*columns, pool=self.pool, pools=pools, pool_marks=marks, meta=meta)

    def _private_allocations(self) -> int:
        """How many allocations are from private pools."""
        return 0 if self.pool is None else int(((self.op == 0) & (self.pool > 0)).sum())

    def _without_pools(self) -> Trace:
        """The events that are for no private pool, with beginning, version and marks."""
        if self.pool is None:
            return self
        kept, start, freed_at = self.pool == 0, self.beginning, self._frees()
        made = np.flatnonzero(freed_at >= 0)
        kept[freed_at[made]] = kept[made]  # a free needs no pool of its own
        first = Beginning(int(kept[: start.events].sum()), start.settings, start.reserved)
        said: dict[str, Any] = {"torch_version": self.torch}
        said["marks"] = [list(mark) for mark in self._steps(np.flatnonzero(kept))]
        columns = (values[kept] for values in (self.op, self.id, self.size, self.stream))
        return Trace(*columns, meta=first.as_meta() | said)

    def __reduce__(self) -> tuple[object, ...]:
        # A copy or a pickle is checked again: its arrays come back as ones that can be changed.
        return _remade, (type(self), self._columns()), {"meta": self.meta}

    def _with_meta(self, meta: Any) -> Trace:
        """The same events, whose arrays cannot change and are shared, with another `meta`."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.meta = meta
        return made

    def __len__(self) -> int:
        return len(self.op)

    def __repr__(self) -> str:
        return f"<bfc.Trace, {len(self)} events>"

    def __getitem__(self, events: slice) -> Trace:
        """The first events, as in `trace[:n]`. No other slice would be a valid history."""
        if (
            not isinstance(events, slice)
            or events.start not in (None, 0)
            or events.step not in (None, 1)
        ):
            raise TypeError("a trace is cut as trace[:n] only")
        kept = self._columns()
        for name in ("op", "id", "size", "stream", *EXTRA):
            kept[name] = None if kept[name] is None else kept[name][events]
        if len(kept["op"]) < len(self):
            marks = self._pool_marks
            kept["pool_marks"] = marks[marks[:, 0] < len(kept["op"])]
        return Trace(**kept, meta=self.meta)

    @property
    def beginning(self) -> Beginning:
        """What a recording of PyTorch says of its beginning.

        `Trace.from_torch` rebuilds what was live before the history with the first
        `beginning.events` events. These allocate the gaps between the blocks, too, and free them.
        The gaps were never asked for: no figure counts them, and `replay` refuses none.
        """
        return Beginning.of(self.meta, len(self))

    @property
    def torch(self) -> str | None:
        """The version of PyTorch whose rules the recorded run followed, such as "2.15".

        None where the file does not say (`meta["torch_version_sign"]` says why), and for other
        traces. `bfc replay` and `bfc advise` then find out by a replay.
        """
        found = self.meta.get("torch_version") if isinstance(self.meta, dict) else None
        return found if found in VERSIONS else None

    def fullest_event(self) -> int:
        """The first event after which the most requested bytes are live.

        Returns
        -------
        int
            Its index; -1 for an empty trace. Of a recording that began in mid-run, the last of the
            events that rebuild its beginning, or a later one.
        """
        if not len(self):
            return -1
        start = max(self.beginning.events - 1, 0)
        return start + int(self._live()[start:].argmax())

    def peak_bytes_live(self) -> int:
        """The most requested bytes that are live at once.

        Returns
        -------
        int
            Those after `fullest_event()`; 0 for an empty trace. A request counts that was refused.

        Notes
        -----
        This is the peak that `bfc replay`, `bfc advise`, `bfc diff` and `bfc report` show.

        Examples
        --------
        >>> import bfc
        >>> trace = bfc.Trace(op=[0, 0, 1], id=[0, 1, 0], size=[1000, 300, 0])
        >>> trace.peak_bytes_live(), trace.fullest_event()
        (1300, 1)
        """
        start = max(self.beginning.events - 1, 0)
        return int(self._live()[start:].max(initial=0))

    def _frees(self) -> NDArray[np.int64]:
        """The event that frees what each event allocates; -1 where nothing does. It takes a sort,
        so it is kept: the events never change."""
        if self._freed_at is None:
            self._freed_at = frees_of(self.op, self._numbers)
        return self._freed_at

    def _requests(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The events that ask for memory, and the request before which each block is freed; -1 if
        it never is. What rebuilds the gaps of a recording that began in mid-run was never asked
        for, and private pools keep their own memory."""
        asked = (self.op == 0) & (self.size > 0) & ~self._gaps()
        if self.pool is not None:
            asked &= self.pool == 0
        event = np.flatnonzero(asked)
        before = np.concatenate([[0], np.cumsum(asked)])
        freed_at = self._frees()[event]
        return event, np.where(freed_at < 0, -1, before[freed_at])

    def _gaps(self) -> NDArray[np.bool_]:
        """Which events allocate or free a gap of the rebuilt beginning."""
        return gaps_in(self._frees(), self.beginning.events)

    def _live(self) -> NDArray[Any]:
        """The requested bytes that are live after each event: exact, so Python's integers where 64
        bits are too few."""
        fits = float(self.size.sum(dtype=np.float64)) < 2.0**62
        size = self.size.astype(np.int64 if fits else object)
        freed_at = self._frees()
        size[gaps_in(freed_at, self.beginning.events) | (self.op != ALLOCATE)] = 0
        change, made = size.copy(), np.flatnonzero(freed_at >= 0)
        change[freed_at[made]] -= size[made]
        return np.cumsum(change)

    def _repr_html_(self) -> str:
        """What a notebook shows: the live bytes over time."""
        from bfc.snapshots import inline

        live, peak, most = self._live(), self.fullest_event(), self.peak_bytes_live()
        caption = f"{len(self)} events, at most {format_bytes(most)} live, after event {peak}"
        steps = np.arange(1, min(400, len(self)) + 1) * len(self) // max(min(400, len(self)), 1) - 1
        shown = np.unique(np.append(steps, peak)) if len(self) else steps
        columns = {"live": live[shown].tolist()}
        return inline.framed(caption, inline.lines(caption, shown.tolist(), columns, len(self)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a trace from an `.npz` file.

        Parameters
        ----------
        path : str or os.PathLike
            A file that `save` has written, or with the arrays `op`, `id`, `size` and perhaps
            `stream`, `time_us`, `owner`, `stack`, `stacks`, `pool`, `pools` and `pool_marks`, of
            any integer type that holds their numbers, JSON texts `meta` and `owners`, the arrays of
            a `FrameTable`, and an array `torch_addresses`, which becomes the list
            `meta["torch"]["addresses"]`. The arrays `address`, of each event, and `segment_event`,
            `segment_address` and `segment_size` say
            where a run on a GPU was placed: they become `meta["placed"]`, with "addresses" and
            "segments" as those of `meta["torch"]` (`from_torch`).

        Returns
        -------
        Trace
            The trace.

        Raises
        ------
        TraceError
            If it is not such a file; the text names the file and the fault in one line. Also if it
            is not a regular file (a FIFO, a device), holds more than 2**28 events, or would unpack
            to more than about 4 GiB, which is found out before anything is unpacked.
        OSError
            If it cannot be opened or read.

        Notes
        -----
        Nothing in the file is executed. Cost: O(n), and while it reads about twice the memory of
        the arrays.
        """
        with named_in_errors(path, TraceError):
            arrays: dict[str, Any] = read_arrays(
                path, MOST_BYTES, ("op", "id", "size"), MOST_EVENTS, MOST_BYTES_IN_ALL
            )
            text, addresses = arrays.pop("meta", None), arrays.pop(ADDRESSES, None)
            placed = {name: arrays.pop(name, None) for name in PLACED}
            # Before they become lists, which take five times as much
            of_events = {ADDRESSES: addresses, "address": placed["address"]}
            _check_extra(of_events, len(arrays["op"]), {})
            meta = _joined(None if text is None else _json("meta", text), addresses)
            if isinstance(meta, dict) and all(column is not None for column in placed.values()):
                meta["placed"] = _placed(placed)
            return cls(**_with_tables(arrays), meta=meta)

    @classmethod
    def from_torch(
        cls,
        source: str | os.PathLike[str] | IO[bytes],
        *,
        device: int | None = None,
        frames: bool = True,
        owners: Mapping[str, str] | None = None,
    ) -> Trace:
        """Read a memory snapshot of PyTorch.

        Parameters
        ----------
        source : str, os.PathLike or binary file
            What `torch.cuda.memory._dump_snapshot` or `Snapshot.dump` has written.
        device : int, optional
            The device; needed if the file holds the history of several.
        frames : bool, optional
            Read stacks. If False, the trace has no stacks, and owners only from `user_metadata`.
        owners : mapping of str to str, optional
            Rules for owners: a part of a file's path, or a pattern with `*`, and the owner's name.

        Returns
        -------
        Trace
            It begins with events that rebuild what was live before the history: in each segment,
            every block and every gap between blocks is allocated by address, and then the gaps are
            freed. The history follows, with each allocation by the bytes asked for, each free where
            it was completed, and a release where the program emptied the cache. Streams are
            numbered by their first use, and 0 stays 0. What is live at the end is what the file
            says is live.

        Raises
        ------
        TraceError
            If the file is not such a snapshot; the text names the fault and where it is in one
            line. Also if it is not a regular file, is above 1 GiB, has more than 2**25 events of a
            device, or expands to more than one entry, segment or block for each 12 bytes (by lists
            that share them, which PyTorch does not write).
        OSError
            If it cannot be opened or read.

        Notes
        -----
        An allocation's owner is its `user_metadata`. Without that, the first rule that matches the
        file of one of its frames gives the owner. Else it is the outermost frame in the user's own
        code (a Python file that is not installed), as in "train.py:12 in main".

        Nothing in the file is executed: it is not given to Python's unpickler, and everything but
        numbers, texts, lists and dicts with text keys is refused.

        Cost: O(n log n) steps, each with a search in what is live. Memory: about 4 times the file's
        size for a recording, and at most 100 times its size and 32 MiB for any file.

        `meta["torch_version"]` is the version of PyTorch whose rules the run followed, "2.15" for
        2.13 and later, or None: no file of 2.11 or 2.12 says which of the two wrote it.
        `meta["torch_version_sign"]` says how that was told. A warning says if the signs in the file
        contradict each other, or if it is newer than 2.15.

        Private pools are those that the file names, in its entries or in its segments; files of
        older versions name only those of the segments that are there at the end. A file does not
        say when a graph is captured, and when it is gone: a pool counts as held until the first of
        its segments goes back. Files and histories of bfc say both (`pool_marks`).

        `meta["torch"]` holds what else is known:

        - "device": its number.
        - "streams": the handles of the streams, by their number.
        - "settings": the allocator's. The text under "PYTORCH_CUDA_ALLOC_CONF" can be given to a
          `CachingAllocator`, to replay under the settings of the recorded run.
        - "first_recorded_event": how many events rebuild the start.
        - "addresses": where the recorded run placed each allocation; 0 for a free.
        - "segments": [event, address, size] of each segment that was taken.
        - "segment_events": [action, event, address, size, stream] of each entry about a segment;
          the event is the one before which it came.
        - "registered": [address, size] of each segment, and of each range of an expandable one when
          it was first mapped, in the order in which the device gave them. Those from before the
          history come first: the file does not say in which order, and here it is that of their
          addresses.
        - "asleep": [event, bytes, tag] of each tag of a pool of bfc that fell asleep, or woke: then
          the bytes are negative. The event is as in "segment_events". Segments that sleep stay
          among the segments.
        - "oom": [event, size, free bytes of the device] of each refusal.
        - "oom_calls": [entries of "segment_events" before it, stack, handle of its stream, first,
          second] of each refusal, with the two numbers of its pool's id; the stack is 0 where none
          was recorded.
        - "pools": [address, size, first, second] of each segment that is in a private pool at the
          end, with the two numbers of the pool's id.
        - "pool_segments": [event, address, size, first, second] of each segment, or mapped part of
          one, that was taken for a private pool; the event is as in "segment_events", and -1 for
          those from before the history.
        - "waiting_at_the_end": the blocks whose free was not completed; they stay live.
        - "frees_completed_later": the blocks whose free waited for another stream.
        - "private_pool_allocations": how many were in private pools.
        - "segments_not_exact": the segments whose layout no sequence of requests gives.
        - "blocks_of_unsure_size": the blocks from before the history that may have been up to 1 MiB
          larger, which the file does not say.
        - "repairs": how often something was added or left out because the history contradicts
          itself; 0 in a whole recording.
        - "releases_unsure": how often segments went back and nothing says whether
          `torch.cuda.empty_cache()` did it; the trace has no release there.
        - "unknown_actions": actions that are not known.

        Examples
        --------
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

        columns, meta = read(source, device, frames, owners)
        return cls(**columns, meta=meta)

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> Trace:
        """Make a trace of what an allocator recorded, or of what it holds.

        Parameters
        ----------
        snapshot : Snapshot
            Of an allocator: `Allocator.snapshot()`.

        Returns
        -------
        Trace
            Its history, if one was recorded (`record_history`), as `from_torch` would read it from
            the file that `Snapshot.dump` writes. Else what is in use, or waits for a stream, as
            allocations in the order in which they were made.

        Raises
        ------
        TraceError
            If the regions of the snapshot contradict each other, or there are more than 2**16
            streams.

        Notes
        -----
        It has all allocations of the history. A file of PyTorch's format does not hold those whose
        memory was stitched, or sleeps. Of a snapshot of one pool (`Snapshot.of_pool`) it has those
        of the pool.

        In `meta["torch"]`, which is that of `from_torch`, memory that sleeps stays a segment:
        "asleep" says when it falls asleep and wakes. Where memory was stitched, the bytes of
        segments are exact, but a block may lie outside all of them.

        Cost: about as much as `from_torch`, without reading a file.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> allocator.record_history()
        >>> allocator.deallocate_raw(allocator.allocate_raw(1000))
        >>> trace = bfc.Trace.from_snapshot(allocator.snapshot())
        >>> trace.op.tolist(), trace.size.tolist()
        ([0, 1], [1000, 0])
        """
        if len(snapshot._history_columns()):
            columns, meta = from_snapshot.history_of(snapshot)
            return cls(**columns, meta=meta)
        columns, _, _ = from_snapshot.live_in(snapshot)
        return cls(**columns)

    @classmethod
    def from_rmm_log(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a log of RMM.

        Parameters
        ----------
        path : str or os.PathLike
            What `rmm.mr.LoggingResourceAdaptor` or `rmm.enable_logging` has written: a table in CSV
            with the columns Thread, Time, Action, Pointer, Size and Stream, of one device. A column
            Owner, as `log_csv` writes it, is read too.

        Returns
        -------
        Trace
            Its events are in the order of the lines. Streams are numbered by their first use; the
            handles 0 and 1 are both stream 0.

        Raises
        ------
        TraceError
            If it is not such a log; the text names the file, the line and the fault. Also if it is
            not a regular file, is above 1 GiB, or has more than 2**25 lines.
        OSError
            If it cannot be opened or read.

        Notes
        -----
        RMM writes the time of the day without the date: `time_us` counts from midnight, and goes on
        where the clock starts again.

        `meta["rmm"]` holds "streams", their handles; "addresses", where RMM placed each allocation,
        0 for a free; "failures", [event, size] of each refusal; and "repairs", how often a free was
        added or left out because the log contradicts itself, or begins too late.

        Examples
        --------
        >>> import pathlib, tempfile, bfc
        >>> lines = ["Thread,Time,Action,Pointer,Size,Stream",
        ...          "1,14:21:19.998533,allocate,0x30a000000,256,0x2",
        ...          "1,14:21:20.661875,free,0x30a000000,256,0x2"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "log.csv")
        ...     _ = path.write_text(chr(10).join(lines))
        ...     trace = bfc.Trace.from_rmm_log(path)
        >>> trace.op.tolist(), trace.size.tolist()
        ([0, 1], [256, 0])
        """
        columns, meta = rmm_log.read(path)
        return cls(**columns, meta=meta)

    def log_csv(self, path: str | os.PathLike[str], *, addresses: ArrayLike | None = None) -> None:
        """Write the allocations and frees as a log of RMM, which RMM's replay benchmark reads.

        Parameters
        ----------
        path : str or os.PathLike
            The file. One that exists is replaced once the new one is complete.
        addresses : array_like of int, optional
            The address of each event's allocation, such as a replay's `addresses`. None takes the
            recorded ones, or makes some up where none were recorded.

        Raises
        ------
        ValueError
            If there is not one address for each event.
        OSError
            If it cannot be written. A file that existed is unchanged then.

        Notes
        -----
        RMM's format has no releases, and its clock has no date. Where the trace has owners, a
        seventh column, Owner, names them.

        Examples
        --------
        >>> import pathlib, tempfile, bfc
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "log.csv")
        ...     bfc.Trace([0, 1], [0, 0], [1000, 0]).log_csv(path, addresses=[4096, 0])
        ...     path.read_text().splitlines()[1]
        '0,00:00:00.000000,allocate,0x1000,1000,0x0'
        """
        placed = self._recorded_addresses() if addresses is None else list(np.asarray(addresses))
        if len(placed) != len(self):
            raise ValueError(f"there are {len(placed)} addresses for {len(self)} events")
        rmm_log.write(path, rmm_log.rows_of(self, placed), self.owner is not None)

    def _recorded_addresses(self) -> list[Any]:
        """The addresses in `meta`, or else made-up ones at which no two allocations overlap."""
        for part in self.meta.values() if isinstance(self.meta, dict) else ():
            known = part.get("addresses") if isinstance(part, dict) else None
            if isinstance(known, list) and len(known) == len(self):
                return known
        steps = np.where(self.op == ALLOCATE, self.size // 256 * 256 + 256, 0)
        made: list[int] = (np.cumsum(steps, dtype=np.uint64) - steps + (1 << 40)).tolist()
        return made

    def anonymised(self) -> Trace:
        """This trace without anything that names a program or a person.

        Returns
        -------
        Trace
            A new one, with the same events, which replay to the same addresses. It has no times,
            owners, stacks and frames. Of `meta` the numbers of a PyTorch recording are left, and
            the allocator's settings, whose text is the only one that stays. Tags that slept are
            "tag 1", "tag 2".

        Examples
        --------
        >>> import bfc
        >>> trace = bfc.Trace([0], [0], [512], time_us=[7], meta={"model": "secret"})
        >>> bare = trace.anonymised()
        >>> bare.time_us, bare.meta, bare.size.tolist()
        (None, None, [512])
        """
        return self._bare(public_meta(self.meta))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as a compressed `.npz` file, which `load` and NumPy read.

        Parameters
        ----------
        path : str or os.PathLike
            The file, with no ending added. The trace is first written to another file in the same
            folder, which then replaces one that exists.

        Raises
        ------
        TypeError
            If `meta` is not a JSON value.
        ValueError
            If `meta` contains itself.
        TraceError
            If `load` would refuse the file for its size: 2**28 events, 2**26 addresses, 2**24
            characters of other `meta`, or about 4 GiB.
        OSError
            If it cannot be written. A file that existed is unchanged then.

        Notes
        -----
        `meta["torch"]["addresses"]` is written as an array.

        Examples
        --------
        >>> import pathlib, tempfile, bfc
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "run.npz")
        ...     bfc.Trace([0], [0], [1000], meta={"model": "small"}).save(path)
        ...     bfc.Trace.load(path).meta
        {'model': 'small'}
        """
        rest, addresses = _apart(self.meta)
        arrays: dict[str, Any] = {
            name: values
            for name, values in self._columns().items()
            if values is not None and name not in TABLES
        }
        if len(self._owners):
            arrays["owners"] = np.array(json.dumps(self._owners))
        if len(self._frames):
            arrays |= dict(zip(FRAME_ARRAYS, self._frames.arrays, strict=True))
        if len(self._stacks) > 1:
            arrays["stacks"] = self._stacks
        if len(self._pool_ids) > 1:
            arrays["pools"] = self._pool_ids
        if len(self._pool_marks):
            arrays["pool_marks"] = self._pool_marks
        if addresses is not None:
            arrays[ADDRESSES] = addresses
        arrays["meta"] = np.array(json.dumps(rest))
        sizes = {name: values.nbytes for name, values in arrays.items()}
        over = [name for name, size in sizes.items() if size > MOST_BYTES[name]]
        if len(self) > MOST_EVENTS or over or sum(sizes.values()) > MOST_BYTES_IN_ALL:
            raise TraceError(
                f"{os.fspath(path)}: a file holds at most {MOST_EVENTS} events, "
                f"{MOST_BYTES[ADDRESSES] // 8} addresses, a meta of {MOST_BYTES['meta'] // 4} "
                f"characters, and {MOST_BYTES_IN_ALL} bytes"
            )
        with replacing(path) as file:
            np.savez_compressed(file, **arrays)

    def closed(self) -> Trace:
        """This trace, followed by a free of everything that it leaves live, the oldest first.

        Such a trace can be replayed again and again. The frees are at the last event's time.

        Returns
        -------
        Trace
            A new one.

        Notes
        -----
        Cost: O(n), and a copy of the arrays.

        Examples
        --------
        >>> import bfc
        >>> trace = bfc.Trace(op=[0, 0, 1], id=[0, 1, 0], size=[1000, 300, 0])
        >>> trace.closed().op.tolist(), trace.closed().id.tolist()
        ([0, 0, 1, 1], [0, 1, 0, 1])
        """
        open_at = self._live_after(len(self) - 1)
        added: dict[str, Any] = {
            "op": np.full(len(open_at), FREE, np.uint8),
            "id": self.id[open_at],
            "size": np.zeros(len(open_at), np.uint64),
            "stream": self.stream[open_at],
            "time_us": None if self.time_us is None else self.time_us[-1:].repeat(len(open_at)),
            "owner": None if self.owner is None else self.owner[open_at],
            "stack": np.zeros(len(open_at), np.uint32),
            "pool": None if self.pool is None else self.pool[open_at],
        }
        kept = self._columns()
        for name, more in added.items():
            kept[name] = None if kept[name] is None else np.concatenate([kept[name], more])
        return Trace(**kept, meta=self.meta)

    def _live_after(self, event: int) -> NDArray[np.intp]:
        """The events that allocated what is live after an event."""
        last = np.full(self._number_count, -1, np.int64)
        named = np.flatnonzero(self.op[: event + 1] != RELEASE)
        last[self._numbers[named]] = named
        last = last[last >= 0]
        return np.sort(last[self.op[last] == ALLOCATE])

    def iterations(self) -> Iterations:
        """The iterations of the run, such as the steps of a training.

        The marks of the recording name them, where it has some. Else ranges that the program named
        may tell them, as PyTorch records those of `record_function`, of its profiler and of
        optimizers; or its stacks show the loops of the program: an iteration begins where a
        function goes back to an earlier line, and holds nothing. Else they are found by structure:
        windows of requests that come once in each iteration say how many there are, and each begins
        where computation holds the least. Which block is born after which, and how many requests it
        outlives, counts, and not its size: so batches may vary in length, and a few requests may be
        left out or put in.

        Returns
        -------
        Iterations
            In the order of the run. Where there are none, such as in the inference of one prompt,
            its `reason` says why.

        Raises
        ------
        TraceError
            If the marks are not rising numbers of events.

        Notes
        -----
        What comes between iterations, such as an evaluation, has the kind "other". Cost:
        O(n log n), some seconds for a million requests.

        Examples
        --------
        >>> import bfc
        >>> step = [(0, i, 512 << i % 7) for i in range(20)] + [(1, 19 - i, 0) for i in range(20)]
        >>> run = [(op, 20 * k + i, size * (k + 1)) for k in range(5) for op, i, size in step]
        >>> found = bfc.Trace(*zip(*run)).iterations()
        >>> [one.begin for one in found]
        [0, 40, 80, 120, 160]
        """
        meta = self.meta if isinstance(self.meta, dict) else {}
        return marked(self, meta["marks"]) if meta.get("marks") else self._iterations()

    def _iterations(self) -> Iterations:
        """Those that the order of births and deaths shows. They are kept: the events never
        change."""
        if self._structure is None:
            self._structure = iterations_of(self)
        return self._structure

    def replay(
        self,
        allocator: Allocator | Replays,
        *,
        samples: int | None = None,
        progress: Callable[[int], None] | None = None,
        beginning: str | None = None,
    ) -> Replay:
        """Run every event through an allocator, in one compiled loop without the GIL.

        Parameters
        ----------
        allocator : Allocator or bfc.study.PythonPolicy
            Allocations that the trace does not free stay live in it; `closed()` adds the frees.
        samples : int, optional
            Keep a `timeline` of at most so many rows, or 7 if that is fewer.
        progress : callable, optional
            Called now and then with the number of events done.
        beginning : {"as recorded", "as placed"}, optional
            Of a recording that began in mid-run: put what was live then where it lay, as far as
            that can be had, or let the allocator place it. The default is "as recorded" for an
            empty allocator of PyTorch's policy that has the recorded settings and room for what was
            reserved, and "as placed" for any other. A `PythonPolicy` places it in any case.

        Returns
        -------
        Replay
            Addresses, time and peaks. A refused allocation counts as failed, without waiting for
            `retry_seconds`, and its free is skipped.

        Raises
        ------
        TypeError
            If `allocator` is not an allocator.
        ValueError
            If `samples` is below 1, or `beginning` is another text.
        ClosedError
            If the allocator is closed, or becomes so meanwhile.
        SubAllocatorError
            If the device failed, with something other than "out of memory".
        PolicyError
            If a `PythonPolicy` broke a rule, or raised an error.
        MemoryError
            If the host has no memory for the bookkeeping.

        Notes
        -----
        After an error, also one from `progress` or a Ctrl-C, all that the replay has allocated is
        freed.

        At a release the loop stops and calls `allocator.release_free_regions()`.

        Allocations from private pools come from pools of their own, under the recorded ids where
        these are free. The replay holds each pool as long as the program did, and lets all go at
        its end. While a graph is captured, a request for its pool that does not fit is refused
        without a retry, as in a capture; where the trace does not say when that was, it is tried
        again. A `PythonPolicy` has one pool.

        Allocations have the owners of the trace. One without has the owner that is set around this
        call.

        Other threads may use the allocator: their calls and the replay take turns, and a turn of
        the replay is some thousand events. What they allocate counts in the peaks of chunks and
        regions. These peaks of `allocator.stats()` restart with the replay; afterwards they are the
        larger of the old and the new. Two replays at once in one allocator get each other's peaks
        wrong.

        A timeline adds at most a fifth to the time of a replay of 50,000 events or more. Without
        `samples` nothing is added.
        """
        if samples is not None and operator.index(samples) < 1:
            raise ValueError(f"samples is a number of rows from 1 on, not {samples}")
        if not isinstance(allocator, Allocator) and not hasattr(type(allocator), "_run"):
            raise TypeError(f"a trace is replayed on an allocator, not {type(allocator).__name__}")
        if beginning not in (None, AS_RECORDED, AS_PLACED):
            raise ValueError(f"beginning is {AS_RECORDED!r} or {AS_PLACED!r}, not {beginning!r}")
        start = self.beginning
        if isinstance(allocator, Allocator):
            if beginning is None and start.may_lie_as_recorded(allocator):
                beginning = AS_RECORDED
            if start.events and beginning == AS_RECORDED:
                made = self._played(allocator, None, samples, progress)
                if made is not None:
                    return made
                allocator.release_free_regions()  # not even the beginning fits as it lay
        kept = np.flatnonzero(~self._gaps()) if start.events else None
        made = self._played(allocator, kept, samples, progress)
        assert made is not None
        return made

    def _steps(self, kept: NDArray[np.intp] | None) -> list[tuple[int, str]]:
        """Where the steps of a plan begin, as `meta["marks"]` says, among the events that are kept.
        What is no mark is left out."""
        found = []
        marks = self.meta.get("marks") if isinstance(self.meta, dict) else None
        for mark in marks if isinstance(marks, list | tuple) else ():
            event, kind = (
                mark if isinstance(mark, list | tuple) and len(mark) == 2 else (mark, "train")
            )
            if isinstance(event, int) and 0 <= event <= len(self) and isinstance(kind, str):
                found.append((event, kind.split(":")[0]))
        if kept is None:
            return found
        return [(int(np.searchsorted(kept, event)), kind) for event, kind in found]

    def _pool_actions(
        self, op: NDArray[np.uint8], pool: NDArray[np.uint16], kept: NDArray[np.intp] | None
    ) -> list[tuple[int, int, int, int]]:
        """What a replay of the events that are kept does with private pools, and before which."""
        marks = self._pool_marks
        if kept is not None:
            marks = marks.copy()
            marks[:, 0] = np.searchsorted(kept, marks[:, 0])
        return actions_of(op, pool, marks)

    def _played(
        self,
        allocator: Allocator | Replays,
        kept: NDArray[np.intp] | None,
        samples: int | None,
        progress: Callable[[int], None] | None,
    ) -> Replay | None:
        """A replay of the events that are kept. None is all, and then the beginning must lie as
        recorded: if it cannot, the answer is None, and nothing is live."""
        chosen: Any = slice(None) if kept is None else kept
        columns = [values[chosen] for values in (self.op, self._numbers, self.size, self.stream)]
        # The trace's ordinals are not handles. Nothing is queued on any stream, so stream 0 will
        # do.
        if getattr(allocator.sub_allocator, "streams_are_handles", False):
            columns[3] = np.zeros_like(columns[3])
        addresses = np.empty(len(columns[0]), np.uint64)
        handles = np.empty(self._number_count, np.uint32)
        owner = self.owner[chosen] if self.owner is not None and self.owners else None
        made = (*columns, handles, addresses, owner, self.owners)
        if isinstance(allocator, Allocator):
            run = Run(allocator, *made)
        else:
            run = type(allocator)._run(allocator, *made, events=kept)
        first = self.beginning.events
        rebuilt = first if kept is None else int(np.searchsorted(kept, first))
        if isinstance(allocator, Allocator):
            run.set_marks(self._steps(kept))
            if self.pool is not None and hasattr(allocator, "begin_allocate_to_pool"):
                pool = self.pool[chosen]
                run.set_pools(pool, self._pool_ids, self._pool_actions(columns[0], pool, kept))
        if samples is not None:
            run.keep_timeline(min(samples, len(self)), rebuilt)
        if not run.play(progress, rebuilt, give_up=kept is None):
            return None
        timeline = None if samples is None else Timeline._of_rows(run.timeline_rows())
        if kept is not None:
            addresses, places = np.zeros(len(self), np.uint64), addresses
            addresses[kept] = places
            if rebuilt:  # its figures begin behind the gaps, whatever was played last
                kept[rebuilt - 1] = first - 1
            timeline = None if timeline is None else timeline._at(kept)
        return Replay(
            addresses,
            run.failed,
            run.seconds,
            run.peak_bytes_live,
            run.peak_bytes_in_use,
            run.peak_bytes_reserved,
            timeline,
            (AS_RECORDED if kept is None else AS_PLACED) if first else "",
            0 if kept is None else len(self) - len(kept),
        )

    def occupancy(self, addresses: ArrayLike, *, columns: int = 1200, rows: int = 512) -> Occupancy:
        """Which addresses were in use at which time, as a map of cells.

        Parameters
        ----------
        addresses : array_like of int
            Where each allocation was placed, one number for each event: `Replay.addresses`, or a
            recording's `meta["torch"]["addresses"]`. What is 0 is left out.
        columns : int, optional
            How many equal intervals of events; with fewer events, one for each.
        rows : int, optional
            How many equal pieces of the addresses that were used, in whole steps of 2 MiB.

        Returns
        -------
        Occupancy
            The map. Requested bytes count as in use.

        Raises
        ------
        TraceError
            If there is not one address for each event, or one is not a number below 2**64.
        ValueError
            If `columns` or `rows` is below 1.

        Notes
        -----
        Cost: O(events + columns * rows), about the time of a replay for 50,000 events and more.

        Examples
        --------
        >>> import bfc
        >>> trace = bfc.Trace(op=[0, 0, 1, 1], id=[0, 1, 0, 1], size=[1 << 20] * 2 + [0] * 2)
        >>> result = trace.replay(bfc.BFCAllocator(bfc.SimulatedSubAllocator("2 MiB")))
        >>> trace.occupancy(result.addresses, columns=4, rows=2).cells.T.tolist()
        [[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]]
        """
        if operator.index(columns) < 1 or operator.index(rows) < 1:
            raise ValueError(f"columns and rows are counts from 1 on, not {columns} and {rows}")
        placed = _column("addresses", addresses, np.uint64)
        if len(placed) != len(self):
            raise TraceError(f"{len(placed)} addresses for {len(self)} events: one each is needed")
        count = min(columns, len(self))
        ends = (
            np.arange(1, count + 1, dtype=np.uint64) * np.uint64(len(self)) // np.uint64(count or 1)
        )
        cells = np.empty((count, rows), np.float32)
        places = np.empty((self._number_count, 2), np.uint64)
        arrays = self.op, self._numbers, self.size, placed, places, ends, cells
        ranges, cell_bytes = fill_cells(*arrays)
        total = sum(size for _, size in ranges)
        if total:  # the last row that is used may cover fewer bytes
            last = (total - 1) // cell_bytes
            cells[:, last] *= cell_bytes / (total - last * cell_bytes)
        return Occupancy(cells, ends, tuple(ranges), cell_bytes)


def _column(name: str, values: ArrayLike, dtype: type) -> NDArray[Any]:
    """A copy with one dimension and the right dtype. Raises TraceError if the values do not fit."""
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
    """A copy in a bytes object, which cannot be changed: compiled code relies on the values."""
    return np.ndarray(len(array), dtype, array.astype(dtype, copy=False).tobytes())


def _dense(ids: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], int]:
    """The ids as indices into a table that is no larger than a few times the events, whatever the
    ids are."""
    if len(ids) == 0:
        return ids, 0
    top = int(ids.max()) + 1
    if top <= 4 * len(ids) + 1024:
        return ids, top
    unique, inverse = np.unique(ids, return_inverse=True)
    return _fixed(inverse, np.uint32), len(unique)


def _apart(meta: Any) -> tuple[Any, NDArray[np.uint64] | None]:
    """The meta without the addresses of a recording, and the addresses. These are None if they are
    not a list of numbers that an array can hold."""
    torch = meta.get("torch") if isinstance(meta, dict) else None
    if not isinstance(torch, dict) or not isinstance(addresses := torch.get("addresses"), list):
        return meta, None
    if not all(type(address) is int and 0 <= address < 1 << 64 for address in addresses):
        return meta, None
    rest = {name: value for name, value in torch.items() if name != "addresses"}
    return meta | {"torch": rest}, np.array(addresses, np.uint64)


def _joined(meta: Any, addresses: NDArray[Any] | None) -> Any:
    """Puts back together what `_apart` took apart."""
    if addresses is None:
        return meta
    torch = meta.get("torch") if isinstance(meta, dict) else None
    if not isinstance(torch, dict):
        raise TraceError(f"it holds {ADDRESSES}, but no meta of a recording")
    torch["addresses"] = _column(ADDRESSES, addresses, np.uint64).tolist()
    return meta


def _placed(columns: dict[str, Any]) -> dict[str, Any]:
    """Where a run was placed, as `meta["placed"]`."""
    found = [_column(name, columns[name], np.uint64).tolist() for name in PLACED]
    if len({len(column) for column in found[1:]}) > 1:
        raise TraceError(f"{', '.join(PLACED[1:])} differ in length")
    return {"addresses": found[0], "segments": [list(row) for row in zip(*found[1:], strict=True)]}


def _json(name: str, text: NDArray[Any]) -> Any:
    try:
        return json.loads(str(text.item()))
    except ValueError as error:
        raise TraceError(f"its {name} is not JSON ({error})") from None


def _with_tables(arrays: dict[str, Any]) -> dict[str, Any]:
    """The arrays of a file as arguments of the constructor."""
    owners = arrays.pop("owners", None)
    if owners is not None:
        arrays["owners"] = _json("owners", owners)
        if not isinstance(arrays["owners"], list):
            raise TraceError("its owners are not a list of texts")
    parts = [arrays.pop(name, None) for name in FRAME_ARRAYS]
    if any(part is not None for part in parts):
        if any(part is None for part in parts):
            raise TraceError(f"it holds only a part of {', '.join(FRAME_ARRAYS)}")
        arrays["frames"] = FrameTable.of_arrays(*parts)
    return arrays


def _remade(kind: type[Trace], columns: dict[str, Any]) -> Trace:
    return kind(**columns)


def _check_extra(extra: dict[str, Any], events: int, tables: dict[str, int]) -> None:
    """Raises TraceError for a column of another length, or a number that is not in its table."""
    for name, values in extra.items():
        if values is None:
            continue
        if len(values) != events:
            raise TraceError(f"{name} has {len(values)} numbers for {events} events")
        if name in tables and events and int(values.max()) >= tables[name]:
            raise TraceError(f"{name} holds {int(values.max())}: there are {tables[name]} of them")
