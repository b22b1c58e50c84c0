"""How a recorded run ran out of memory, as one sentence: it stands at the top of all that is shown
of such a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from dataclasses import replace as with_
from typing import Any

from bfc.errors import TraceError
from bfc.libraries import np
from bfc.policies._caching import CachingAllocator
from bfc.pytorch.layout import Sizes
from bfc.pytorch.rules import NEWEST
from bfc.pytorch.sizes import MIN_BLOCK, MOST_SMALL, SMALL_SEGMENT, round_up
from bfc.pytorch.words import CONF, SEGMENT_MAP
from bfc.trace import Trace
from bfc.units import format_bytes
from bfc_tools.study.candidates import CACHING, EXPANDABLE, Point, replay
from bfc_tools.study.counting import CountedPages, device_for, was_predicted
from bfc_tools.study.recorded_settings import refusals_of, shown, stream_before, with_requests
from bfc_tools.study.segments import of_recording, streams_at_start, up_to
from bfc_tools.study.source_lines import Lines, short

#: Why a request was refused: what was free was in pieces, or kept for other streams or pools; a
#: limit stood before it; it is larger than all that PyTorch could have; or too much was live.
PIECES, ELSEWHERE, LIMIT, REQUEST, CAPACITY = "pieces", "elsewhere", "limit", "request", "capacity"


@dataclass(frozen=True)
class RanOut:
    """How a recorded run ran out of memory. `print` shows it as one sentence. Sizes are in bytes.

    Of several refusals it is the one that ended the run, or else the first.

    Attributes
    ----------
    nbytes : int
        What was refused.
    line : str
        The line of the program that asked for it, such as "train.py:61 in step"; empty if the
        recording has no stacks.
    event : int
        How many events of the trace were before it.
    refusals : int
        How many requests were refused in all.
    went_on : bool
        Whether the program allocated again afterwards.
    live : int
        What the program had asked for and not freed.
    reserved : int
        What the allocator had taken from the device.
    free_in_segments : int
        What was free in that, and could have served such a request, had it been one piece.
    largest_free : int
        The largest piece of it.
    free_elsewhere : int
        What was free in what is kept for other streams, private pools, or requests of other sizes.
    free_on_device : int
        What the device had left.
    cause : str
        "pieces": enough was free, but not in one piece. "elsewhere": enough was free, but most of
        it is kept for other streams or pools. "limit": the device had enough. "request": it was
        asked for more than everything. "capacity": too much was live.
    most_line : str
        The line, or the owner, that held most; empty if the recording names none.
    most_bytes : int
        What it held.
    to_try : str
        What to try.
    """

    nbytes: int
    line: str
    event: int
    refusals: int
    went_on: bool
    live: int
    reserved: int
    free_in_segments: int
    largest_free: int
    free_elsewhere: int
    free_on_device: int
    cause: str
    most_line: str = ""
    most_bytes: int = 0
    to_try: str = ""

    @property
    def sentence(self) -> str:
        """All of it."""
        at = f" at {self.line}" if self.line else " (the recording does not say by which line)"
        return (
            f"It ran out of memory: {format_bytes(self.nbytes)} were refused{at}{self._others()}, "
            f"where {format_bytes(self.live)} were live; {self._free()}: {self._cause()}; "
            f"try {self.to_try}."
        )

    def __str__(self) -> str:
        return self.sentence

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it.

        Returns
        -------
        dict
            The attributes, and "sentence".
        """
        return {**asdict(self), "sentence": self.sentence}

    def _others(self) -> str:
        others = self.refusals - 1
        if self.went_on:
            first = f"the first of {self.refusals} refusals; " if others else ""
            return f" ({first}the program went on)"
        if not others:
            return ""
        return f" (after {others} refusal{'s' if others > 1 else ''} that it survived)"

    def _free(self) -> str:
        """What was free, and where."""
        free, reserved = format_bytes(self.free_in_segments), format_bytes(self.reserved)
        text = (
            f"of the {reserved} reserved {free} were free for such a request, in pieces of at most "
        )
        text += format_bytes(self.largest_free)
        if not self.largest_free:
            text = f"of the {reserved} reserved nothing was free for such a request"
        if self.cause == ELSEWHERE:
            other = format_bytes(self.free_elsewhere)
            text += f", {other} were free for other streams, private pools or sizes"
        return f"{text}, and {format_bytes(self.free_on_device)} on the device"

    def _cause(self) -> str:
        free = self.free_in_segments + self.free_on_device
        if self.cause == LIMIT:
            return "a limit of the program's refused it, since the device had enough"
        if self.cause == REQUEST:
            most = format_bytes(self.reserved + self.free_on_device)
            return f"this is more than there is, {most} in all"
        if self.cause == PIECES:
            return f"this is fragmentation, since {format_bytes(free)} would do in one piece"
        if self.cause == ELSEWHERE:
            enough = format_bytes(free + self.free_elsewhere)
            return f"this is a matter of streams and pools, since {enough} in all would do"
        missing = format_bytes(self.nbytes - free)
        return f"this is capacity, since {missing} would be missing even if that were one piece"


@dataclass(frozen=True)
class _Piece:
    """Free memory that lies in one piece. The stream is a number of the trace."""

    nbytes: int
    stream: int
    pool: str
    is_small: bool


@dataclass(frozen=True)
class _Call:
    """What asked for the memory: its stack, its stream as a number of the trace, its pool."""

    stack: int
    stream: int
    pool: str = ""


def ran_out(trace: Trace) -> RanOut | None:
    """Say how a recorded run ran out of memory, or one that was predicted with `oom=True`.

    Parameters
    ----------
    trace : Trace
        The run. Only if it was read with its stacks, the line of the program is known.

    Returns
    -------
    RanOut or None
        None if nothing was refused, or the trace does not say.

    Notes
    -----
    Cost: about that of two replays.

    Examples
    --------
    >>> import bfc
    >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("64 MiB"))
    >>> allocator.record_history(context=None)
    >>> kept = allocator.allocate("40 MiB")
    >>> refused = allocator.try_allocate("30 MiB")
    >>> found = bfc.study.ran_out(bfc.Trace.from_snapshot(allocator.snapshot()))
    >>> found.cause, found.free_on_device >> 20
    ('capacity', 24)
    """
    refused, ended = refusals_of(trace)
    if not refused:
        return None
    number = len(refused) - 1 if ended else 0
    event, nbytes, free = refused[number]
    try:
        found = _predicted if was_predicted(trace) else _recorded
        call, reserved, pieces = found(trace, number, event, nbytes)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, TraceError):
        return None  # a meta of somebody else's, or that was damaged
    mine = [piece.nbytes for piece in pieces if _serves(piece, call, nbytes)]
    idle = sum(piece.nbytes for piece in pieces)
    most_line, most_bytes = _holds_most(trace, event)
    made = RanOut(
        nbytes=nbytes,
        line=shown(short(_line(trace, call.stack))),
        event=event,
        refusals=len(refused),
        went_on=not ended,
        live=int(trace._live()[event - 1]) if event else 0,
        reserved=reserved,
        free_in_segments=sum(mine),
        largest_free=max(mine, default=0),
        free_elsewhere=idle - sum(mine),
        free_on_device=free,
        cause="",
        most_line=shown(short(most_line)),
        most_bytes=most_bytes,
    )
    made = with_(made, cause=_cause_of(trace, made))
    return with_(made, to_try=_to_try(trace, made, call.stream))


def _cause_of(trace: Trace, found: RanOut) -> str:
    block = taken = found.nbytes
    if _is_pytorchs(trace):
        sizes = Sizes(_settings(trace))
        block = sizes.rounded(found.nbytes)
        taken = max(sizes.segment(block), block)
    free = found.free_in_segments + found.free_on_device
    if found.nbytes > found.reserved + found.free_on_device:
        return REQUEST
    if found.free_on_device >= taken:
        return LIMIT
    if free >= block:
        return PIECES
    return ELSEWHERE if free + found.free_elsewhere >= block else CAPACITY


def _serves(piece: _Piece, call: _Call, nbytes: int) -> bool:
    """Whether PyTorch would look there for such a request."""
    size = piece.is_small == (nbytes <= MOST_SMALL)
    return size and (piece.stream, piece.pool) == (call.stream, call.pool)


def _to_try(trace: Trace, found: RanOut, stream: int) -> str:
    room = found.reserved + found.free_on_device
    size = format_bytes(room)
    if found.cause == LIMIT:
        return "a higher limit (set_per_process_memory_fraction, or a pool's memory_limit)"
    if found.cause == REQUEST:
        return "a smaller request, or a larger device: no setting makes room for it on this one"
    if found.cause == ELSEWHERE:
        return "to do this work on fewer streams, or to let go of private pools and their graphs"
    if found.cause == PIECES:
        if not _is_pytorchs(trace):
            return "BFCAllocator(virtual_memory=True), which joins such pieces"
        if EXPANDABLE in _settings_text(trace):
            return f"other settings, which `bfc advise` with --device {_argument(room)} finds"
        asked = with_requests(trace, [(found.event, found.nbytes, stream)])
        if replay(asked, Point(CACHING, EXPANDABLE), room).completes:
            return f"{EXPANDABLE}, under which a replay on {size} refuses nothing"
        return (
            f"`bfc advise` with --device {_argument(room)}, which tries more than {EXPANDABLE}: "
            "that alone is not enough"
        )
    text = "a smaller batch"
    if found.most_line:
        most = format_bytes(found.most_bytes)
        text += f", or to free what {found.most_line} holds ({most}, the most)"
    return text


def _argument(nbytes: int) -> str:
    return format_bytes(nbytes).replace(" ", "")


def _line(trace: Trace, stack: int) -> str:
    if not 0 < stack < len(trace.stacks):
        return ""
    lines = Lines(trace)
    return lines.text(int(lines.of(np.array([stack], np.uint32))[0]))


def _holds_most(trace: Trace, event: int) -> tuple[str, int]:
    """The line that has most of what is live after so many events, or the owner where there are no
    stacks, and its bytes."""
    live = trace._live_after(event - 1) if event else np.zeros(0, np.intp)
    size = trace.size[live].astype(np.float64)
    lines = Lines(trace)
    nobody = np.full(len(live), -1, np.int64)
    key = nobody if trace.stack is None else lines.of(trace.stack[live])
    by_line = bool((key >= 0).any())
    if not by_line and trace.owner is not None and trace.owners:
        key = trace.owner[live].astype(np.int64)
        key[[not trace.owners[at] for at in key.tolist()]] = -1
    sums = np.bincount(key + 1, size, 1)
    sums[0] = 0
    top = int(sums.argmax())
    if not top:
        return "", 0
    return lines.text(top - 1) if by_line else trace.owners[top - 1], int(sums[top])


# What was free ----------------------------------------------------------------------------------


def _recorded(
    trace: Trace, number: int, event: int, nbytes: int
) -> tuple[_Call, int, list[_Piece]]:
    """What asked, the bytes in segments, and what was free in them: of a recording, by the
    addresses that it has."""
    torch = trace.meta["torch"]
    call, torch = _call_of(trace, torch, number, event)
    addresses = np.array(torch["addresses"], np.uint64)
    segments = of_recording(torch, event, streams_at_start(trace, addresses))
    live = trace._live_after(event - 1) if event else np.zeros(0, np.intp)
    order = live[np.argsort(addresses[live])]
    blocks = list(zip(addresses[order].tolist(), trace.size[order].tolist(), strict=True))
    is_mapped = EXPANDABLE in _settings_text(trace) or any(
        change[0] == SEGMENT_MAP for change in torch["segment_events"]
    )
    pieces: list[_Piece] = []
    at = 0
    for start, size, stream, pool in zip(
        segments.address, segments.size, segments.stream, segments.pool, strict=True
    ):
        while at < len(blocks) and blocks[at][0] < start:
            at += 1
        first = at
        while at < len(blocks) and blocks[at][0] < start + size:
            at += 1
        inside, is_small = blocks[first:at], size <= SMALL_SEGMENT
        if is_mapped and inside:
            is_small = max(nbytes for _, nbytes in inside) <= MOST_SMALL
        gaps = _gaps(trace, start, start + size, inside, is_small or is_mapped)
        pieces += [_Piece(gap, stream, pool, is_small) for gap in gaps]
    return call, sum(segments.size), pieces


def _call_of(
    trace: Trace, torch: dict[str, Any], number: int, event: int
) -> tuple[_Call, dict[str, Any]]:
    """What asked, and what the recording says of segments until then. A trace from before calls
    were listed has the stream of the event before, and all entries until the next event."""
    calls = torch.get("oom_calls")
    if calls is None:
        return _Call(0, stream_before(trace, event)), torch
    entries, stack, handle, *pool = (int(part) for part in calls[number])
    streams = torch["streams"]
    name = ".".join(map(str, pool)) if any(pool) else ""
    at = streams.index(handle) if handle in streams else -1
    return _Call(stack, at, name), up_to(torch, entries)


def _gaps(
    trace: Trace, start: int, end: int, blocks: list[tuple[int, int]], is_split: bool
) -> Iterator[int]:
    """The free bytes between the blocks of a segment. Of a segment in which PyTorch splits off no
    small rest (`is_split` is False), a small rest belongs to the block before it."""
    sizes = Sizes(_settings(trace))
    reached, slack = start, 0
    for address, nbytes in [*blocks, (end, 0)]:
        if address - reached >= max(slack, MIN_BLOCK):
            yield address - reached
        block = sizes.rounded(nbytes) if _is_pytorchs(trace) else round_up(nbytes, 256)
        reached = max(reached, address + block)
        slack = 0 if is_split else MOST_SMALL + 1
        if not is_split and block >= sizes.most_split:
            slack = sizes.large_page + 1


def _predicted(
    trace: Trace, number: int, event: int, nbytes: int
) -> tuple[_Call, int, list[_Piece]]:
    """The same of a prediction, which is repeated until then, with what was refused before."""
    about = trace.meta["predicted"]
    refused = [
        (at, size, stream_before(trace, at)) for at, size, _ in refusals_of(trace)[0][: number + 1]
    ]
    until = with_requests(trace[:event], refused)[:-1]
    source = device_for(trace, lambda: CountedPages(int(about["limit"])))()
    torch, settings = trace.torch or NEWEST, str(about["settings"])
    with CachingAllocator(source, settings=settings, torch=torch) as allocator:
        until.replay(allocator)
        regions = allocator.snapshot().regions
    pieces = [
        _Piece(chunk.size, region.stream, "", region.kind == "small")
        for region in regions
        for chunk in region.chunks
        if not chunk.in_use
    ]
    call = _Call(int(about["refused_stacks"][number]), refused[-1][2])
    return call, sum(region.size for region in regions), pieces


def _settings(trace: Trace) -> dict[str, Any]:
    torch = trace.meta.get("torch")
    found = torch.get("settings") if isinstance(torch, dict) else None
    return found if isinstance(found, dict) else {}


def _settings_text(trace: Trace) -> str:
    if was_predicted(trace):
        return str(trace.meta["predicted"].get("settings", ""))
    return str(_settings(trace).get(CONF, ""))


def _is_pytorchs(trace: Trace) -> bool:
    """Whether PyTorch's policy placed it: else it is a history of TensorFlow's."""
    return trace.torch is not None or trace.meta.get("source") != "bfc snapshot"
