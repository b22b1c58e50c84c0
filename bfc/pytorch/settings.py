"""The settings of PyTorch's caching policy.

PyTorch's behaviour, 2.18, describes them. `grammar.py` has their text form, the one that PyTorch
reads from PYTORCH_CUDA_ALLOC_CONF.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, SupportsFloat, SupportsIndex

from bfc.errors import SettingsError
from bfc.pytorch.grammar import (
    CACHING,
    FRACTION,
    KINDS,
    RESERVE,
    RESERVE_BY_CLASS,
    ROUNDUP,
    SHOWN,
    Item,
    Reader,
    Reserve,
    read_fields,
    real,
    rendered,
    whole,
    written,
)
from bfc.pytorch.rules import NEWEST, rules_of
from bfc.pytorch.sizes import (
    ENTRIES,
    LARGE_SEGMENT,
    LEAST_LARGE_SEGMENT,
    MIB,
    MIN_BLOCK,
    MOST_SMALL,
    OWN_SEGMENT,
    SEGMENT_STEP,
    SMALL_SEGMENT,
    WORD,
    division_entry,
    round_up,
)
from bfc.pytorch.words import CONF

VARIABLE = "BFC_ALLOC_CONF"


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
    expandable_segments : bool
        Map memory into reserved addresses, so that segments can grow. An allocator refuses this if
        its sub-allocator cannot map memory (`supports_virtual_memory`).
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
    pinned_max_round_threshold : int or None
        No effect here; see `PinnedSettings`. From PyTorch 2.13 on, like the next one.
    pinned_max_cached_size : int or None
        No effect here; see `PinnedSettings`.
    pinned_free_catch_all : bool
        No effect. From PyTorch 2.12 on.
    throw_on_cudamalloc_oom : bool
        Refuse a request that would pass the fraction of the device, before the device is asked and
        before anything is released. From PyTorch 2.12 on.
    expandable_segments_reserve : float, int or None
        The addresses reserved for an expandable segment: a part of the device's memory, or bytes if
        it is an int; None is 9/8 of the memory, which is also the most. From PyTorch 2.15 on, like
        the next one.
    expandable_segments_reserve_by_class : tuple of (str, float or int)
        The same for streams that a program of C++ has given a name. Nothing here gives them one, so
        this has no effect.

    Raises
    ------
    SettingsError
        If a field has a value that no text could set. The error names it, and what is allowed.
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
    expandable_segments: bool = False
    release_lock_on_cudamalloc: bool = False
    graph_capture_record_stream_reuse: bool = False
    pinned_use_cuda_host_register: bool = False
    pinned_num_register_threads: int = 1
    pinned_use_background_threads: bool = False
    pinned_reserve_segment_size: int = 0
    pinned_max_round_threshold: int | None = None
    pinned_max_cached_size: int | None = None
    pinned_free_catch_all: bool = False
    throw_on_cudamalloc_oom: bool = False
    expandable_segments_reserve: Reserve | None = None
    expandable_segments_reserve_by_class: tuple[tuple[str, Reserve], ...] = ()

    def __post_init__(self) -> None:
        large = _checked("large_segment_size", self.large_segment_size, LEAST_LARGE_SEGMENT)
        for name in _DEFAULTS:
            object.__setattr__(self, name, _checked(name, getattr(self, name), large))

    @classmethod
    def from_environment(
        cls,
        environ: Mapping[str, str] = os.environ,
        strict: bool = False,
        *,
        torch: str = NEWEST,
    ) -> CachingSettings:
        """The settings in the environment variable BFC_ALLOC_CONF; the defaults if it is not set.

        Parameters
        ----------
        environ : mapping of str to str, optional
            The environment.
        strict : bool, optional
            As in `apply`.
        torch : str, optional
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
            return cls().apply(environ.get(VARIABLE, ""), strict, torch=torch)
        except SettingsError as error:
            raise error.found_in(VARIABLE) from None

    def apply(self, text: str, strict: bool = False, *, torch: str = NEWEST) -> CachingSettings:
        """The settings after a text, as PyTorch reads it.

        Parameters
        ----------
        text : str
            What PyTorch takes in PYTORCH_CUDA_ALLOC_CONF. max_split_size_mb,
            max_non_split_rounding_mb, garbage_collection_threshold and roundup_power2_divisions
            return to their defaults unless the text names them; the rest stays.
        strict : bool, optional
            Accept all that PyTorch accepts: the start of a text counts as its number (`40abc`),
            `-1` wraps, the last of repeated keys counts, and any token separates. What bfc cannot
            do (`backend:cudaMallocAsync`) is refused all the same.
        torch : str, optional
            The version of PyTorch. A setting that it does not have is an error, which names the
            version that has it.

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
        ValueError
            If bfc does not have the rules of the version `torch`.

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
        read = read_fields(text, strict, CACHING, self.large_segment_size, torch)
        return dataclasses.replace(self, **read, text=text)

    def check_version(self, torch: str) -> None:
        """Refuse these settings for a version of PyTorch that does not have all of them.

        Parameters
        ----------
        torch : str
            The version.

        Raises
        ------
        SettingsError
            If a setting is not at its default, and the version does not have it. The error names
            the version that has it.
        ValueError
            If bfc does not have the rules of the version.

        Examples
        --------
        >>> settings = CachingSettings(throw_on_cudamalloc_oom=True)
        >>> settings.check_version("2.11")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        bfc.errors.SettingsError: throw_on_cudamalloc_oom: PyTorch 2.12 and later have it, ...
        """
        keys = CACHING.of_version(rules_of(torch).version)
        for key, _ in self._items():
            if not keys.has(key):
                raise keys.unknown(key)

    def with_options(
        self,
        *,
        max_split_size_mb: SupportsIndex | None = None,
        max_non_split_rounding_mb: SupportsIndex | None = None,
        garbage_collection_threshold: SupportsFloat | None = None,
        roundup_power2_divisions: SupportsIndex | Mapping[int | str, int] | None = None,
        large_segment_size_mb: SupportsIndex | None = None,
        per_process_memory_fraction: SupportsFloat | None = None,
        expandable_segments: bool | None = None,
        release_lock_on_cudamalloc: bool | None = None,
        graph_capture_record_stream_reuse: bool | None = None,
        pinned_use_cuda_host_register: bool | None = None,
        pinned_num_register_threads: SupportsIndex | None = None,
        pinned_use_background_threads: bool | None = None,
        pinned_reserve_segment_size_mb: SupportsIndex | None = None,
        pinned_max_round_threshold_mb: SupportsIndex | None = None,
        pinned_max_cached_size_mb: SupportsIndex | None = None,
        pinned_free_catch_all: bool | None = None,
        throw_on_cudamalloc_oom: bool | None = None,
        expandable_segments_reserve: SupportsFloat | str | None = None,
        expandable_segments_reserve_by_class: Mapping[str, SupportsFloat | str] | None = None,
    ) -> CachingSettings:
        """These settings with some changes. Names and checks are those of the text form.

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
        expandable_segments : bool, optional
            Map memory into reserved addresses, so that segments can grow.
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
        pinned_max_round_threshold_mb : int, optional
            In MiB. No effect in this allocator.
        pinned_max_cached_size_mb : int, optional
            In MiB. No effect in this allocator.
        pinned_free_catch_all : bool, optional
            No effect in this allocator.
        throw_on_cudamalloc_oom : bool, optional
            Refuse a request that would pass the fraction of the device, before it is asked.
        expandable_segments_reserve : float or str, optional
            A part of the device's memory, or GiB as in "40G".
        expandable_segments_reserve_by_class : mapping, optional
            No effect in this allocator.

        Returns
        -------
        CachingSettings
            New ones, whose `text` is what `as_text` returns.

        Raises
        ------
        SettingsError
            If a value would not be allowed in the text.
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
        texts = {key: written(key, value) for key, value in options.items()}
        items = (dict(self._items()) | texts).items()
        made = dataclasses.replace(
            self, **Reader(False, CACHING, self.large_segment_size).changes(items)
        )
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
        return ",".join(f"{key}:{rendered(value)}" for key, value in self._items())

    def as_torch(self, torch: str = NEWEST) -> dict[str, Any]:
        """The `allocator_settings` of PyTorch's snapshots.

        Parameters
        ----------
        torch : str, optional
            The version of PyTorch.

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
        divisions = self.roundup_power2_divisions
        limits = {
            "max_round_threshold": _signed(self.pinned_max_round_threshold),
            "max_cached_size": _signed(self.pinned_max_cached_size),
        }
        return {
            CONF: self.text,
            "max_split_size": _signed(self.max_split_size),
            "garbage_collection_threshold": self.garbage_collection_threshold,
            "expandable_segments": self.expandable_segments,
            "pinned_num_register_threads": self.pinned_num_register_threads,
            "release_lock_on_cudamalloc": self.release_lock_on_cudamalloc,
            "pinned_use_cuda_host_register": self.pinned_use_cuda_host_register,
            "graph_capture_record_stream_reuse": self.graph_capture_record_stream_reuse,
            **(limits if rules_of(torch).has_host_history else {}),
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
        return self.roundup_power2_divisions[division_entry(size >> 20)]

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
        return round_up(max(size, MIN_BLOCK), self.step_for(size))

    def step_for(self, size: int) -> int:
        """The step to a multiple of which a request is rounded up.

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
        # PyTorch's product wraps: from 2**55 divisions on, every size goes to a power of two.
        if size >= MIN_BLOCK and divisions > 1 and size > MIN_BLOCK * divisions % WORD:
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
        return self.large_segment_size if rounded < OWN_SEGMENT else round_up(rounded, SEGMENT_STEP)

    def _items(self) -> list[Item]:
        """The settings that differ from the defaults, as they would be written."""
        default = _DEFAULTS | {"max_non_split_rounding": self.large_segment_size}
        return [
            (key, kind.write(getattr(self, kind.field)))
            for key, kind in KINDS.items()
            if getattr(self, kind.field) != default[kind.field]
        ]


_SIZES = (
    *("max_split_size", "max_non_split_rounding"),
    *("large_segment_size", "pinned_reserve_segment_size"),
    *("pinned_max_round_threshold", "pinned_max_cached_size"),
)
_DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in dataclasses.fields(CachingSettings)
}


def _signed(nbytes: int | None) -> int:
    """A size as a signed word; -1 where it is unlimited."""
    number = WORD - 1 if nbytes is None else nbytes
    return number - WORD if number >= WORD // 2 else number


# Fields --------------------------------------------------------------------------------------


def _checked(name: str, value: Any, large: int) -> Any:
    """A field's value in the field's own type; `large` is the large segment size."""
    default = _DEFAULTS[name]
    try:
        if name == ROUNDUP:
            return _checked_table(tuple(_number(entry) for entry in value))
        if name == RESERVE:
            return None if value is None else _checked_reserve(name, value)
        if name == RESERVE_BY_CLASS:
            return tuple((str(kind), _checked_reserve(name, part)) for kind, part in value)
        if isinstance(default, str | bool):
            if not isinstance(value, type(default)):
                raise TypeError
            return value
        if isinstance(default, float):
            return _checked_part(name, float(real(value)))
        return None if value is default is None else _checked_number(name, _number(value), large)
    except TypeError:
        what = {str: "a str", bool: "a bool", float: "a float", tuple: "a tuple of ints"}
        what |= {tuple: "a tuple of pairs"} if name == RESERVE_BY_CLASS else {}
        what |= {type(None): "a float, or an int of bytes"} if name == RESERVE else {}
        expected = what.get(type(default), "an int of bytes" if name in _SIZES else "an int")
        raise TypeError(f"{name} is {expected}, not {value!r:.{SHOWN}}") from None


def _number(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _checked_table(entries: tuple[int, ...]) -> tuple[int, ...]:
    fault = ""
    if len(entries) != ENTRIES:
        fault = f"has {len(entries)} entries"
    elif not all(0 <= entry < WORD and entry.bit_count() < 2 for entry in entries):
        fault = "has divisions that are neither 0 nor a power of two below 2**64"
    if fault:
        allowed = f"{ENTRIES} numbers of divisions, each a power of two, or 0"
        raise SettingsError(fault, key=ROUNDUP, given=f"{entries!r:.{SHOWN}}", allowed=allowed)
    return entries


def _checked_reserve(name: str, value: Any) -> Reserve:
    number: Reserve = value if isinstance(value, float) else _number(value)
    if not 0 < number < (math.inf if isinstance(number, float) else WORD):
        raise _wrong_field(name, repr(number), "is out of range", 0)
    return number


def _checked_part(name: str, number: float) -> float:
    is_inside = 0.0 <= number < 1.0 or (name == FRACTION and number == 1.0)
    if not is_inside:
        raise _wrong_field(name, repr(number), "is out of range", 0)
    return number


def _checked_number(name: str, number: int, large: int) -> int:
    shown = whole(number)
    if name not in _SIZES:
        if not 0 < number <= 128 or number.bit_count() != 1:
            raise _wrong_field(name, shown, "is out of range", large)
        return number
    least = {"large_segment_size": LEAST_LARGE_SEGMENT}
    least |= {size: 0 for size in _SIZES if size.startswith("pinned_")}
    if number % MIB:
        raise _wrong_field(name, shown, "bytes are not a whole number of MiB", large)
    if not least.get(name, large) <= number < WORD:
        raise _wrong_field(name, shown, "bytes are out of range", large)
    return number


def _wrong_field(name: str, given: str, fault: str, large: int) -> SettingsError:
    key = next(key for key, kind in KINDS.items() if kind.field == name)
    allowed = CACHING.allowed(key, large) + ("" if _DEFAULTS[name] else f", or {_DEFAULTS[name]}")
    return SettingsError(f"{given} {fault}", key=name, given=given, allowed=allowed)


def check_switches(**switches: object) -> None:
    """Raises TypeError if one is neither a bool nor None: a string such as "no" would be true."""
    for name, value in switches.items():
        if not isinstance(value, bool | None):
            raise TypeError(f"{name} is True or False, not {value!r:.{SHOWN}}")


def late_fraction(fraction: float) -> SettingsError:
    """The error for a text that sets the memory fraction after the allocator was made."""
    return SettingsError(
        f"{fraction} comes too late: it is read when an allocator is created",
        key=FRACTION,
        given=str(fraction),
        allowed="the fraction that the allocator was made with",
        hint=f"allocator.set_memory_fraction({fraction})",
    )
