"""RMM's log as the columns of a trace, and the other way round.

The log is a table in CSV with the columns Thread, Time, Action, Pointer, Size and Stream. RMM
writes the time of the day, and an action is "allocate", "allocate failure" or "free"; its documents
also show seconds since 1970, and "deallocate". bfc adds a column Owner, which RMM's tools
ignore.
"""

from __future__ import annotations

import csv
import io
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from bfc.errors import TraceError
from bfc.files import open_regular, replacing

COLUMNS = ("Thread", "Time", "Action", "Pointer", "Size", "Stream")
OWNER = "Owner"
ALLOCATE, FAILURE, FREE = "allocate", "allocate failure", "free"
_FREES = (FREE, "deallocate")

MOST_BYTES = 1 << 30
MOST_ROWS = 1 << 25
MOST_OWNERS = 1 << 16
MOST_STREAMS = 1 << 16
TOP = 1 << 64
DAY = 86_400_000_000  # microseconds

_CLOCK = re.compile(r"(\d{1,2}):(\d{2}):(\d{2})(?:\.(\d{1,9}))?")
_SECONDS = re.compile(r"(\d{1,12})(?:\.(\d{1,9}))?")


class _Rows:
    """The rows of a file, each with its line number for messages."""

    def __init__(self, text: io.TextIOBase) -> None:
        self._reader = csv.reader(text, strict=True)
        head = [name.strip() for name in next(self._reader, [])]
        for name in COLUMNS[1:]:
            if name not in head:
                raise TraceError(f"its first line names no column {name!r}: it is not a log of RMM")
        self._places = [head.index(name) for name in COLUMNS[1:]]
        self._owner = head.index(OWNER) if OWNER in head else -1

    def __iter__(self) -> Iterator[tuple[int, list[str], str]]:
        for row in self._reader:
            line = self._reader.line_num
            if line > MOST_ROWS:
                raise TraceError(f"it has more than {MOST_ROWS} lines")
            if not row:
                continue
            if len(row) <= max(self._places):
                raise TraceError(f"line {line} has {len(row)} columns: {len(COLUMNS)} are expected")
            owner = row[self._owner] if 0 <= self._owner < len(row) else ""
            yield line, [row[place].strip() for place in self._places], owner


class _Days:
    """Converts times of the day to microseconds that continue to rise after midnight."""

    def __init__(self) -> None:
        self._days = self._last = 0

    def microseconds(self, text: str) -> int:
        """A time in microseconds; 0 if the text is not a time."""
        found = _CLOCK.fullmatch(text)
        if found is None:
            found = _SECONDS.fullmatch(text)
            return 0 if found is None else int(found[1]) * 1_000_000 + _fraction(found[2])
        hours, minutes, seconds, fraction = found.groups()
        now = ((int(hours) * 60 + int(minutes)) * 60 + int(seconds)) * 1_000_000
        now += _fraction(fraction)
        if now + DAY // 2 < self._last:
            self._days += 1
        elif self._days and now > self._last + DAY // 2:  # threads write a little out of order
            return (self._days - 1) * DAY + now
        self._last = now
        return self._days * DAY + now


def _fraction(digits: str | None) -> int:
    return int((digits or "0")[:6].ljust(6, "0"))


def _number(text: str, what: str, line: int) -> int:
    """A decimal number, or a hexadecimal one after 0x. "(nil)" is the C library's text for NULL."""
    try:
        value = 0 if text in ("(nil)", "") else int(text, 0)
    except ValueError:
        value = -1
    if not 0 <= value < TOP:
        raise TraceError(f"line {line}: its {what} is {text[:40]!a}: a number is expected")
    return value


class _Log:
    """The events of a log so far. Contradictions in the log are repaired, and counted."""

    def __init__(self) -> None:
        self.op: list[int] = []
        self.id: list[int] = []
        self.size: list[int] = []
        self.stream: list[int] = []
        self.time_us: list[int] = []
        self.owner: list[int] = []
        self.addresses: list[int] = []
        self.streams: dict[int, int] = {0: 0}
        self.owners: dict[str, int] = {"": 0}
        self.failures: list[list[int]] = []
        self.repairs: Counter[str] = Counter()
        self._live: dict[int, tuple[int, int, int]] = {}
        self._next = 0
        self._days = _Days()

    def add(self, line: int, row: list[str], owner: str) -> None:
        time, action, pointer, size, stream = row
        when = self._days.microseconds(time)
        address, nbytes = _number(pointer, "pointer", line), _number(size, "size", line)
        if action == FAILURE:
            self.failures.append([len(self.op), nbytes])
        elif action == ALLOCATE:
            if nbytes >= 1 << 63:
                raise TraceError(f"line {line}: its size is above 2**63 - 1")
            if address in self._live:
                self.repairs["frees_added"] += 1
                self._free(address, when)
            self._allocate(address, nbytes, self._ordinal(stream, line), self._owner(owner), when)
        elif action not in _FREES:
            raise TraceError(f"line {line}: its action is {action[:40]!a}")
        elif address in self._live:
            self._free(address, when)
        elif address:  # what was allocated before the log began
            self.repairs["frees_of_unknown"] += 1

    def _ordinal(self, text: str, line: int) -> int:
        handle = _number(text, "stream", line)
        handle = 0 if handle == 1 else handle  # both are the default stream
        if handle not in self.streams and len(self.streams) == MOST_STREAMS:
            raise TraceError(f"line {line}: more than {MOST_STREAMS} streams")
        return self.streams.setdefault(handle, len(self.streams))

    def _owner(self, name: str) -> int:
        if name not in self.owners and len(self.owners) == MOST_OWNERS:
            return 0
        return self.owners.setdefault(name, len(self.owners))

    def _allocate(self, address: int, size: int, stream: int, owner: int, when: int) -> None:
        if address:  # RMM gives no address for 0 bytes, and frees none
            self._live[address] = self._next, stream, owner
        self._append(0, self._next, size, stream, owner, when, address)
        if not address:
            self._append(1, self._next, 0, stream, owner, when, 0)
        self._next += 1

    def _free(self, address: int, when: int) -> None:
        number, stream, owner = self._live.pop(address)
        self._append(1, number, 0, stream, owner, when, 0)

    def _append(
        self, op: int, number: int, size: int, stream: int, owner: int, when: int, address: int
    ) -> None:
        self.op.append(op)
        self.id.append(number)
        self.size.append(size)
        self.stream.append(stream)
        self.owner.append(owner)
        self.time_us.append(when)
        self.addresses.append(address)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of the constructor of a trace, and the `meta` of `Trace.from_rmm_log`."""
    log = _Log()
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > MOST_BYTES:
                raise TraceError(f"it holds more than {MOST_BYTES} bytes, the most that are read")
            with io.TextIOWrapper(file, "utf-8", newline="") as text:
                for line, row, owner in _Rows(text):
                    log.add(line, row, owner)
    except TraceError as error:
        raise TraceError(f"{os.fspath(path)}: {error}") from None
    except (csv.Error, UnicodeDecodeError) as error:
        fault = " ".join(str(error).split())
        raise TraceError(f"{os.fspath(path)}: it is not a table in CSV ({fault})") from None
    names = ("op", "id", "size", "stream", "time_us")
    columns: dict[str, Any] = {name: getattr(log, name) for name in names}
    if not any(log.time_us):
        del columns["time_us"]
    if len(log.owners) > 1:
        columns |= {"owner": log.owner, "owners": list(log.owners)}
    meta = {
        "source": "RMM log",
        "rmm": {
            "streams": list(log.streams),
            "addresses": log.addresses,
            "failures": log.failures,
            "repairs": dict(sorted(log.repairs.items())),
        },
    }
    return columns, meta


#: Microseconds since 1970, the action, the address, the bytes, the stream, the owner.
Row = tuple[int, str, int, int, int, str]


def write(path: str | os.PathLike[str], rows: Iterable[Row], with_owners: bool) -> None:
    """Writes a log as RMM does: the time of the day in UTC, and addresses with 0x."""
    with replacing(path) as file:
        text = io.TextIOWrapper(file, "utf-8", errors="backslashreplace", newline="")
        out = csv.writer(text, lineterminator="\n")
        out.writerow([*COLUMNS, OWNER] if with_owners else COLUMNS)
        for when, action, address, size, stream, owner in rows:
            row = [0, _clock(when), action, f"{address:#x}", size, f"{stream % TOP:#x}"]
            out.writerow([*row, owner] if with_owners else row)
        text.flush()
        text.detach()


def _clock(time_us: int) -> str:
    seconds, rest = divmod(time_us % DAY, 1_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%H:%M:%S}.{rest:06}"


def handle_of(stream: int) -> int:
    """A handle for a stream that has none: not 1 or 2, which name CUDA's default streams."""
    return stream + 2 if stream else 0


def rows_of(trace: Any, addresses: Iterable[int]) -> Iterator[Row]:
    """The rows for a trace whose allocations have these addresses. Releases are left out, and a
    refused allocation becomes a failure."""
    facts = trace.meta if isinstance(trace.meta, dict) else {}
    part = facts.get("torch") or facts.get("rmm")
    handles = part.get("streams") if isinstance(part, dict) else None
    if not isinstance(handles, list) or not all(type(handle) is int for handle in handles):
        handles = []
    columns = [trace.op, trace.id, trace.size, trace.stream]
    lists = [column.tolist() for column in columns]
    times = itertools.count() if trace.time_us is None else trace.time_us.tolist()
    owners = itertools.repeat(0) if trace.owner is None else trace.owner.tolist()
    live: dict[int, tuple[int, int]] = {}
    for op, number, size, stream, when, owner, address in zip(
        *lists, times, owners, addresses, strict=False
    ):
        handle = handles[stream] if stream < len(handles) else handle_of(stream)
        name = trace.owners[owner] if trace.owners else ""
        if op == 0 and not address and size:
            yield when, FAILURE, 0, size, handle, name
        elif op == 0:
            live[number] = address, size
            yield when, ALLOCATE, address, size, handle, name
        elif op == 1 and number in live:
            at, nbytes = live.pop(number)
            yield when, FREE, at, nbytes, handle, name
