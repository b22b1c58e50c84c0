"""The text form of settings: tokens, items, keys, values, and the errors about them.

PyTorch's behaviour, 2.18, describes it. Keys that have no effect on this allocator are read,
checked and kept, so that a text for PyTorch can be used unchanged. A key that the version of
PyTorch does not have is unknown, as in PyTorch, and the error names the version that has it.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bfc.errors import SettingsError
from bfc.pytorch.rules import NEWEST, SINCE, rules_of
from bfc.pytorch.sizes import ENTRIES, GIB, LEAST_LARGE_SEGMENT, MIB, WORD, division_entry

#: The most digits of a number, unless `strict` reads it as PyTorch does.
_MOST_DIGITS = 100
#: How many characters of a wrong value an error shows.
SHOWN = 60
_SEPARATORS = (",", ":", "[", "]")

_LARGE = "large_segment_size_mb"
ROUNDUP = "roundup_power2_divisions"
FRACTION = "per_process_memory_fraction"
_BACKEND = "backend"
_ALIASES = {
    "release_lock_on_hipmalloc": "release_lock_on_cudamalloc",
    "pinned_use_hip_host_register": "pinned_use_cuda_host_register",
}
RESERVE = "expandable_segments_reserve"
RESERVE_BY_CLASS = "expandable_segments_reserve_by_class"
#: What the pairs in the lists of some keys are, for errors.
_PAIRS = {
    ROUNDUP: ("a size in MiB", "a number of divisions"),
    RESERVE_BY_CLASS: ("a name", "a part of the device, or a size in GiB"),
}
#: A size of reserved addresses: a part of the device's memory, or bytes.
Reserve = float | int

#: A value as written: one token, or the pairs of a list.
Value = str | tuple[tuple[str, str], ...]
Item = tuple[str, Value]

_TOKEN = re.compile(r"[,:\[\]]|[^,:\[\]]+")
_SPACE = str.maketrans("", "", " \t\n\v\f\r")
_WHOLE = re.compile(r"([+-]?)(\d+)", re.ASCII)
_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?"
_HEX = r"0x(?:[\da-f]+(?:\.[\da-f]*)?|\.[\da-f]+)(?:p[+-]?\d+)?"
_DIGITS = re.compile(rf"\+?{_DECIMAL}", re.ASCII | re.IGNORECASE)
_REAL = re.compile(rf"[+-]?(?:inf|nan|{_HEX}|{_DECIMAL})", re.ASCII | re.IGNORECASE)
_PLAIN_REAL = re.compile(rf"-?(?:inf|nan|{_DECIMAL})", re.ASCII | re.IGNORECASE)


# Writing -------------------------------------------------------------------------------------


def rendered(value: Value) -> str:
    if isinstance(value, str):
        return value
    return f"[{','.join(f'{interval}:{divisions}' for interval, divisions in value)}]"


def _write_mib(nbytes: int) -> str:
    return str(nbytes // MIB)


def _write_reserve(reserve: Reserve) -> str:
    number = reserve if isinstance(reserve, float) else reserve / GIB
    return repr(number).removesuffix(".0") + ("" if isinstance(reserve, float) else "G")


def _write_reserves(reserves: tuple[tuple[str, Reserve], ...]) -> Value:
    return tuple((name, _write_reserve(reserve)) for name, reserve in reserves)


def _write_divisions(divisions: tuple[int, ...]) -> Value:
    """The first interval also stands for smaller sizes, and ">" for sizes above the last one."""
    top = divisions[-1]
    if top and set(divisions) == {top}:
        return str(top)
    first = next((i for i, n in enumerate(divisions) if n != divisions[0]), ENTRIES) - 1
    last = next((i for i in reversed(range(ENTRIES)) if divisions[i] != top), 0)
    pairs = [(str(1 << i), str(divisions[i])) for i in range(first, last + 1)]
    return (*pairs, (">", str(top))) if top else tuple(pairs)


def written(key: str, value: Any) -> Value:
    """A keyword argument as it would be written in the text."""
    try:
        if key == ROUNDUP and isinstance(value, Mapping):
            return tuple(
                (">" if interval == ">" else whole(interval), whole(divisions))
                for interval, divisions in value.items()
            )
        if key == RESERVE_BY_CLASS:
            return tuple((text(name), reserve(part)) for name, part in value.items())
        return KINDS[key].word(value)
    except (TypeError, AttributeError):
        raise TypeError(f"{key} is {KINDS[key].type}, not {value!r:.{SHOWN}}") from None


def whole(value: Any) -> str:
    if isinstance(value, bool):
        raise TypeError
    number = operator.index(value)
    bits = number.bit_length()
    return str(number) if bits <= 256 else f"{'-' if number < 0 else ''}2**{bits - 1} or more"


def real(value: Any) -> str:
    if isinstance(value, bool | str | bytes):
        raise TypeError
    return repr(float(value))


def flag(value: Any) -> str:
    if not isinstance(value, bool):
        raise TypeError
    return str(value)


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def reserve(value: Any) -> str:
    return value if isinstance(value, str) else real(value)


# Reading -------------------------------------------------------------------------------------


def _shown(text: str) -> str:
    return repr(text) if len(text) <= SHOWN else f"{text[:SHOWN]!r}..."


def read_fields(
    text: str, strict: bool, keys: Keys, large: int, torch: str = NEWEST
) -> dict[str, Any]:
    """The fields that a text changes. `large` is the large segment size before it, and `torch` the
    version whose settings these are."""
    keys = keys.of_version(torch)
    if not isinstance(text, str):
        raise TypeError(f"settings are a text such as '{keys.example}', not {type(text).__name__}")
    items = Items(_TOKEN.findall(text.translate(_SPACE)), strict, keys).read()
    return Reader(strict, keys, large).changes(items)


class Items:
    """Turns tokens into pairs of a known key and its value as written."""

    def __init__(self, tokens: list[str], strict: bool, keys: Keys) -> None:
        self.tokens = tokens
        self.strict = strict
        self.keys = keys
        self.at = 0

    def read(self) -> list[Item]:
        items: list[Item] = []
        seen: set[str] = set()
        while self.at < len(self.tokens):
            key = self.tokens[self.at]
            name = _name(key)
            if not self.keys.has(name):
                raise self.keys.unknown(key)
            if name in seen and not self.strict:
                other = "" if key == name else f" (it is another name of {name})"
                raise self.keys.malformed(key, f"is given twice{other}")
            seen.add(name)
            items.append((key, self._value(key)))
            self._end_of_item(key)
        return items

    def _peek(self) -> str:
        """The token after the current one; "" past the end."""
        return self.tokens[self.at + 1] if self.at + 1 < len(self.tokens) else ""

    def _next(self, key: str, what: str, wanted: str = "") -> str:
        """Goes on to the next token: the wanted separator, or a word. PyTorch, and so `strict`,
        takes any token for any separator."""
        before, found = self.tokens[self.at], self._peek()
        if not found:
            raise self.keys.malformed(key, f"{what} is missing at the end")
        is_right = found == wanted if wanted else found not in _SEPARATORS
        if not is_right and not self.strict:
            raise self.keys.malformed(
                key, f"{what} is missing between {_shown(before)} and {_shown(found)}", found
            )
        self.at += 1
        return found

    def _value(self, key: str) -> Value:
        self._next(key, "a colon", ":")
        is_list = self._peek() == "["
        if is_list and key not in _PAIRS:
            raise self.keys.malformed(key, "this setting takes no list", "[")
        if is_list:
            self.at += 1
            return self._list(key)
        value = self._next(key, "the value")
        if key == RESERVE_BY_CLASS:
            raise self.keys.malformed(key, "this setting takes a list", value)
        return value

    def _list(self, key: str) -> Value:
        pairs: list[tuple[str, str]] = []
        seen: set[str] = set()
        while self._peek() != "]":
            interval = self._next(key, _PAIRS[key][0])
            if self._next(key, "a colon", ":") == "]":  # PyTorch reads the text a second time
                raise self.keys.malformed(key, f"the list ends after {_shown(interval)}", interval)
            pairs.append((interval, self._next(key, _PAIRS[key][1])))
            if interval in seen and not self.strict:
                raise self.keys.malformed(
                    key, f"{_shown(interval)} is given twice in the list", interval
                )
            seen.add(interval)
            if self._peek() != "]":
                self._next(key, "a comma or the closing bracket", ",")
        self.at += 1
        return tuple(pairs)

    def _end_of_item(self, key: str) -> None:
        """Goes on to the next key. The text may end with a comma."""
        separator = self._next(key, "a comma", ",") if self._peek() else ""
        if separator == _LARGE:  # PyTorch looks for this key first, and finds no value
            raise self.keys.malformed(_LARGE, "a colon is missing at the end")
        self.at += 1


def _name(key: str) -> str:
    return _ALIASES.get(key, key)


@dataclass(frozen=True)
class Keys:
    """The keys that a text may have, and the errors about others."""

    kinds: Mapping[str, Kind]
    fixed: Mapping[str, Fixed]
    example: str
    version: str = NEWEST

    def of_version(self, torch: str) -> Keys:
        """These keys in a version of PyTorch."""
        return self if torch == self.version else replace(self, version=rules_of(torch).version)

    def has(self, name: str) -> bool:
        """Whether the version has a key."""
        is_known = name in self.kinds or name in self.fixed
        return is_known and name not in rules_of(self.version).lacks

    def allowed(self, key: str, large: int = 0) -> str:
        """The allowed values of a key, with the large segment size if it is given."""
        text = self.fixed[key].allowed if key in self.fixed else self.kinds[_name(key)].allowed
        return text.replace("{large}", f", here {large // MIB}" if large else "")

    def malformed(self, key: str, fault: str, given: str = "") -> SettingsError:
        return SettingsError(fault, key=key, given=given, allowed=self.allowed(key))

    def unknown(self, key: str) -> SettingsError:
        if _name(key) in rules_of(self.version).lacks:
            return SettingsError(
                f"PyTorch {SINCE[_name(key)]} and later have it, PyTorch {self.version} does not",
                key=key,
                given=key,
                allowed=self.all(),
                hint=f"torch={NEWEST!r} in place of torch={self.version!r}, if that PyTorch runs",
            )
        if key in _SEPARATORS:
            fault, close = f"a setting is missing before {key!r}", []
        else:
            fault = f"there is no setting {_shown(key)}"
            names = self._names()
            close = difflib.get_close_matches(key[:SHOWN].lower(), names, 1)
        hint = close[0] if close else ""
        return SettingsError(fault, given=key, allowed=self.all(), hint=hint)

    def all(self) -> str:
        """All keys, a few on each line."""
        lines = textwrap.wrap(", ".join(self._names()), 100, break_long_words=False)
        return "\n    ".join(["KEY:VALUE,KEY:VALUE with these keys:", *lines])

    def _names(self) -> list[str]:
        return [name for name in (*self.kinds, *self.fixed) if self.has(name)]


class Reader:
    """Checks what was written and converts it to values."""

    def __init__(self, strict: bool, keys: Keys, large: int) -> None:
        self.strict = strict
        self.keys = keys
        self.large = large

    def changes(self, items: Iterable[Item]) -> dict[str, Any]:
        """The changed fields: those that every text resets, and those whose key is in the text."""
        items = list(items)
        for key, value in items:
            if key == _LARGE:  # read first, wherever it is: it sets the minimum of others
                self.large = self._read(key, value)
        changes: dict[str, Any] = {
            "max_split_size": None,
            "max_non_split_rounding": self.large,
            "garbage_collection_threshold": 0.0,
            "roundup_power2_divisions": (0,) * ENTRIES,
            "large_segment_size": self.large,
        }
        for key, value in items:
            if key in self.keys.fixed:
                self.keys.fixed[key].check(key, rendered(value))
            elif key == ROUNDUP:  # repeated ones add up
                changes[key] = self.divisions(value, changes[key])
            elif key == RESERVE_BY_CLASS:
                changes[key] = self.reserves(value)
            elif key == RESERVE:
                found = self.reserve(key, rendered(value))
                changes |= {} if found is None else {key: found}
            elif key != _LARGE:
                changes[self.keys.kinds[_name(key)].field] = self._read(key, value)
        return changes

    def _read(self, key: str, value: Value) -> Any:
        return self.keys.kinds[_name(key)].read(self, key, rendered(value))

    def fault(self, key: str, given: str, what: str) -> SettingsError:
        return SettingsError(
            f"{_shown(given)} {what}",
            key=key,
            given=given,
            allowed=self.keys.allowed(key, self.large),
        )

    def whole(self, key: str, given: str) -> int:
        match = _WHOLE.match(given) if self.strict else _WHOLE.fullmatch(given)
        if match is None:
            raise self.fault(key, given, "is not a whole number")
        sign, digits = match[1], match[2].lstrip("0") or "0"
        if sign and not self.strict:
            raise self.fault(key, given, "has a sign")
        number = int(digits) if len(digits) <= 20 else WORD
        if number >= WORD:
            raise self.fault(key, given, "is not below 2**64")
        return -number % WORD if sign == "-" else number

    def mib(self, key: str, given: str, least: int) -> int:
        number = self.whole(key, given)
        if number < least:
            raise self.fault(key, given, "is too small")
        return min(number, (WORD - 1) // MIB) * MIB

    def mib_above_large(self, key: str, given: str) -> int:
        return self.mib(key, given, self.large // MIB)

    def threads(self, key: str, given: str) -> int:
        number = self.whole(key, given)
        if number.bit_count() != 1 or number > 128:
            raise self.fault(key, given, "is out of range")
        return number

    def flag(self, key: str, given: str) -> bool:
        if given not in ("True", "False"):
            raise self.fault(key, given, "is neither True nor False")
        return given == "True"

    def threshold(self, key: str, given: str) -> float:
        number = self.real(key, given)
        if not 0.0 < number < 1.0:
            raise self.fault(key, given, "is out of range")
        return number

    def fraction(self, key: str, given: str) -> float:
        number = self.real(key, given)
        if not 0.0 <= number <= 1.0:
            raise self.fault(key, given, "is out of range")
        return number

    def real(self, key: str, given: str) -> float:
        match = _REAL.match(given) if self.strict else _PLAIN_REAL.fullmatch(given)
        if match is None:
            raise self.fault(key, given, "is not a number")
        if not self.strict and len(given) > _MOST_DIGITS:
            raise self.fault(key, given, f"has more than {_MOST_DIGITS} digits")
        text = match[0].lower()
        mantissa, _, _ = text.partition("p" if "x" in text else "e")
        try:
            number = float.fromhex(text) if "x" in text else float(text)
        except OverflowError:
            number = math.inf
        tiny = 0.0 < abs(number) < sys.float_info.min and "x" not in text
        if tiny or (number == 0.0 and mantissa.strip("+-0x.")):
            raise self.fault(key, given, "is too close to 0")
        return number

    def divisions(self, value: Value, table: tuple[int, ...]) -> tuple[int, ...]:
        """The table of divisions after this setting."""
        if isinstance(value, str):
            number = self.whole(ROUNDUP, value)
            if number.bit_count() != 1:
                raise self.fault(ROUNDUP, value, "is not a power of two")
            return (number,) * ENTRIES
        entries, last, is_first = list(table), 0, True
        for interval, written in value:
            if interval == ">":
                number = self._listed(interval, written)
                entries[last + 1 :] = [number] * (ENTRIES - 1 - last)
                continue
            mib = self.whole(ROUNDUP, interval)
            if mib.bit_count() != 1:
                raise self.fault(ROUNDUP, interval, "is not a power of two, or '>'")
            number, last = self._listed(interval, written), division_entry(mib)
            entries[0 if is_first else last : last + 1] = [number] * (last + 1 if is_first else 1)
            is_first = False
        return tuple(entries)

    def reserve(self, key: str, given: str) -> Reserve | None:
        """A size of reserved addresses. PyTorch, and so `strict`, warns of a wrong one, and leaves
        it out: None."""
        digits = given[:-1] if given[-1:] in ("G", "g") else given
        number = float(digits) if _DIGITS.fullmatch(digits) and len(digits) <= _MOST_DIGITS else 0.0
        if 0.0 < number < math.inf:
            return int(min(number * GIB, WORD - 1)) if given != digits else number
        if not self.strict:
            raise self.fault(key, given, "is not a part of the device, or a size in GiB")
        warnings.warn(f"{key}: {_shown(given)} is wrong, and is ignored", stacklevel=2)
        return None

    def reserves(self, value: Value) -> tuple[tuple[str, Reserve], ...]:
        """The sizes by class. Of repeated ones the last counts."""
        assert not isinstance(value, str)
        read = {name: self.reserve(RESERVE_BY_CLASS, written) for name, written in value}
        return tuple((name, found) for name, found in read.items() if found is not None)

    def _listed(self, interval: str, written: str) -> int:
        number = self.whole(ROUNDUP, written)
        if number.bit_count() > 1:
            given = f"{interval}:{written}"
            raise self.fault(ROUNDUP, given, "has divisions that are neither 0 nor a power of two")
        return number


@dataclass(frozen=True)
class Kind:
    """How a key is read and written. `word` turns a keyword argument into text."""

    field: str
    read: Callable[[Reader, str, str], Any]
    write: Callable[[Any], Value]
    word: Callable[[Any], str]
    type: str
    allowed: str


def mib_kind(field: str, least: int | None = None) -> Kind:
    """A size in MiB, which is at least the large segment size if no least one is given."""
    read, lowest = Reader.mib_above_large, f"{_LARGE}{{large}}"
    if least is not None:
        read, lowest = partial(Reader.mib, least=least), str(least)
    allowed = f"a whole number of MiB, at least {lowest}"
    return Kind(field, read, _write_mib, whole, "an int", allowed)


def flag_kind(field: str) -> Kind:
    return Kind(field, Reader.flag, str, flag, "a bool", "True or False")


#: The keys, in the order in which they are listed and written.
KINDS = {
    "max_split_size_mb": mib_kind("max_split_size"),
    "max_non_split_rounding_mb": mib_kind("max_non_split_rounding"),
    "garbage_collection_threshold": Kind(
        "garbage_collection_threshold",
        Reader.threshold,
        repr,
        real,
        "a float",
        "a number above 0 and below 1, such as 0.8",
    ),
    ROUNDUP: Kind(
        ROUNDUP,
        Reader.whole,
        _write_divisions,
        whole,
        "an int or a dict of them such as {64: 8, '>': 1}",
        "a power of two such as 4, or a list such as [64:8,256:4,>:1] of sizes in MiB "
        "(powers of two, or '>' for the sizes above) and their divisions (powers of two, or 0)",
    ),
    _LARGE: mib_kind("large_segment_size", LEAST_LARGE_SEGMENT // MIB),
    FRACTION: Kind(
        FRACTION,
        Reader.fraction,
        repr,
        real,
        "a float",
        "a number from 0 to 1",
    ),
    "expandable_segments": flag_kind("expandable_segments"),
    "release_lock_on_cudamalloc": flag_kind("release_lock_on_cudamalloc"),
    "graph_capture_record_stream_reuse": flag_kind("graph_capture_record_stream_reuse"),
    "pinned_use_cuda_host_register": flag_kind("pinned_use_cuda_host_register"),
    "pinned_num_register_threads": Kind(
        "pinned_num_register_threads",
        Reader.threads,
        str,
        whole,
        "an int",
        "a power of two from 1 to 128",
    ),
    "pinned_use_background_threads": flag_kind("pinned_use_background_threads"),
    "pinned_reserve_segment_size_mb": mib_kind("pinned_reserve_segment_size", 1),
    "pinned_max_round_threshold_mb": mib_kind("pinned_max_round_threshold", 0),
    "pinned_max_cached_size_mb": mib_kind("pinned_max_cached_size", 0),
    "pinned_free_catch_all": flag_kind("pinned_free_catch_all"),
    "throw_on_cudamalloc_oom": flag_kind("throw_on_cudamalloc_oom"),
    RESERVE: Kind(
        RESERVE,
        Reader.reserve,
        _write_reserve,
        reserve,
        'a float, or a text such as "40G"',
        "a part of the device's memory above 0, such as 0.5, or GiB such as 40G",
    ),
    RESERVE_BY_CLASS: Kind(
        RESERVE_BY_CLASS,
        Reader.reserve,
        _write_reserves,
        reserve,
        "a dict such as {'capture': 0.25}",
        "a list such as [capture:0.25,workspace:40G] of names and their parts of the device's "
        "memory, or GiB",
    ),
}


@dataclass(frozen=True)
class Fixed:
    """A key with one value that bfc supports, and one that it does not support yet."""

    value: str
    refused: str
    why: str
    instead: str

    @property
    def allowed(self) -> str:
        return f"{self.value}, which is the same as to leave the setting out"

    def check(self, key: str, given: str) -> None:
        if given == self.refused:
            raise SettingsError(
                f"{given} is not possible: {self.why}",
                key=key,
                given=given,
                allowed=self.allowed,
                hint=self.instead,
            )
        if given != self.value:
            what = f"{_shown(given)} is neither {self.value} nor {self.refused}"
            raise SettingsError(what, key=key, given=given, allowed=self.allowed)


FIXED = {
    _BACKEND: Fixed(
        "native",
        "cudaMallocAsync",
        "this allocator is the native backend, and does not replace itself",
        "bfc.CUDASubAllocator(kind='async'), which takes the segments from the driver's "
        "stream-ordered pool",
    ),
}
CACHING = Keys(KINDS, FIXED, "max_split_size_mb:40")
