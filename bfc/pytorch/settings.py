"""The settings of PyTorch's caching policy, and the text that they are written in.

They are described in PyTorch's behaviour, 2.18.

The text is the one that PyTorch 2.11 takes in PYTORCH_CUDA_ALLOC_CONF. Keys of that version which
have no bearing on this allocator are read, checked and kept, so that a text can be moved over as
it is.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsFloat, SupportsIndex

from bfc.errors import SettingsError

VARIABLE = "BFC_ALLOC_CONF"
MIB = 1 << 20
#: Every block is a multiple of this, and no smaller.
MIN_BLOCK = 512
#: Blocks up to this stand in small segments.
MOST_SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LEAST_LARGE_SEGMENT = 11 * MIB
#: Blocks from this on get a segment of their own, a multiple of the step.
OWN_SEGMENT = 10 * MIB
SEGMENT_STEP = 2 * MIB
#: Entry i of the divisions is for sizes from 2**(20 + i) bytes on; the first and last entry also
#: for what is smaller and larger.
ENTRIES = 16

_WORD = 1 << 64  # upstream's numbers are unsigned words, and wrap
_MOST_DIGITS = 100  # where a number is not read by prefix
_SHOWN = 60
_SEPARATORS = (",", ":", "[", "]")

_LARGE = "large_segment_size_mb"
_ROUNDUP = "roundup_power2_divisions"
_FRACTION = "per_process_memory_fraction"
_EXPANDABLE = "expandable_segments"
_BACKEND = "backend"
_ALIASES = {
    "release_lock_on_hipmalloc": "release_lock_on_cudamalloc",
    "pinned_use_hip_host_register": "pinned_use_cuda_host_register",
}
#: What PyTorch has in a later version than the one that is followed here.
_LATER = (
    "throw_on_cudamalloc_oom",
    "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
    "pinned_free_catch_all",
    "expandable_segments_reserve",
    "expandable_segments_reserve_by_class",
)

#: A value as written: one token, or the pairs of a list.
_Value = str | tuple[tuple[str, str], ...]
_Item = tuple[str, _Value]

_TOKEN = re.compile(r"[,:\[\]]|[^,:\[\]]+")
_SPACE = str.maketrans("", "", " \t\n\v\f\r")
_WHOLE = re.compile(r"([+-]?)(\d+)", re.ASCII)
_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?"
_HEX = r"0x(?:[\da-f]+(?:\.[\da-f]*)?|\.[\da-f]+)(?:p[+-]?\d+)?"
_REAL = re.compile(rf"[+-]?(?:inf|nan|{_HEX}|{_DECIMAL})", re.ASCII | re.IGNORECASE)
_PLAIN_REAL = re.compile(rf"-?(?:inf|nan|{_DECIMAL})", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class CachingSettings:
    """The settings of PyTorch's caching policy. `apply` and `with_options` make them.

    Attributes
    ----------
    text : str
        The last text that was applied.
    max_split_size : int or None
        In bytes. Larger chunks are not split; None is unlimited.
    max_non_split_rounding : int
        In bytes. How much larger than the request an unsplit chunk may be.
    garbage_collection_threshold : float
        The fraction of the limit above which cached memory is given back; 0 is never.
    roundup_power2_divisions : tuple of int
        16 entries: the divisions for sizes in [1, 2) MiB, [2, 4) MiB, ..., and from 32 GiB on.
    large_segment_size : int
        In bytes, of the segments for medium requests.
    per_process_memory_fraction : float
        The limit as a fraction of the device's total.
    release_lock_on_cudamalloc : bool
        This one and those below are checked, but change nothing in this allocator.
    graph_capture_record_stream_reuse : bool
        No effect.
    pinned_use_cuda_host_register : bool
        No effect here; see `PinnedSettings`.
    pinned_num_register_threads : int
        No effect here; see `PinnedSettings`.
    pinned_use_background_threads : bool
        No effect.
    pinned_reserve_segment_size : int
        No effect here; see `PinnedSettings`.

    Raises
    ------
    SettingsError
        If a field is not what a text could set. Its text says which one, and what is allowed.
    TypeError
        If a field has the wrong type.

    Examples
    --------
    >>> settings = CachingSettings().apply("max_split_size_mb:40, roundup_power2_divisions:4")
    >>> settings.max_split_size, settings.round_size(84 << 20) >> 20
    (41943040, 96)
    >>> settings.apply("garbage_collection_threshold:0.8").max_split_size is None
    True
    """

    text: str = ""
    max_split_size: int | None = None
    max_non_split_rounding: int = LARGE_SEGMENT
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * ENTRIES
    large_segment_size: int = LARGE_SEGMENT
    per_process_memory_fraction: float = 1.0
    release_lock_on_cudamalloc: bool = False
    graph_capture_record_stream_reuse: bool = False
    pinned_use_cuda_host_register: bool = False
    pinned_num_register_threads: int = 1
    pinned_use_background_threads: bool = False
    pinned_reserve_segment_size: int = 0

    def __post_init__(self) -> None:
        large = _checked("large_segment_size", self.large_segment_size, LEAST_LARGE_SEGMENT)
        for name in _DEFAULTS:
            object.__setattr__(self, name, _checked(name, getattr(self, name), large))

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] = os.environ, strict: bool = False
    ) -> CachingSettings:
        """The settings in the environment variable BFC_ALLOC_CONF; the defaults if it is not set.

        Parameters
        ----------
        environ : mapping of str to str, optional
            The environment.
        strict : bool, optional
            As in `apply`.

        Returns
        -------
        CachingSettings
            New ones.

        Raises
        ------
        SettingsError
            If the variable's text is malformed or out of range.

        Examples
        --------
        >>> CachingSettings.from_environment({"BFC_ALLOC_CONF": "large_segment_size_mb:64"}).text
        'large_segment_size_mb:64'
        """
        try:
            return cls().apply(environ.get(VARIABLE, ""), strict)
        except SettingsError as error:
            raise error.found_in(VARIABLE) from None

    def apply(self, text: str, strict: bool = False) -> CachingSettings:
        """The settings after a text, as PyTorch 2.11 reads it.

        Parameters
        ----------
        text : str
            What PyTorch takes in PYTORCH_CUDA_ALLOC_CONF. max_split_size_mb,
            max_non_split_rounding_mb, garbage_collection_threshold and roundup_power2_divisions
            return to their defaults unless the text names them; the rest stays.
        strict : bool, optional
            Accept all that PyTorch 2.11 accepts: the start of a text counts as its number
            (`40abc`), `-1` wraps, the last of repeated keys counts, and any token separates. What
            bfc cannot do (`expandable_segments:True`) is refused all the same.

        Returns
        -------
        CachingSettings
            New ones.

        Raises
        ------
        SettingsError
            If something is unknown, malformed, repeated or out of range.
        TypeError
            If `text` is not a str.

        Notes
        -----
        Cost: O(n) in the text. Source: PyTorch's behaviour, 2.18.

        Examples
        --------
        >>> CachingSettings().apply("max_split_size_mb:2")
        Traceback (most recent call last):
        bfc.errors.SettingsError: max_split_size_mb: '2' is too small
          allowed: a whole number of MiB, at least large_segment_size_mb, here 20
        """
        return dataclasses.replace(self, **_read(self, text, strict, _CACHING), text=text)

    def with_options(
        self,
        *,
        max_split_size_mb: SupportsIndex | None = None,
        max_non_split_rounding_mb: SupportsIndex | None = None,
        garbage_collection_threshold: SupportsFloat | None = None,
        roundup_power2_divisions: SupportsIndex | Mapping[int | str, int] | None = None,
        large_segment_size_mb: SupportsIndex | None = None,
        per_process_memory_fraction: SupportsFloat | None = None,
        release_lock_on_cudamalloc: bool | None = None,
        graph_capture_record_stream_reuse: bool | None = None,
        pinned_use_cuda_host_register: bool | None = None,
        pinned_num_register_threads: SupportsIndex | None = None,
        pinned_use_background_threads: bool | None = None,
        pinned_reserve_segment_size_mb: SupportsIndex | None = None,
    ) -> CachingSettings:
        """These settings with some of them changed, by the names and with the checks of the text.

        A setting that is None stays as it is: nothing is reset.

        Parameters
        ----------
        max_split_size_mb : int, optional
            In MiB.
        max_non_split_rounding_mb : int, optional
            In MiB.
        garbage_collection_threshold : float, optional
            Between 0 and 1.
        roundup_power2_divisions : int or mapping, optional
            A number of divisions for all sizes, or {MiB: divisions, ">": divisions}.
        large_segment_size_mb : int, optional
            In MiB. `max_non_split_rounding` changes with it if the two were equal.
        per_process_memory_fraction : float, optional
            From 0 to 1.
        release_lock_on_cudamalloc : bool, optional
            No effect in this allocator.
        graph_capture_record_stream_reuse : bool, optional
            No effect in this allocator.
        pinned_use_cuda_host_register : bool, optional
            No effect in this allocator.
        pinned_num_register_threads : int, optional
            No effect in this allocator.
        pinned_use_background_threads : bool, optional
            No effect in this allocator.
        pinned_reserve_segment_size_mb : int, optional
            In MiB. No effect in this allocator.

        Returns
        -------
        CachingSettings
            New ones, whose `text` is what `as_text` returns.

        Raises
        ------
        SettingsError
            If the text would not allow a value.
        TypeError
            If a value has the wrong type.

        Examples
        --------
        >>> CachingSettings().with_options(roundup_power2_divisions={64: 8, ">": 1}).as_text()
        'roundup_power2_divisions:[64:8,>:1]'
        """
        options = {key: value for key, value in locals().items() if key != "self"}
        options = {key: value for key, value in options.items() if value is not None}
        if not options:
            return self
        written = {key: _written(key, value) for key, value in options.items()}
        items = (dict(self._items()) | written).items()
        made = dataclasses.replace(self, **_Reader(False, _CACHING).changes(self, items))
        return dataclasses.replace(made, text=made.as_text())

    def as_text(self) -> str:
        """A text that gives these settings to an allocator that has the defaults.

        Returns
        -------
        str
            What differs from the defaults.

        Examples
        --------
        >>> CachingSettings().apply("large_segment_size_mb : 0030").as_text()
        'large_segment_size_mb:30'
        """
        return ",".join(f"{key}:{_rendered(value)}" for key, value in self._items())

    def as_torch(self) -> dict[str, Any]:
        """The `allocator_settings` of PyTorch's snapshots.

        Returns
        -------
        dict
            Under PyTorch's keys.

        Notes
        -----
        Source: PyTorch's behaviour, 3.4.

        Examples
        --------
        >>> CachingSettings().apply("max_split_size_mb:40").as_torch()["max_split_size"]
        41943040
        """
        split = _WORD - 1 if self.max_split_size is None else self.max_split_size
        divisions = self.roundup_power2_divisions
        return {
            "PYTORCH_CUDA_ALLOC_CONF": self.text,
            "max_split_size": split - _WORD if split >= _WORD // 2 else split,  # a signed word
            "garbage_collection_threshold": self.garbage_collection_threshold,
            "expandable_segments": False,
            "pinned_num_register_threads": self.pinned_num_register_threads,
            "release_lock_on_cudamalloc": self.release_lock_on_cudamalloc,
            "pinned_use_cuda_host_register": self.pinned_use_cuda_host_register,
            "graph_capture_record_stream_reuse": self.graph_capture_record_stream_reuse,
            "max_round_threshold": -1,
            "max_cached_size": -1,
            "roundup_power2_divisions": {str(1 << i): n for i, n in enumerate(divisions)},
        }

    def divisions_for(self, size: int) -> int:
        """How many sizes a request is rounded to between two powers of two.

        Parameters
        ----------
        size : int
            The request in bytes.

        Returns
        -------
        int
            The divisions; 0 or 1 if its size is only rounded to 512.

        Notes
        -----
        Source: PyTorch's behaviour, 2.2.

        Examples
        --------
        >>> CachingSettings().apply("roundup_power2_divisions:[64:8]").divisions_for(3 << 20)
        8
        """
        return self.roundup_power2_divisions[_entry(size >> 20)]

    def round_size(self, size: int) -> int:
        """The size of the chunk for a request.

        Parameters
        ----------
        size : int
            The request in bytes.

        Returns
        -------
        int
            In bytes.

        Notes
        -----
        Source: PyTorch's behaviour, 2.2.

        Examples
        --------
        >>> CachingSettings().round_size(513)
        1024
        """
        return _up(max(size, MIN_BLOCK), self.step_for(size))

    def step_for(self, size: int) -> int:
        """What a request is rounded up to a multiple of.

        Parameters
        ----------
        size : int
            The request in bytes.

        Returns
        -------
        int
            In bytes.

        Notes
        -----
        Source: PyTorch's behaviour, 2.2.

        Examples
        --------
        >>> CachingSettings().apply("roundup_power2_divisions:8").step_for(9 << 20) >> 20
        1
        """
        divisions = self.divisions_for(size)
        # The product wraps in upstream: from 2**55 divisions on all goes to a power of two.
        if size >= MIN_BLOCK and divisions > 1 and size > MIN_BLOCK * divisions % _WORD:
            base = 1 << (size.bit_length() - 1)
            return base // divisions or base
        return MIN_BLOCK

    def segment_size(self, size: int) -> int:
        """The size of the segment that is taken for a request if nothing is free.

        Parameters
        ----------
        size : int
            The request in bytes.

        Returns
        -------
        int
            In bytes.

        Notes
        -----
        Source: PyTorch's behaviour, 2.4.

        Examples
        --------
        >>> [CachingSettings().segment_size(size << 20) >> 20 for size in (1, 5, 11)]
        [2, 20, 12]
        """
        rounded = self.round_size(size)
        if rounded <= MOST_SMALL:
            return SMALL_SEGMENT
        return self.large_segment_size if rounded < OWN_SEGMENT else _up(rounded, SEGMENT_STEP)

    def _items(self) -> list[_Item]:
        """What differs from the defaults, as it would be written."""
        default = _DEFAULTS | {"max_non_split_rounding": self.large_segment_size}
        return [
            (key, kind.write(getattr(self, kind.field)))
            for key, kind in _KINDS.items()
            if getattr(self, kind.field) != default[kind.field]
        ]


@dataclass(frozen=True)
class PinnedSettings:
    """The pinned_* settings of PyTorch, as a `PinnedAllocator` takes them.

    One text can serve both allocators: the keys of `CachingSettings` are checked here, and ignored.

    Attributes
    ----------
    text : str
        The last text that was applied.
    pinned_use_cuda_host_register : bool
        Pin pages of the operating system (cuMemHostRegister) rather than ask for pinned ones.
    pinned_num_register_threads : int
        How many threads touch such pages before they are pinned.
    pinned_reserve_segment_size : int
        In bytes. A block that is taken first, and small requests are cut from.
    pinned_max_round_threshold : int or None
        In bytes. Larger requests are not rounded; None is unlimited.
    pinned_max_cached_size : int or None
        In bytes. Larger blocks are not kept; None is unlimited.

    Examples
    --------
    >>> settings = PinnedSettings().apply("pinned_max_round_threshold_mb:128, max_split_size_mb:40")
    >>> settings.round_size(40_960), settings.round_size(150 << 20) >> 20
    (65536, 150)
    """

    text: str = ""
    pinned_use_cuda_host_register: bool = False
    pinned_num_register_threads: int = 1
    pinned_reserve_segment_size: int = 0
    pinned_max_round_threshold: int | None = None
    pinned_max_cached_size: int | None = None

    def apply(self, text: str, strict: bool = False) -> PinnedSettings:
        """The settings after a text. Those that it does not name stay.

        Parameters
        ----------
        text : str
            What PyTorch takes in PYTORCH_CUDA_ALLOC_CONF. pinned_max_round_threshold_mb and
            pinned_max_cached_size_mb are from a later PyTorch than 2.11.
        strict : bool, optional
            As in `CachingSettings.apply`.

        Returns
        -------
        PinnedSettings
            New ones.

        Raises
        ------
        SettingsError
            If something is unknown, malformed, repeated or out of range, or asks for what bfc does
            not do: pinned_use_background_threads:True or pinned_free_catch_all:True.
        TypeError
            If `text` is not a str.

        Notes
        -----
        Source: PyTorch's behaviour, 4.5.

        Examples
        --------
        >>> PinnedSettings().apply("pinned_use_background_threads:True")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        bfc.errors.SettingsError: pinned_use_background_threads: True is not possible: ...
        """
        read = _read(CachingSettings(), text, strict, _PINNED)
        own = {field.name for field in dataclasses.fields(self)}
        changes = {name: value for name, value in read.items() if name in own}
        return dataclasses.replace(self, **changes, text=text)

    def round_size(self, nbytes: int) -> int:
        """The size of the block for a request.

        Parameters
        ----------
        nbytes : int
            The request in bytes, at least 1.

        Returns
        -------
        int
            The next power of two; `nbytes` itself above either limit.

        Examples
        --------
        >>> PinnedSettings().round_size(81_920)
        131072
        """
        limits = (self.pinned_max_round_threshold, self.pinned_max_cached_size)
        if all(limit is None or nbytes <= limit for limit in limits):
            return 1 << (nbytes - 1).bit_length()
        return nbytes


_SIZES = (
    *("max_split_size", "max_non_split_rounding"),
    *("large_segment_size", "pinned_reserve_segment_size"),
)
_DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in dataclasses.fields(CachingSettings)
}


# Fields --------------------------------------------------------------------------------------


def _checked(name: str, value: Any, large: int) -> Any:
    """A field's value in the field's own type; `large` is the large segment size."""
    default = _DEFAULTS[name]
    try:
        if name == _ROUNDUP:
            return _checked_table(tuple(_number(entry) for entry in value))
        if isinstance(default, str | bool):
            if not isinstance(value, type(default)):
                raise TypeError
            return value
        if isinstance(default, float):
            return _checked_part(name, float(_real(value)))
        return None if value is default is None else _checked_number(name, _number(value), large)
    except TypeError:
        what = {str: "a str", bool: "a bool", float: "a float", tuple: "a tuple of ints"}
        expected = what.get(type(default), "an int of bytes" if name in _SIZES else "an int")
        raise TypeError(f"{name} is {expected}, not {value!r:.{_SHOWN}}") from None


def _number(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _checked_table(entries: tuple[int, ...]) -> tuple[int, ...]:
    fault = ""
    if len(entries) != ENTRIES:
        fault = f"has {len(entries)} entries"
    elif not all(0 <= entry < _WORD and entry.bit_count() < 2 for entry in entries):
        fault = "has divisions that are no power of two below 2**64, and not 0"
    if fault:
        allowed = f"{ENTRIES} numbers of divisions, each a power of two, or 0"
        raise SettingsError(fault, key=_ROUNDUP, given=f"{entries!r:.{_SHOWN}}", allowed=allowed)
    return entries


def _checked_part(name: str, number: float) -> float:
    is_inside = 0.0 <= number < 1.0 or (name == _FRACTION and number == 1.0)
    if not is_inside:
        raise _wrong_field(name, repr(number), "is out of range", 0)
    return number


def _checked_number(name: str, number: int, large: int) -> int:
    shown = _whole(number)
    if name not in _SIZES:
        if not 0 < number <= 128 or number.bit_count() != 1:
            raise _wrong_field(name, shown, "is out of range", large)
        return number
    least = {"large_segment_size": LEAST_LARGE_SEGMENT, "pinned_reserve_segment_size": 0}
    if number % MIB:
        raise _wrong_field(name, shown, "bytes are no whole number of MiB", large)
    if not least.get(name, large) <= number < _WORD:
        raise _wrong_field(name, shown, "bytes are out of range", large)
    return number


def _wrong_field(name: str, given: str, fault: str, large: int) -> SettingsError:
    key = next(key for key, kind in _KINDS.items() if kind.field == name)
    allowed = _CACHING.allowed(key, large) + ("" if _DEFAULTS[name] else f", or {_DEFAULTS[name]}")
    return SettingsError(f"{given} {fault}", key=name, given=given, allowed=allowed)


def _up(size: int, step: int) -> int:
    return (size + step - 1) // step * step


def _entry(mib: int) -> int:
    """The index of the divisions for a size in MiB."""
    return min(max(mib.bit_length() - 1, 0), ENTRIES - 1)


def check_switches(**switches: object) -> None:
    """TypeError where one is neither a bool nor None: a text such as "no" would count as True."""
    for name, value in switches.items():
        if not isinstance(value, bool | None):
            raise TypeError(f"{name} is True or False, not {value!r:.{_SHOWN}}")


def late_fraction(fraction: float) -> SettingsError:
    """The error for a memory fraction in a text that comes after an allocator was made."""
    return SettingsError(
        f"{fraction} comes too late: it is read where an allocator is made",
        key=_FRACTION,
        given=str(fraction),
        allowed="the fraction that the allocator was made with",
        hint=f"allocator.set_memory_fraction({fraction})",
    )


# Writing -------------------------------------------------------------------------------------


def _rendered(value: _Value) -> str:
    if isinstance(value, str):
        return value
    return f"[{','.join(f'{interval}:{divisions}' for interval, divisions in value)}]"


def _write_mib(nbytes: int) -> str:
    return str(nbytes // MIB)


def _write_divisions(divisions: tuple[int, ...]) -> _Value:
    """The first interval also stands for those below it, and ">" for those above the last one."""
    top = divisions[-1]
    if top and set(divisions) == {top}:
        return str(top)
    first = next((i for i, n in enumerate(divisions) if n != divisions[0]), ENTRIES) - 1
    last = next((i for i in reversed(range(ENTRIES)) if divisions[i] != top), 0)
    pairs = [(str(1 << i), str(divisions[i])) for i in range(first, last + 1)]
    return (*pairs, (">", str(top))) if top else tuple(pairs)


def _written(key: str, value: Any) -> _Value:
    """A keyword argument as the text would have it."""
    try:
        if key == _ROUNDUP and isinstance(value, Mapping):
            return tuple(
                (">" if interval == ">" else _whole(interval), _whole(divisions))
                for interval, divisions in value.items()
            )
        return _KINDS[key].word(value)
    except TypeError:
        raise TypeError(f"{key} is {_KINDS[key].type}, not {value!r:.{_SHOWN}}") from None


def _whole(value: Any) -> str:
    if isinstance(value, bool):
        raise TypeError
    number = operator.index(value)
    bits = number.bit_length()
    return str(number) if bits <= 256 else f"{'-' if number < 0 else ''}2**{bits - 1} or more"


def _real(value: Any) -> str:
    if isinstance(value, bool | str | bytes):
        raise TypeError
    return repr(float(value))


def _flag(value: Any) -> str:
    if not isinstance(value, bool):
        raise TypeError
    return str(value)


# Reading -------------------------------------------------------------------------------------


def _shown(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."


def _read(settings: CachingSettings, text: str, strict: bool, keys: _Keys) -> dict[str, Any]:
    """The fields that a text changes."""
    if not isinstance(text, str):
        raise TypeError(f"settings are a text such as '{keys.example}', not {type(text).__name__}")
    items = _Items(_TOKEN.findall(text.translate(_SPACE)), strict, keys).read()
    return _Reader(strict, keys).changes(settings, items)


class _Items:
    """Turns tokens into pairs of a known key and what was written for it."""

    def __init__(self, tokens: list[str], strict: bool, keys: _Keys) -> None:
        self.tokens = tokens
        self.strict = strict
        self.keys = keys
        self.at = 0

    def read(self) -> list[_Item]:
        items: list[_Item] = []
        seen: set[str] = set()
        while self.at < len(self.tokens):
            key = self.tokens[self.at]
            name = _name(key)
            if name not in self.keys.kinds and name not in self.keys.fixed:
                raise self.keys.unknown(key)
            if name in seen and not self.strict:
                other = "" if key == name else f" (it is another name of {name})"
                raise self.keys.malformed(key, f"stands twice{other}")
            seen.add(name)
            items.append((key, self._value(key)))
            self._end_of_item(key)
        return items

    def _peek(self) -> str:
        """The token after the one we are at; "" past the end."""
        return self.tokens[self.at + 1] if self.at + 1 < len(self.tokens) else ""

    def _next(self, key: str, what: str, wanted: str = "") -> str:
        """On to the next token, the separator that is wanted or a word. Upstream takes any token
        for any separator."""
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

    def _value(self, key: str) -> _Value:
        self._next(key, "a colon", ":")
        if self._peek() != "[":
            return self._next(key, "the value")
        if key == _ROUNDUP:
            self.at += 1
            return self._list(key)
        raise self.keys.malformed(key, "this setting takes no list", "[")

    def _list(self, key: str) -> _Value:
        pairs: list[tuple[str, str]] = []
        seen: set[str] = set()
        while self._peek() != "]":
            interval = self._next(key, "a size in MiB")
            if self._next(key, "a colon", ":") == "]":  # upstream reads the text a second time
                raise self.keys.malformed(key, f"the list ends after {_shown(interval)}", interval)
            pairs.append((interval, self._next(key, "a number of divisions")))
            if interval in seen and not self.strict:
                raise self.keys.malformed(
                    key, f"{_shown(interval)} stands twice in the list", interval
                )
            seen.add(interval)
            if self._peek() != "]":
                self._next(key, "a comma or the closing bracket", ",")
        self.at += 1
        return tuple(pairs)

    def _end_of_item(self, key: str) -> None:
        """On to the next key. A comma may end the text."""
        separator = self._next(key, "a comma", ",") if self._peek() else ""
        if separator == _LARGE:  # upstream looks for it before all else, and finds no value
            raise self.keys.malformed(_LARGE, "a colon is missing at the end")
        self.at += 1


def _name(key: str) -> str:
    return _ALIASES.get(key, key)


@dataclass(frozen=True)
class _Keys:
    """The keys that a text may have, and what is said of all others."""

    kinds: Mapping[str, _Kind]
    fixed: Mapping[str, _Fixed]
    later: tuple[str, ...]
    example: str

    def allowed(self, key: str, large: int = 0) -> str:
        """Of the large segment size only where it is known which one holds."""
        text = self.fixed[key].allowed if key in self.fixed else self.kinds[_name(key)].allowed
        return text.replace("{large}", f", here {large // MIB}" if large else "")

    def malformed(self, key: str, fault: str, given: str = "") -> SettingsError:
        return SettingsError(fault, key=key, given=given, allowed=self.allowed(key))

    def unknown(self, key: str) -> SettingsError:
        if key in self.later:
            return SettingsError(
                "a later PyTorch has this setting, 2.11, which bfc follows, does not",
                key=key,
                given=key,
                allowed=self.all(),
            )
        if key in _SEPARATORS:
            fault, close = f"a setting is missing before {key!r}", []
        else:
            fault = f"there is no setting {_shown(key)}"
            names = (*self.kinds, *self.fixed)
            close = difflib.get_close_matches(key[:_SHOWN].lower(), names, 1)
        hint = close[0] if close else ""
        return SettingsError(fault, given=key, allowed=self.all(), hint=hint)

    def all(self) -> str:
        """A few keys a line."""
        names = ", ".join((*self.kinds, *self.fixed))
        lines = textwrap.wrap(names, 100, break_long_words=False)
        return "\n    ".join(["KEY:VALUE,KEY:VALUE with these keys:", *lines])


class _Reader:
    """Checks what was written and makes values of it."""

    def __init__(self, strict: bool, keys: _Keys) -> None:
        self.strict = strict
        self.keys = keys
        self.large = LARGE_SEGMENT

    def changes(self, settings: CachingSettings, items: Iterable[_Item]) -> dict[str, Any]:
        """The fields after these items: of all keys that a parse resets, and of those named."""
        items = list(items)
        self.large = settings.large_segment_size
        for key, value in items:
            if key == _LARGE:  # first, wherever it stands: it moves the least of others
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
                self.keys.fixed[key].check(key, _rendered(value))
            elif key == _ROUNDUP:  # repeated ones add up
                changes[key] = self.divisions(value, changes[key])
            elif key != _LARGE:
                changes[self.keys.kinds[_name(key)].field] = self._read(key, value)
        return changes

    def _read(self, key: str, value: _Value) -> Any:
        return self.keys.kinds[_name(key)].read(self, key, _rendered(value))

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
            raise self.fault(key, given, "bears a sign")
        number = int(digits) if len(digits) <= 20 else _WORD
        if number >= _WORD:
            raise self.fault(key, given, "is not below 2**64")
        return -number % _WORD if sign == "-" else number

    def mib(self, key: str, given: str, least: int) -> int:
        number = self.whole(key, given)
        if number < least:
            raise self.fault(key, given, "is too small")
        return min(number, (_WORD - 1) // MIB) * MIB

    def mib_above_large(self, key: str, given: str) -> int:
        return self.mib(key, given, self.large // MIB)

    def large_segment(self, key: str, given: str) -> int:
        return self.mib(key, given, LEAST_LARGE_SEGMENT // MIB)

    def pinned_reserve(self, key: str, given: str) -> int:
        return self.mib(key, given, 1)

    def pinned_limit(self, key: str, given: str) -> int:
        return self.mib(key, given, 0)

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

    def divisions(self, value: _Value, table: tuple[int, ...]) -> tuple[int, ...]:
        """The table of divisions, with this setting over it."""
        if isinstance(value, str):
            number = self.whole(_ROUNDUP, value)
            if number.bit_count() != 1:
                raise self.fault(_ROUNDUP, value, "is not a power of two")
            return (number,) * ENTRIES
        entries, last, is_first = list(table), 0, True
        for interval, written in value:
            if interval == ">":
                number = self._listed(interval, written)
                entries[last + 1 :] = [number] * (ENTRIES - 1 - last)
                continue
            mib = self.whole(_ROUNDUP, interval)
            if mib.bit_count() != 1:
                raise self.fault(_ROUNDUP, interval, "is not a power of two, or '>'")
            number, last = self._listed(interval, written), _entry(mib)
            entries[0 if is_first else last : last + 1] = [number] * (last + 1 if is_first else 1)
            is_first = False
        return tuple(entries)

    def _listed(self, interval: str, written: str) -> int:
        number = self.whole(_ROUNDUP, written)
        if number.bit_count() > 1:
            given = f"{interval}:{written}"
            raise self.fault(_ROUNDUP, given, "has divisions that are no power of two, and not 0")
        return number


@dataclass(frozen=True)
class _Kind:
    """How a key is read and written. `word` makes the text of a keyword argument."""

    field: str
    read: Callable[[_Reader, str, str], Any]
    write: Callable[[Any], _Value]
    word: Callable[[Any], str]
    type: str
    allowed: str


def _mib(field: str, read: Callable[[_Reader, str, str], int], allowed: str) -> _Kind:
    return _Kind(field, read, _write_mib, _whole, "an int", f"a whole number of MiB, {allowed}")


def _bool(field: str) -> _Kind:
    return _Kind(field, _Reader.flag, str, _flag, "a bool", "True or False")


_ABOVE_LARGE = f"at least {_LARGE}{{large}}"
#: The keys, in the order in which they are listed and written.
_KINDS = {
    "max_split_size_mb": _mib("max_split_size", _Reader.mib_above_large, _ABOVE_LARGE),
    "max_non_split_rounding_mb": _mib(
        "max_non_split_rounding", _Reader.mib_above_large, _ABOVE_LARGE
    ),
    "garbage_collection_threshold": _Kind(
        "garbage_collection_threshold",
        _Reader.threshold,
        repr,
        _real,
        "a float",
        "a number above 0 and below 1, such as 0.8",
    ),
    _ROUNDUP: _Kind(
        _ROUNDUP,
        _Reader.whole,
        _write_divisions,
        _whole,
        "an int or a dict of them such as {64: 8, '>': 1}",
        "a power of two such as 4, or a list such as [64:8,256:4,>:1] of sizes in MiB "
        "(powers of two, or '>' for the sizes above) and their divisions (powers of two, or 0)",
    ),
    _LARGE: _mib("large_segment_size", _Reader.large_segment, "at least 11"),
    _FRACTION: _Kind(
        _FRACTION,
        _Reader.fraction,
        repr,
        _real,
        "a float",
        "a number from 0 to 1",
    ),
    "release_lock_on_cudamalloc": _bool("release_lock_on_cudamalloc"),
    "graph_capture_record_stream_reuse": _bool("graph_capture_record_stream_reuse"),
    "pinned_use_cuda_host_register": _bool("pinned_use_cuda_host_register"),
    "pinned_num_register_threads": _Kind(
        "pinned_num_register_threads",
        _Reader.threads,
        str,
        _whole,
        "an int",
        "a power of two from 1 to 128",
    ),
    "pinned_use_background_threads": _bool("pinned_use_background_threads"),
    "pinned_reserve_segment_size_mb": _mib(
        "pinned_reserve_segment_size", _Reader.pinned_reserve, "at least 1"
    ),
}


@dataclass(frozen=True)
class _Fixed:
    """A key with one value that bfc can honour, and one that it cannot honour yet."""

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


_FIXED = {
    _EXPANDABLE: _Fixed(
        "False",
        "True",
        "bfc does not manage expandable segments yet",
        "against fragmentation, max_split_size_mb, garbage_collection_threshold or a larger "
        "large_segment_size_mb",
    ),
    _BACKEND: _Fixed(
        "native",
        "cudaMallocAsync",
        "this allocator is the native backend, and does not replace itself",
        "bfc.CUDASubAllocator(kind='async'), which takes the segments from the driver's "
        "stream-ordered pool",
    ),
}
_CACHING = _Keys(_KINDS, _FIXED, _LATER, "max_split_size_mb:40")

_PINNED_KINDS = {
    "pinned_max_round_threshold_mb": _mib(
        "pinned_max_round_threshold", _Reader.pinned_limit, "at least 0"
    ),
    "pinned_max_cached_size_mb": _mib("pinned_max_cached_size", _Reader.pinned_limit, "at least 0"),
}
_PINNED_FIXED = {
    "pinned_use_background_threads": _Fixed(
        "False",
        "True",
        "bfc starts no threads; each allocation asks the oldest event itself",
        "larger or fewer requests, if asking an event shows in a profile",
    ),
    "pinned_free_catch_all": _Fixed(
        "False",
        "True",
        "bfc drops no error of a free; where nobody could catch it, it goes to sys.unraisablehook",
        "an own sys.unraisablehook, or a try around empty_cache() and close()",
    ),
}
_PINNED = _Keys(
    {key: kind for key, kind in _KINDS.items() if key not in _PINNED_FIXED} | _PINNED_KINDS,
    _FIXED | _PINNED_FIXED,
    tuple(key for key in _LATER if key not in _PINNED_KINDS and key not in _PINNED_FIXED),
    "pinned_max_cached_size_mb:16",
)
