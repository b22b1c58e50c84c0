"""What a recording says of its own run: its settings, and the most that it reserved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as with_
from typing import Any

from bfc.errors import SettingsError
from bfc.libraries import np
from bfc.pytorch.rules import NEWEST
from bfc.pytorch.settings import CachingSettings
from bfc.pytorch.words import CONF, SEGMENT_CHANGES
from bfc.trace import Trace
from bfc.trace.beginning import reserved_at_the_start
from bfc.units import format_bytes, printable
from bfc_tools.study.candidates import CACHING, Point

#: The most characters of a text that is shown.
LONGEST = 200
#: A peak above this cannot be that of a device.
MOST = 1 << 60


@dataclass(frozen=True)
class Recorded:
    """What a recording says, and what a replay under its own settings reserves.

    Attributes
    ----------
    settings : str or None
        The text of the settings that it was made with; None if it does not say.
    peak_reserved : int or None
        The most bytes in segments; None if the trace has no segments.
    replayed : int or None
        The most bytes in segments when it is replayed under `settings`, or PyTorch's defaults where
        the recording names none; None if that was not replayed.
    capacity : int or None
        The bytes of the device of that replay; None for one without a limit.
    obstacle : str
        Why there is nothing to compare; empty if there is.
    remarks : tuple of str
        What in the recording makes a replay differ.
    torch : str
        The version of PyTorch whose rules the replay follows.
    torch_sign : str
        How that was found.
    """

    settings: str | None
    peak_reserved: int | None
    replayed: int | None = None
    capacity: int | None = None
    obstacle: str = ""
    remarks: tuple[str, ...] = ()
    torch: str = NEWEST
    torch_sign: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether the replay reserves what was recorded, to the byte."""
        return self.peak_reserved is not None and self.peak_reserved == self.replayed

    def __str__(self) -> str:
        """The line that says whether the replay is to be trusted."""
        if self.peak_reserved is None or self.replayed is None:
            if self.obstacle == PREDICTED:
                return "the run was predicted: there is no recording to compare it with"
            return f"not compared with the recorded run: {self.obstacle}"
        named = shown(self.settings) if self.settings else "PyTorch's defaults"
        unsaid = "" if self.settings is not None else " (the file does not say which it had)"
        on = "" if self.capacity is None else f" on a device of {format_bytes(self.capacity)}"
        line = f"replayed under {named}{unsaid}{on}, it reserves {self.replayed} bytes"
        if self.is_exact:
            return f"{line}, as recorded ({format_bytes(self.replayed)})"
        off = (self.replayed - self.peak_reserved) / max(1, self.peak_reserved)
        return "; ".join(
            (f"{line}, but {self.peak_reserved} were recorded ({off:+.2%})", *self.remarks)
        )


#: Why a run of `bfc.predict` is not compared.
PREDICTED = "the run was predicted"


def shown(text: str) -> str:
    """A text from a file, as it can be printed in one line on a terminal."""
    text = printable(text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def read(trace: Trace) -> Recorded:
    """What the `meta` of a trace says about its run, without `replayed`: nothing is replayed. The
    version of PyTorch is that of the trace (`torch_version.decided`), or the newest."""
    meta = trace.meta if isinstance(trace.meta, dict) else {}
    sign = meta.get("torch_version_sign")
    found = _read(meta.get("torch"), trace.torch or NEWEST, trace.pool is not None)
    if "predicted" in meta:
        about = meta["predicted"]
        text = about.get("settings") if isinstance(about, dict) else None
        found = Recorded(text if isinstance(text, str) else None, None, obstacle=PREDICTED)
    sign = shown(sign) if isinstance(sign, str) else ""
    return with_(found, torch=trace.torch or NEWEST, torch_sign=sign)


def _read(torch: Any, version: str, names_pools: bool) -> Recorded:
    if not isinstance(torch, dict):
        return Recorded(None, None, obstacle="the trace says nothing of recorded segments")
    settings = torch.get("settings")
    text = settings.get(CONF) if isinstance(settings, dict) else None
    text = text if isinstance(text, str) else None
    peak = _peak(torch)
    if not peak:
        return Recorded(text, None, obstacle="the recording has no segments")
    try:
        CachingSettings().apply(text or "", strict=True, torch=version)
    except SettingsError as error:
        fault = shown(str(error).splitlines()[0])
        return Recorded(text, peak, obstacle=f"bfc cannot have its settings ({fault})")
    return Recorded(text, peak, remarks=tuple(_remarks(torch, names_pools)))


def point_of(recorded: Recorded) -> Point | None:
    """The point to replay it under; None if nothing can be compared."""
    return None if recorded.obstacle else Point(CACHING, recorded.settings or "")


def known_to(recorded: Recorded) -> list[Point]:
    """The recorded settings as a row among others, if a user could write them down again."""
    try:
        CachingSettings().apply(recorded.settings or "", torch=recorded.torch)
    except SettingsError:
        return []
    is_text = recorded.settings and recorded.settings.isprintable()
    return [Point(CACHING, recorded.settings or "")] if is_text else []


def _peak(torch: dict[str, Any]) -> int | None:
    """The most bytes in segments, from those at the start and each that came or went. None if what
    is listed is not what `Trace.from_torch` lists."""
    try:
        events = torch["segment_events"]
        changes = [SEGMENT_CHANGES.get(entry[0], 0) * int(entry[3]) for entry in events]
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return None
    reserved = peak = reserved_at_the_start(torch)
    if reserved is None or peak is None:
        return None
    for change in changes:
        reserved += change
        peak = max(peak, reserved)
    return peak if 0 <= peak <= MOST else None


def _remarks(torch: dict[str, Any], names_pools: bool) -> list[str]:
    """Remarks on what the reader has counted that a replay cannot repeat."""
    counts = {
        "private_pool_allocations": "allocations were in private pools, which it does not name",
        "frees_completed_later": "frees waited for another stream",
        "segments_not_exact": "segments could not be laid out as they were",
        "blocks_of_unsure_size": "blocks from before the history have unsure sizes",
        "releases_unsure": "releases of the cache are unsure",
    }
    remarks = []
    for key, what in counts.items():
        if names_pools and key == "private_pool_allocations":
            continue
        found = torch.get(key)
        number = len(found) if isinstance(found, list) else found
        if isinstance(number, int) and number > 0:
            remarks.append(f"{number} {what}")
    repairs = torch.get("repairs")
    if isinstance(repairs, dict) and repairs:
        remarks.append("the history contradicts itself, and was repaired")
    return remarks


# Requests that were refused --------------------------------------------------------------------


def refusals_of(trace: Trace) -> tuple[list[tuple[int, int, int]], bool]:
    """The requests that a recorded or predicted run was refused, as (events before it, bytes, free
    bytes of the device), in their order; and whether the last one ended the run. A list that is not
    as it should be says nothing."""
    meta = trace.meta if isinstance(trace.meta, dict) else {}
    try:
        listed = meta["predicted"]["refused"] if "predicted" in meta else meta["torch"]["oom"]
        rows = [(int(event), int(size), int(free)) for event, size, free in listed]
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return [], False
    if not all(0 <= event <= len(trace) and 0 < size < 1 << 63 for event, size, _ in rows):
        return [], False
    return rows, bool(rows) and not (trace.op[rows[-1][0] :] == 0).any()


def with_the_last_refusal(trace: Trace) -> tuple[Trace, int]:
    """The trace with the request whose refusal ended the run, and the bytes of that request; the
    same trace and 0 if no refusal ended it.

    A trace has no event for a refused request. Where nothing is allocated after a refusal, the run
    ended there, and a setting under which it fits must serve this request, too: it is added, and
    freed at once. Refusals that the program survived are left out.
    """
    rows, ended = refusals_of(trace)
    if not ended:
        return trace, 0
    event, size, _ = rows[-1]
    return with_requests(trace, [(event, size, stream_before(trace, event))]), size


def stream_before(trace: Trace, event: int) -> int:
    """The stream of the event before, which is that of a request where nothing says it."""
    return int(trace.stream[event - 1]) if event else 0


def with_requests(trace: Trace, requests: Sequence[tuple[int, int, int]]) -> Trace:
    """A trace of the same events, without stacks, and with requests (events before it, bytes,
    stream) in rising order, each of which is freed at once."""
    unused = np.setdiff1d(np.arange(len(trace) + 1, dtype=np.uint64), trace.id)[0]
    at = np.repeat([event for event, _, _ in requests], 2)
    size = [part for _, nbytes, _ in requests for part in (nbytes, 0)]
    stream = np.repeat([max(number, 0) for _, _, number in requests], 2)
    marks = trace.pool_marks.copy()
    marks[:, 0] += np.searchsorted(at, marks[:, 0]).astype(marks.dtype)
    return Trace(
        np.insert(trace.op, at, [0, 1] * len(requests)),
        np.insert(trace.id, at, unused),
        np.insert(trace.size, at, size),
        np.insert(trace.stream, at, stream),
        pool=None if trace.pool is None else np.insert(trace.pool, at, 0),
        pools=trace.pools,
        pool_marks=marks,
        meta=trace.meta,
    )
