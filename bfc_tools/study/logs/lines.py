"""The lines of a log, without what terminals, loggers and containers put around them."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

#: The longest piece that is read at once. A line that has no end is read in such pieces.
LONGEST = 1 << 16

#: What a line must have, in any case, to be of use here, or for the lines behind it.
SIGNAL = re.compile(
    r" of size|Next region|\bBin \(|\bBin for|bfc_allocator|BFCAllocator|RESOURCE_EXHAUSTED"
    r"|memory_limit_|Sum Total|Chunks of size|Stats:|OOM|esource exhausted|ut of memory"
    r"|to allocate|Allocator |allocation:|memory summary|central gap|growth hint|rematerialization"
    r"|\b(?:Limit|InUse|MaxInUse|NumAllocs|MaxAllocSize|Reserved|PeakReserved|LargestFreeBlock):"
    r"|[*_]{3}|is free|in use|by PyTorch|unallocated|total capacity|op_name=|Size: |Buffer \d"
    r"|Currently alloc|Requested |Device limit|according to CUDA"
    r"|OutOfMemory|Operator:|XLA Label|exceed|bad_alloc|MemoryError|allocate memory|Killed"
    r"|DefaultCPUAllocator"
)

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
#: The time and the stream that Kubernetes puts before each line, and whether the line goes on.
_KUBERNETES = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-][\d:]+) (?:stdout|stderr) ([FP]) ")
#: Keys of a logger's objects that hold the text, and those that say whose it is.
_TEXTS = ("log", "message", "msg", "textPayload", "text", "MESSAGE", "body", "event", "line",
    "exception_message", "error")  # fmt: skip
_NAMES = ("rank", "pod_name", "pod", "container_name", "container", "worker", "host", "hostname")

#: How launchers and loggers name a process before its lines.
_LABELS = (
    re.compile(r"\[(rank ?\d{1,6})\]", re.IGNORECASE),
    re.compile(r"\[(?:default)(\d{1,6})\]"),
    re.compile(r"\b(rank[=:_ ]\d{1,6})\b", re.IGNORECASE),
    re.compile(r"\(([\w.:+-]{1,80} (?:rank=\d+ )?pid=\d{1,10})(?:, ip=[\w.:]+)?\)"),
    re.compile(r"^\[(\d{1,6}(?:,\d{1,6})?)\](?:<std(?:err|out)>)?:"),
    re.compile(r"^ {0,5}(\d{1,5}): "),
    re.compile(r"^([\w./-]{1,80}) {0,60}\| "),
    re.compile(r"^\[((?:pod/)?[\w.-]{1,80}/[\w./-]{1,80})\] "),
)
#: What every label has: most lines have none, and there are millions.
_MAY_BE_LABELLED = re.compile(r"[\[(|]|rank|Rank|^ {0,5}\d{1,5}: ")
#: The thread that glog and absl name.
_THREAD = re.compile(r"\b[IWEF]\d{4} \d\d:\d\d:[\d.]+\s+(\d{1,10}) ")
#: What stands before the text of a logger: a time, a level, a place in a program.
_BEFORE = re.compile(
    r"(?:[IWEF]\d{4} \d\d:\d\d:[\d.]+\s+\d+ "
    r"|\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]?\d*(?:Z|[+-]\d\d:?\d\d)?:? *(?:[IWEF] )?)"
    r"(?:[\w./\\:-]{1,200}:\d{1,6}\] )?"
)


class Line(NamedTuple):
    """A line of a log."""

    number: int
    text: str  # without escapes, and without what stands around it
    whose: str  # the rank, worker, pod or container that a logger names; "" if none
    thread: str  # the thread that a logger names; "" if none


def lines_of(file: IO[bytes]) -> Iterator[Line]:
    """The lines that may be of use. What is no text becomes U+FFFD. A line above 64 KiB comes in
    pieces, so that memory is bounded whatever the file holds.

    >>> import io
    >>> text = b"[rank3]: W1129 10:00:00.5 77 a.cc:5] Sum Total of in-use chunks: 5B\\n"
    >>> [(line.whose, line.thread, line.text[-2:]) for line in lines_of(io.BytesIO(text))]
    [('rank3', '77', '5B')]
    """
    text = io.TextIOWrapper(file, encoding=_encoding_of(file), errors="replace", newline=None)
    try:
        yield from _lines_of(text)
    finally:
        text.detach()  # whoever has opened the file closes it


def _lines_of(text: io.TextIOWrapper) -> Iterator[Line]:
    number, held, goes_on = 0, "", 0
    while raw := text.readline(LONGEST):
        number += 1
        if " of size" not in raw and not SIGNAL.search(raw):
            goes_on -= 1
            if goes_on < 0 and not held:
                continue
        else:
            goes_on = _FOLLOWING
        part, is_partial = _of_kubernetes(raw)
        if is_partial and len(held) < LONGEST:
            held += part.rstrip("\n")
            continue
        part, held = held + part, ""
        for inner, whose in _of_objects(part):
            yield _line(number, inner, whose)
    if held:
        yield _line(number, held, "")


#: How many lines behind one with a signal are passed on, too: texts are wrapped.
_FOLLOWING = 6


def _encoding_of(file: IO[bytes]) -> str:
    """UTF-16 if it begins so, as what PowerShell writes, or UTF-8."""
    head = file.read(2)
    file.seek(0)
    return "utf-16" if head in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


def _of_kubernetes(raw: str) -> tuple[str, bool]:
    found = _KUBERNETES.match(raw)
    return (raw, False) if found is None else (raw[found.end() :], found[1] == "P")


def _of_objects(text: str) -> Iterator[tuple[str, str]]:
    """The texts of a logger's JSON object, and whose it is; or the line itself."""
    if not text.startswith("{"):
        yield text, ""
        return
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    message = next((found[key] for key in _TEXTS if key in found), None) if _is(found) else None
    if not isinstance(message, str):
        yield text, ""
        return
    whose = _name_in(found)
    for line in message.splitlines():
        yield line, whose


def _is(found: Any) -> bool:
    return isinstance(found, dict)


def _name_in(found: dict[str, Any]) -> str:
    """The rank, pod or container that an object names, at most three objects deep."""
    level: list[dict[str, Any]] = [found]
    for _ in range(4):
        for one in level:
            for key in _NAMES:
                if isinstance(one.get(key), (str, int)) and not isinstance(one.get(key), bool):
                    name = str(one[key])[:80]
                    return f"rank{name}" if key == "rank" and name.isdigit() else name
        level = [inner for one in level for inner in one.values() if _is(inner)]
    return ""


def _line(number: int, raw: str, whose: str) -> Line:
    text = raw.rstrip("\r\n")
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    if not text.isprintable():
        text = _CONTROLS.sub(" ", text)
    head = text[:400]
    thread = _THREAD.search(head)
    label, end = _label(head) if _MAY_BE_LABELLED.search(head) else ("", 0)
    return Line(number, text[end:], whose or label, "" if thread is None else thread[1])


def _label(head: str) -> tuple[str, int]:
    """The name that a launcher puts before a line, and where the line goes on behind it."""
    for pattern in _LABELS:
        found = pattern.search(head)
        if found is not None:
            name = found[1]
            is_rank = name.isdigit() and "|" not in found[0]
            name = f"rank{name}" if is_rank else name
            end = found.end() if found.start() <= 1 else 0
            end += 2 * (end > 0 and head[end : end + 2] == ": ")
            end += end > 0 and found[0].endswith(")") and head[end : end + 1] == " "
            return re.sub(r"(?i)^rank[ =:_]", "rank", name), end
    return "", 0


def bare(text: str) -> str:
    """A line's text behind the time, the level and the place that a logger puts before it.

    >>> bare("2025-01-05 09:48:28.754850: I xla/bfc_allocator.cc:1094] Next region of size 256")
    'Next region of size 256'
    """
    found = None
    for found in _BEFORE.finditer(text[:400]):  # noqa: B007
        pass
    return text if found is None else text[found.end() :]


def owned(line: Line, before: Line | None) -> Line:
    """A line that names nobody goes on from the line before it, if no logger began it."""
    if line.whose or line.thread or before is None or not before.whose:
        return line
    return line if bare(line.text) != line.text else line._replace(whose=before.whose)
