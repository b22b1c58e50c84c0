"""What one line of TensorFlow's or XLA's log says, in the words of TensorFlow 1.0 to 2.21, and of
XLA until 2026."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from bfc_tools.study.logs.sizes import SIZE, Printed, printed, size_in

_TOP = (1 << 64) - 1
#: The most bytes of a chunk, and the highest address: a damaged line may say anything.
MOST, MOST_ADDRESS = 1 << 50, 1 << 62


@dataclass(frozen=True)
class Chunk:
    """A line of one chunk."""

    in_use: bool
    address: int
    nbytes: int
    successor: int | None  # the number of the next one, `_TOP` for the last
    name: str
    waits: bool  # free, but the device may still use it

    @property
    def is_last(self) -> bool:
        """Whether it says that it is the last one of its region."""
        return self.successor == _TOP


@dataclass(frozen=True)
class RegionOf:
    """A line before the chunks of a region."""

    nbytes: int


@dataclass(frozen=True)
class Head:
    """The first line of a dump."""

    allocator: str


@dataclass(frozen=True)
class BinOf:
    """A line of one bin."""

    number: int
    chunks: int
    in_use: int


@dataclass(frozen=True)
class Wanted:
    """The line of the bin in which the request was looked for."""

    asked: Printed | None


@dataclass(frozen=True)
class Refused:
    """A request that an allocator refused."""

    allocator: str
    asked: Printed
    rounded: Printed | None
    name: str  # of the operator that asked
    may_fail: bool  # whether the program had another way


@dataclass(frozen=True)
class Figures:
    """Figures at the end of a dump."""

    values: dict[str, Printed]
    is_stats: bool = False
    grows: bool | None = None
    end: str = ""


@dataclass(frozen=True)
class Map:
    """The occupancy of the memory, in 100 characters."""

    text: str


@dataclass(frozen=True)
class Exhausted:
    """An error that the program sees. `None` where it does not say how much."""

    asked: Printed | None
    device: str
    is_sure: bool = True  # whether these words are only TensorFlow's or JAX's


@dataclass(frozen=True)
class DeviceRefused:
    """The device has refused a region, or memory that was asked of it."""

    asked: Printed


@dataclass(frozen=True)
class Compiled:
    """What XLA says of a program's memory when it compiles it."""

    values: dict[str, Printed]


Word = (
    Chunk | RegionOf | Head | BinOf | Wanted | Refused | Figures | Map | Exhausted | DeviceRefused
    | Compiled
)  # fmt: skip

_CHUNK = re.compile(
    r"(InUse|Chunk|Free) {0,2}at (?:0x)?([0-9a-fA-F]{1,16})(?: next (\d{1,20}))? of size ?"
    r"(\d{1,19})\b(.{0,1000})"
)
_REST = re.compile(r"(?P<names>.*?) ?next (?P<next>\d{1,20})(?: freed_at_count (?P<freed>\d+))?")
_NAMES = re.compile(
    r"(?: tag (?P<tag>\S+))?(?: by op (?P<op>.*?) action_count \d+ step -?\d+)?"
    r"(?: allocation_annotation (?P<note>.*))?"
)
_REGION = re.compile(r"Next region of size ?(\d{1,19})")
_HEAD = re.compile(r"BFCAllocator dump for (\S+)")
_BIN = re.compile(r"\bBin \((\d{1,19})\):\s*Total Chunks: (\d{1,12}), Chunks in use: (\d{1,12})\.")
_WANTED = re.compile(rf"\bBin for {SIZE} was")
_REFUSED = re.compile(
    rf"Allocator \(([^()]{{1,200}})\) ran out of memory trying to allocate {SIZE}"
    r"(?: \(rounded to (\d{1,19})\))?(?: from the \w+ end)?(.*)"
)
_BY_OP = re.compile(r"requested by op ?(\S*)")
#: A figure with its unit, or in bytes.
_FIGURE = rf"(-?\d{{1,20}}\b(?!\.)|-?{SIZE})"
_POOL = re.compile(
    r"(?:total_region_allocated_bytes_|Total bytes in pool|Total size in pool): ?"
    rf"{_FIGURE} memory_limit_: ?{_FIGURE} available (?:bytes|size): ?{_FIGURE}"
)
_SUM = re.compile(rf"Sum Total of in-use chunks: {SIZE}")
_SUMMARY = re.compile(
    rf"memory summary: rounded request {SIZE}, total free in pool {SIZE}, largest free chunk "
    rf"usable by (\w+) end {SIZE}, unallocated bytes {SIZE}, pool size {SIZE}, pool limit {SIZE}"
)
_GAP = re.compile(rf"central gap {SIZE}")
_GROWTH = re.compile(r"growth hint: .{0,300}\(growth (enabled|disabled)")
_STAT = re.compile(
    r"(?:^|[\s:|])(Limit|InUse|MaxInUse|NumAllocs|MaxAllocSize|Reserved|PeakReserved|LargestFreeBlock):\s+"
    r"(\d+(?:\.\d+)?)(?:\s*([KMGTPE]i?B|B))?\s*$"
)
_STATS = {"Limit": "limit", "InUse": "in use", "MaxInUse": "peak in use", "NumAllocs": "requests"}
_MAP = re.compile(r"(?:^|[\s\]])([*_x]{100})\s*$")
_EXHAUSTED = re.compile(
    r"(?:ut of memory (?:while trying to allocate|allocating)|[Ff]ailed to allocate request for)"
    rf" {SIZE}"
)
_SHAPE = re.compile(
    r"OOM when allocating tensor (?:with|of) shape ?\[([\d,]{0,200})\] and type (\w+)(?: on (\S+))?"
)
_DEVICE = re.compile(r"on device ordinal (\d+)|/device:(\w+:\d+)")
_FROM_DEVICE = re.compile(
    r"failed to alloc(?:ate)? (?:[\d.]+\w* \()?(\d{1,19}) bytes\)? from device"
)
_COMPILED = {
    "needs": re.compile(rf"only reduced to {SIZE}"),
    "total": re.compile(rf"(?:^|\s)total allocation: +{SIZE}"),
    "temporary": re.compile(rf"(?:^|\s)preallocated temp allocation: +{SIZE}"),
    "arguments": re.compile(rf"(?:^|\s)parameter allocation: +{SIZE}"),
    "hbm": re.compile(rf"Ran out of memory in memory space \w+\. Used {SIZE} of"),
    "hbm limit": re.compile(rf"Ran out of memory in memory space \w+\. Used \S+ of {SIZE}"),
}  # fmt: skip
_BYTES_OF = {
    "bool": 1, "int8": 1, "uint8": 1, "qint8": 1, "int16": 2, "uint16": 2, "half": 2, "float16": 2,
    "bfloat16": 2, "int32": 4, "uint32": 4, "float": 4, "float32": 4, "int64": 8, "uint64": 8,
    "double": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


def word_of(text: str) -> Word | None:
    """What a line says, or None."""
    for sign, read in _READERS:
        if sign in text:
            found = read(text)
            if found is not None:
                return found
    return None


def chunk_of(text: str) -> Chunk | None:
    """The chunk of a line; None if there is none, or it is not whole."""
    found = _CHUNK.search(text)
    if found is None:
        return None
    kind, address, before, size, rest = found.groups()
    if not 0 < int(size) < MOST or int(address, 16) >= MOST_ADDRESS:
        return None
    end = _REST.match(rest)
    if kind == "InUse" and before is None and end is None:
        return None  # every version that says "InUse" names the successor
    successor = before or (end and end["next"])
    names = _NAMES.fullmatch(end["names"] if end else "")
    name = (names["note"] or names["op"] or "") if names else ""
    is_used = kind != "Free"
    return Chunk(
        is_used,
        int(address, 16),
        int(size),
        None if successor is None else int(successor),
        name.strip()[:300],
        not is_used and bool(end and int(end["freed"] or 0)),
    )


def _region(text: str) -> Word | None:
    found = _REGION.search(text)
    return None if found is None else RegionOf(int(found[1]))


def _head(text: str) -> Word | None:
    found = _HEAD.search(text)
    return None if found is None else Head(found[1][:200])


def _bin(text: str) -> Word | None:
    found = _BIN.search(text)
    if found is None:
        return None
    least = int(found[1])
    number = least.bit_length() - 9
    is_one = least == 256 << max(number, 0)
    return BinOf(number, int(found[2]), int(found[3])) if is_one else None


def _wanted(text: str) -> Word | None:
    found = _WANTED.search(text)
    return None if found is None else Wanted(printed(found[1], found[2]))


def _refused(text: str) -> Word | None:
    found = _REFUSED.search(text)
    if found is None:
        return None
    name, number, unit, rounded, rest = found.groups()
    asked = printed(number, unit)
    if asked is None:
        return None
    by = _BY_OP.search(rest)
    may_fail = "not a failure" in rest
    exact = None if rounded is None else printed(rounded)
    return Refused(name, asked, exact, "" if by is None else by[1][:200], may_fail)


def _figures(values: dict[str, Printed | None]) -> dict[str, Printed]:
    return {name: value for name, value in values.items() if value is not None}


def _pool(text: str) -> Word | None:
    found = _POOL.search(text)
    if found is None:
        return None
    texts = found[1], found[4], found[7]
    sizes = [printed(it) if it.isdigit() else size_in(it.lstrip("-")) for it in texts]
    if texts[2].startswith("-"):
        sizes[2] = Printed(0)
    return Figures(_figures(dict(zip(("pool", "limit", "available"), sizes, strict=True))))


def _sum(text: str) -> Word | None:
    found = _SUM.search(text)
    return None if found is None else Figures(_figures({"sum": printed(found[1], found[2])}))


def _summary(text: str) -> Word | None:
    found = _SUMMARY.search(text)
    if found is None:
        return None
    parts = found.groups()
    end = parts[4]
    numbers = parts[:4] + parts[5:]
    names = ("asked", "free", "largest free", "available", "pool", "limit")
    sizes = [printed(*numbers[2 * at : 2 * at + 2]) for at in range(6)]
    return Figures(_figures(dict(zip(names, sizes, strict=True))), end=end)


def _gap(text: str) -> Word | None:
    found = _GAP.search(text)
    return None if found is None else Figures(_figures({"gap": printed(found[1], found[2])}))


def _growth(text: str) -> Word | None:
    found = _GROWTH.search(text)
    return None if found is None else Figures({}, grows=found[1] == "enabled")


def _stat(text: str) -> Word | None:
    found = _STAT.search(text)
    if found is None:
        return None
    value = printed(found[2], found[3] or "B") if found[2].isdigit() or found[3] else None
    name = _STATS.get(found[1], "")
    if found[1] == "LargestFreeBlock" and value is not None and value.nbytes:
        name = "largest block"  # it is 0 where the version does not count it
    return Figures(_figures({name: value}) if name else {}, is_stats=True)


def _map(text: str) -> Word | None:
    found = _MAP.search(text)
    return None if found is None else Map(found[1])


def _exhausted(text: str) -> Word | None:
    device = _DEVICE.search(text)
    where = "" if device is None else device[1] or device[2]
    found = _EXHAUSTED.search(text)
    if found is not None:
        exact = re.search(r"\((\d{1,19})B\)", text)
        asked = printed(exact[1]) if exact else printed(found[1], found[2])
        return None if asked is None else Exhausted(asked, where, "xhausted" in text.lower())
    shape = _SHAPE.search(text)
    if shape is None:
        is_bare = "RESOURCE_EXHAUSTED" in text or "esource exhausted" in text
        return Exhausted(None, where) if is_bare else None
    width, nbytes = _BYTES_OF.get(shape[2]), 1
    for part in filter(None, shape[1].split(",")):
        nbytes *= int(part)
    return Exhausted(None if width is None else printed(str(nbytes * width)), where)


def _from_device(text: str) -> Word | None:
    found = _FROM_DEVICE.search(text)
    asked = None if found is None else printed(found[1])
    return None if asked is None else DeviceRefused(asked)


def _compiled(text: str) -> Word | None:
    values: dict[str, Printed | None] = {}
    for name, pattern in _COMPILED.items():
        found = pattern.search(text)
        if found is not None:
            values[name] = printed(found[1], found[2])
    return Compiled(_figures(values)) if values else None


_READERS: tuple[tuple[str, Callable[[str], Word | None]], ...] = (
    (" of size", chunk_of),
    ("Next region", _region),
    ("Bin (", _bin),
    ("Bin for", _wanted),
    ("dump for", _head),
    ("ran out of memory trying", _refused),
    ("memory_limit_", _pool),
    ("Sum Total", _sum),
    ("memory summary", _summary),
    ("central gap", _gap),
    ("growth hint", _growth),
    (":  ", _stat),
    ("***", _map),
    ("___", _map),
    ("failed to alloc", _from_device),
    ("allocation:", _compiled),
    ("only reduced to", _compiled),
    ("in memory space", _compiled),
    ("to allocate", _exhausted),
    ("allocating", _exhausted),
    ("OOM when", _exhausted),
    ("RESOURCE_EXHAUSTED", _exhausted),
    ("esource exhausted", _exhausted),
)
