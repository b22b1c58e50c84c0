"""The settings of PyTorch's caching policy. "(row 9)" is a number among the corner cases of
docs/behaviour/pytorch.md."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import pickle
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import bfc
from bench.peers.torch import TorchPeer
from bfc.errors import SettingsError
from bfc.pytorch.pinned_settings import PinnedSettings
from bfc.pytorch.rules import VERSIONS
from bfc.pytorch.settings import VARIABLE, CachingSettings
from bfc.pytorch.sizes import ENTRIES, MIB

GIB = 1 << 30
DEFAULT = CachingSettings()
#: Keys that the next text resets, and those that it keeps: a value, and the field.
RESET = {
    "max_split_size_mb": ("40", "max_split_size"),
    "max_non_split_rounding_mb": ("40", "max_non_split_rounding"),
    "garbage_collection_threshold": ("0.5", "garbage_collection_threshold"),
    "roundup_power2_divisions": ("4", "roundup_power2_divisions"),
}
STICKY = {
    "large_segment_size_mb": ("30", "large_segment_size"),
    "per_process_memory_fraction": ("0.5", "per_process_memory_fraction"),
    "expandable_segments": ("True", "expandable_segments"),
    "release_lock_on_cudamalloc": ("True", "release_lock_on_cudamalloc"),
    "graph_capture_record_stream_reuse": ("True", "graph_capture_record_stream_reuse"),
    "pinned_use_cuda_host_register": ("True", "pinned_use_cuda_host_register"),
    "pinned_num_register_threads": ("4", "pinned_num_register_threads"),
    "pinned_use_background_threads": ("True", "pinned_use_background_threads"),
    "pinned_reserve_segment_size_mb": ("4", "pinned_reserve_segment_size"),
    "pinned_max_round_threshold_mb": ("4", "pinned_max_round_threshold"),
    "pinned_max_cached_size_mb": ("4", "pinned_max_cached_size"),
    "pinned_free_catch_all": ("True", "pinned_free_catch_all"),
    "throw_on_cudamalloc_oom": ("True", "throw_on_cudamalloc_oom"),
    "expandable_segments_reserve": ("0.5", "expandable_segments_reserve"),
    "expandable_segments_reserve_by_class": ("[a:1G]", "expandable_segments_reserve_by_class"),
}
KEYS = (*RESET, *STICKY, "backend")
ALIASES = ("release_lock_on_hipmalloc", "pinned_use_hip_host_register")
#: The settings that PyTorch 2.11 does not have, and the first version with each.
LATER = {
    "throw_on_cudamalloc_oom": "2.12",
    "pinned_free_catch_all": "2.12",
    "pinned_max_round_threshold_mb": "2.13",
    "pinned_max_cached_size_mb": "2.13",
    "expandable_segments_reserve": "2.15",
    "expandable_segments_reserve_by_class": "2.15",
}


def refusal(text: str, strict: bool = False, torch: str = "2.15") -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        DEFAULT.apply(text, strict, torch=torch)
    return caught.value


def accepts(text: str, strict: bool = False, torch: str = "2.15") -> bool:
    try:
        DEFAULT.apply(text, strict, torch=torch)
    except SettingsError:
        return False
    return True


def changed(settings: CachingSettings) -> dict[str, object]:
    """The fields that differ from the defaults, `text` aside."""
    facts, defaults = dataclasses.asdict(settings), dataclasses.asdict(DEFAULT)
    return {k: v for k, v in facts.items() if k != "text" and v != defaults[k]}


def divisions(text: str, strict: bool = False) -> tuple[int, ...]:
    return DEFAULT.apply(f"roundup_power2_divisions:{text}", strict).roundup_power2_divisions


# What is read --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        (" \t\n\v\f\r", {}),
        ("max_split_size_mb:40", {"max_split_size": 40 * MIB}),
        ("max_split_size_mb:20", {"max_split_size": 20 * MIB}),
        ("max_split_size_mb:40,", {"max_split_size": 40 * MIB}),
        (" max_ split_size_mb : 4\t0 , ", {"max_split_size": 40 * MIB}),
        ("max_split_size_mb:0040", {"max_split_size": 40 * MIB}),
        ("max_split_size_mb:18446744073709551615", {"max_split_size": 2**64 - MIB}),
        ("max_non_split_rounding_mb:21", {"max_non_split_rounding": 21 * MIB}),
        ("garbage_collection_threshold:0.8", {"garbage_collection_threshold": 0.8}),
        ("garbage_collection_threshold:.5", {"garbage_collection_threshold": 0.5}),
        ("roundup_power2_divisions:4", {"roundup_power2_divisions": (4,) * ENTRIES}),
        ("roundup_power2_divisions:[]", {}),
        (
            "large_segment_size_mb:30",
            {"large_segment_size": 30 * MIB, "max_non_split_rounding": 30 * MIB},
        ),
        ("per_process_memory_fraction:0.25", {"per_process_memory_fraction": 0.25}),
        ("per_process_memory_fraction:0", {"per_process_memory_fraction": 0.0}),
        ("per_process_memory_fraction:1", {}),
        ("release_lock_on_cudamalloc:True", {"release_lock_on_cudamalloc": True}),
        ("release_lock_on_hipmalloc:True", {"release_lock_on_cudamalloc": True}),
        ("graph_capture_record_stream_reuse:True", {"graph_capture_record_stream_reuse": True}),
        ("pinned_use_cuda_host_register:True", {"pinned_use_cuda_host_register": True}),
        ("pinned_use_hip_host_register:True", {"pinned_use_cuda_host_register": True}),
        ("pinned_num_register_threads:128", {"pinned_num_register_threads": 128}),
        ("pinned_use_background_threads:True", {"pinned_use_background_threads": True}),
        ("pinned_reserve_segment_size_mb:3", {"pinned_reserve_segment_size": 3 * MIB}),
        ("expandable_segments:False", {}),
        ("expandable_segments:True", {"expandable_segments": True}),
        ("pinned_max_round_threshold_mb:3", {"pinned_max_round_threshold": 3 * MIB}),
        ("pinned_max_cached_size_mb:0", {"pinned_max_cached_size": 0}),
        ("pinned_free_catch_all:True", {"pinned_free_catch_all": True}),
        ("throw_on_cudamalloc_oom:True", {"throw_on_cudamalloc_oom": True}),
        ("expandable_segments_reserve:0.5", {"expandable_segments_reserve": 0.5}),
        ("expandable_segments_reserve:2", {"expandable_segments_reserve": 2.0}),
        ("expandable_segments_reserve:1.5G", {"expandable_segments_reserve": 3 * GIB // 2}),
        ("expandable_segments_reserve:1g", {"expandable_segments_reserve": GIB}),
        (
            "expandable_segments_reserve_by_class:[a:0.25,b:8G]",
            {"expandable_segments_reserve_by_class": (("a", 0.25), ("b", 8 * GIB))},
        ),
        ("backend:native", {}),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_what_a_text_sets(text: str, expected: dict[str, object], strict: bool):
    settings = DEFAULT.apply(text, strict)
    assert changed(settings) == expected
    assert settings.text == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_split_size_mb:40abc", {"max_split_size": 40 * MIB}),
        ("max_split_size_mb:+40", {"max_split_size": 40 * MIB}),
        ("max_split_size_mb:-1", {"max_split_size": 2**64 - MIB}),
        ("max_split_size_mb:40,max_split_size_mb:50", {"max_split_size": 50 * MIB}),
        ("max_split_size_mb]40", {"max_split_size": 40 * MIB}),
        ("backend:native[max_split_size_mb:40", {"max_split_size": 40 * MIB}),
        ("garbage_collection_threshold:0x1p-1", {"garbage_collection_threshold": 0.5}),
        ("garbage_collection_threshold:0x.8", {"garbage_collection_threshold": 0.5}),
        ("per_process_memory_fraction:+0.5", {"per_process_memory_fraction": 0.5}),
        ("pinned_num_register_threads:4x", {"pinned_num_register_threads": 4}),
        ("release_lock_on_hipmalloc:True,release_lock_on_cudamalloc:False", {}),
        ("roundup_power2_divisions:4x", {"roundup_power2_divisions": (4,) * ENTRIES}),
        (
            "roundup_power2_divisions:4,roundup_power2_divisions:[]",
            {"roundup_power2_divisions": (4,) * ENTRIES},
        ),
    ],
)
def test_what_only_strict_reads_as_upstream_does(text: str, expected: dict[str, object]):
    assert not accepts(text)
    assert changed(DEFAULT.apply(text, strict=True)) == expected


#: For each key, what must not follow its colon. (rows 45 and 52)
WRONG = {
    "max_split_size_mb": "19 2 0 abc [40] --40 18446744073709551616 0x40 \u0664\u0660 ,40",
    "max_non_split_rounding_mb": "2 19",
    "large_segment_size_mb": "10 0",
    "garbage_collection_threshold": "1.0 0 nan -0.5 0,5 inf 1e-400 1e-310 1e400 .",
    "per_process_memory_fraction": "1.1 -0.1 nan",
    "roundup_power2_divisions": "3 0 [0:4] [3:4] [64:3] [>:3] [64:8 [64:8, [ ] [64] [64:] [:8] "
    "[,64:8] [64:8,,128:2] [[64:8]] [64:8][128:2] 64:8 [64:8]max_split_size_mb:40 "
    "[64:8]large_segment_size_mb [64,2[1]1]]",
    "expandable_segments": "true 1",
    "backend": "foo Native",
    "release_lock_on_cudamalloc": "tr 1",
    "pinned_use_background_threads": "true",
    "pinned_num_register_threads": "3 256 0 -1",
    "pinned_reserve_segment_size_mb": "0",
}


@pytest.mark.parametrize(
    "text",
    [
        *(f"{key}:{value}" for key, values in WRONG.items() for value in values.split(" ")),
        *(f"{key}{colon}" for key in (*KEYS, *ALIASES) for colon in ("", ":", ",")),
        *(f"{key}:," for key in (*KEYS, *ALIASES) if key != "expandable_segments_reserve"),
        *(",", ":", "[", "]", "[]", ",max_split_size_mb:40", "max_split_size_mb:40,,"),
        *("a", "Max_split_size_mb:40", "max_split_size_mb\u00a0:40"),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_what_is_refused_either_way(text: str, strict: bool):
    assert not accepts(text, strict)


@pytest.mark.parametrize(
    "text",
    [
        *("max_split_size_mb:40,max_split_size_mb:40", "max_split_size_mb:40:backend:native"),
        *("roundup_power2_divisions:[64:8,64:8]", "roundup_power2_divisions:[64:8;128:2]"),
        *("roundup_power2_divisions:[64:8:128:2]", "roundup_power2_divisions:[64:8]]"),
        *("garbage_collection_threshold:0.5f", "garbage_collection_threshold:0x.8"),
        *("max_split_size_mb=40", "per_process_memory_fraction:+1"),
        "per_process_memory_fraction:0." + "5" * 100,
        "pinned_reserve_segment_size_mb:-1",
    ],
)
def test_what_is_refused_by_default(text: str):
    assert not accepts(text)


# Resets and order ----------------------------------------------------------------------------

NEXT = ("", "expandable_segments:False", "backend:native")


@pytest.mark.parametrize("key", RESET)
@pytest.mark.parametrize("then", NEXT)
def test_the_next_text_resets(key: str, then: str):
    """(rows 50 and 51)"""
    value, field = RESET[key]
    first = DEFAULT.apply(f"{key}:{value}")
    assert set(changed(first)) == {field}
    assert changed(first.apply(then)) == {}


@pytest.mark.parametrize(
    ("key", "then"), [(key, then) for key in STICKY for then in NEXT if not then.startswith(key)]
)
def test_the_next_text_keeps(key: str, then: str):
    """(row 51)"""
    value, field = STICKY[key]
    first = DEFAULT.apply(f"{key}:{value}")
    assert field in changed(first)
    assert changed(first.apply(then)) == changed(first)


def test_the_non_split_rounding_falls_back_to_the_large_segment_size_in_force():
    """(row 51)"""
    settings = DEFAULT.apply("large_segment_size_mb:30,max_non_split_rounding_mb:50")
    assert settings.max_non_split_rounding == 50 * MIB
    assert settings.apply("").max_non_split_rounding == 30 * MIB
    assert settings.apply("large_segment_size_mb:12").max_non_split_rounding == 12 * MIB


@pytest.mark.parametrize("key", ["max_split_size_mb", "max_non_split_rounding_mb"])
def test_the_large_segment_size_moves_the_least_of_two_wherever_it_stands(key: str):
    assert accepts(f"{key}:11,large_segment_size_mb:11")
    assert accepts(f"large_segment_size_mb:11,{key}:11")
    assert "large_segment_size_mb, here 30" in str(refusal(f"{key}:20,large_segment_size_mb:30"))
    wide = DEFAULT.apply("large_segment_size_mb:30")
    with pytest.raises(SettingsError, match="here 30"):
        wide.apply(f"{key}:20")
    assert wide.apply(f"{key}:20,large_segment_size_mb:20").large_segment_size == 20 * MIB


def test_nothing_is_changed_by_a_text_that_fails():
    settings = DEFAULT.apply("max_split_size_mb:40,per_process_memory_fraction:0.5")
    before = dataclasses.asdict(settings)
    with pytest.raises(SettingsError):
        settings.apply("large_segment_size_mb:30,roundup_power2_divisions:3")
    assert dataclasses.asdict(settings) == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.text = ""


@pytest.mark.parametrize("text", [None, 40, b"max_split_size_mb:40", ["a"]])
def test_what_is_no_text_is_a_type_error(text: object):
    with pytest.raises(TypeError, match="settings are a text such as"):
        DEFAULT.apply(text)
    with pytest.raises(TypeError, match="such as 'pinned_"):
        PinnedSettings().apply(text)


# Rounding ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("2", [(16, 2)]),
        ("[64:8]", [(7, 8), (9, 0)]),
        ("[64:8,256:4]", [(7, 8), (1, 0), (1, 4), (7, 0)]),  # a gap stays 0
        ("[64:8,128:2,>:1]", [(7, 8), (1, 2), (8, 1)]),
        ("[>:2]", [(1, 0), (15, 2)]),
        ("[>:2,64:8]", [(7, 8), (9, 2)]),
        ("[64:8,>:2,256:4]", [(7, 8), (1, 2), (1, 4), (7, 2)]),
        ("[64:8,2:4,>:1]", [(1, 8), (1, 4), (14, 1)]),  # out of order
        ("[32768:8,>:2]", [(16, 8)]),
        ("[65536:4]", [(16, 4)]),
        ("[1:2,1048576:4]", [(1, 2), (14, 0), (1, 4)]),
        ("[64:0,128:4]", [(7, 0), (1, 4), (8, 0)]),
        ("[64:8,]", [(7, 8), (9, 0)]),
        ("[]", [(16, 0)]),
    ],
)
def test_the_divisions_of_a_list(text: str, runs: list[tuple[int, int]]):
    """`runs` are lengths and divisions, from 1 MiB upwards."""
    assert divisions(text) == tuple(n for length, n in runs for _ in range(length))
    assert divisions(text, strict=True) == divisions(text)


def test_repeated_lists_and_entries_lie_over_one_another():
    assert divisions("[64:8,64:2]", strict=True) == divisions("[32:8,64:2]")
    twice = "4,roundup_power2_divisions:[2:8]"
    assert divisions(twice, strict=True) == (8, 8) + (4,) * 14


@pytest.mark.parametrize(
    ("setting", "size", "rounded"),
    [
        ("4", 84 * MIB, 96 * MIB),  # (row 70)
        ("4", 1200, 1536),  # (row 71)
        ("4", 2048, 2048),
        ("4", 2049, 2560),
        ("8", 4096, 4096),  # (row 72)
        ("8", 4097, 4608),
        ("1", 1200, 1536),  # (row 73)
        ("[64:8,256:4]", 150 * MIB + 1, 150 * MIB + 512),  # (row 74)
        ("[64:8,256:2]", 400 * MIB, 512 * MIB),  # (row 75)
        ("[64:8,256:2]", 3 * MIB + 1, 3 * MIB + MIB // 4),  # (row 76)
        ("[]", 0, 512),
        ("[]", 1, 512),
        ("[]", 512, 512),
        ("[]", 513, 1024),
        ("4", 511, 512),
        ("2", 40 * GIB + 1, 48 * GIB),
        ("18014398509481984", 1200, 1536),
        ("36028797018963968", 1200, 2048),  # upstream's product wraps to 0
    ],
)
def test_a_size_is_rounded(setting: str, size: int, rounded: int):
    settings = DEFAULT.apply(f"roundup_power2_divisions:{setting}")
    assert settings.round_size(size) == rounded


@pytest.mark.parametrize(
    ("size", "interval"),
    [
        *((1, 1), (MIB, 1), (2 * MIB - 1, 1), (2 * MIB, 2), (4 * MIB - 1, 2), (64 * MIB, 64)),
        *((32 * GIB - 1, 16384), (32 * GIB, 32768), (2**50, 32768)),
    ],
)
def test_a_size_has_the_divisions_of_its_power_of_two(size: int, interval: int):
    table = tuple(1 << i for i in range(ENTRIES))
    settings = dataclasses.replace(DEFAULT, roundup_power2_divisions=table)
    assert settings.divisions_for(size) == interval


@given(st.integers(0, 2**50), st.sampled_from([0, 1, 2, 4, 8, 16, 64, 2**20]))
def test_a_rounded_size_fits_is_a_multiple_of_512_and_stays_when_rounded_again(size: int, n: int):
    settings = dataclasses.replace(DEFAULT, roundup_power2_divisions=(n,) * ENTRIES)
    rounded = settings.round_size(size)
    assert rounded >= max(size, 512)
    assert rounded % 512 == 0
    assert settings.round_size(rounded) == rounded
    most = size / n if n > 1 else 0  # the power of two below the size, over the divisions
    assert rounded - size <= max(512, most)


# Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "written", "facts"),
    [
        ("max_split_size_mb:19", "19", ["'19' is too small", "large_segment_size_mb, here 20"]),
        ("max_split_size_mb:4x", "4x", ["'4x' is not a whole number", "of MiB"]),
        ("max_split_size_mb:40.7", "40.7", ["not a whole number"]),
        ("max_split_size_mb:-1", "-1", ["has a sign"]),
        ("max_split_size_mb:[4]", "[", ["takes no list"]),
        ("max_split_size_mb:", "", ["the value is missing at the end"]),
        ("max_split_size_mb:,", ",", ["the value is missing between ':' and ','"]),
        ("max_split_size_mb", "", ["a colon is missing at the end"]),
        ("max_split_size_mb,4", ",", ["a colon is missing between 'max_split_size_mb' and ','"]),
        ("max_split_size_mb:40:", ":", ["a comma is missing between '40' and ':'"]),
        ("large_segment_size_mb:9", "9", ["too small", "at least 11"]),
        (
            "garbage_collection_threshold:1.0",
            "1.0",
            ["'1.0' is out of range", "above 0 and below 1"],
        ),
        ("garbage_collection_threshold:abc", "abc", ["'abc' is not a number", "such as 0.8"]),
        ("per_process_memory_fraction:2", "2", ["from 0 to 1"]),
        ("roundup_power2_divisions:3", "3", ["'3' is not a power of two", "[64:8,256:4,>:1]"]),
        ("roundup_power2_divisions:[3:4]", "3", ["'3' is not a power of two, or '>'"]),
        ("roundup_power2_divisions:[64:3]", "64:3", ["'64:3' has divisions that are neither"]),
        ("roundup_power2_divisions:[64:8", "", ["closing bracket is missing at the end"]),
        ("release_lock_on_hipmalloc:1", "1", ["'1' is neither True nor False"]),
        ("backend:native,backend:native", "", ["is given twice"]),
        ("pinned_num_register_threads:3", "3", ["from 1 to 128"]),
        ("backend:foo", "foo", ["'foo' is neither native nor cudaMallocAsync"]),
        ("expandable_segments:true", "true", ["neither True nor False"]),
        (",", ",", ["a setting is missing before ','", *KEYS]),
    ],
)
def test_an_error_names_the_key_what_was_given_and_what_is_allowed(
    text: str, written: str, facts: list[str]
):
    error = refusal(text)
    assert isinstance(error, ValueError)
    assert (error.key, error.given) == (text.replace(",", ":").partition(":")[0], written)
    assert str(error).startswith(error.key)
    assert f"allowed: {error.allowed}" in str(error)
    for fact in facts:
        assert fact in str(error)


def test_two_names_of_one_setting_are_one_setting():
    error = refusal("release_lock_on_cudamalloc:True,release_lock_on_hipmalloc:True")
    assert error.key == "release_lock_on_hipmalloc"
    assert "is given twice (it is another name of release_lock_on_cudamalloc)" in str(error)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("backend:cudaMallocAsync", ["native", "kind='async'"]),
        ("expandable_segments:True,backend:cudaMallocAsync", ["native", "kind='async'"]),
    ],
)
def test_memory_that_bfc_does_not_manage_is_refused_in_words(
    text: str, facts: list[str], strict: bool
):
    error = refusal(text, strict)
    assert "is not possible" in str(error)
    assert error.hint in str(error)
    for fact in facts:
        assert fact in str(error)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("max_split_size", "max_split_size_mb"),
        ("Max_Split_Size_MB", "max_split_size_mb"),
        ("garbage_colection_threshold", "garbage_collection_threshold"),
        ("expandable_segment", "expandable_segments"),
        ("roundup_power2_division", "roundup_power2_divisions"),
        ("xyz", ""),
    ],
)
def test_a_misspelt_key_is_told_which_was_meant(typo: str, meant: str):
    error = refusal(f"{typo}:4")
    assert f"there is no setting {typo!r}" in str(error)
    assert error.hint == meant
    assert all(key in str(error) for key in KEYS)
    assert (f"try: {meant}" in str(error)) == bool(meant)


@pytest.mark.parametrize(("key", "since"), LATER.items())
@pytest.mark.parametrize("strict", [False, True])
def test_a_key_of_a_later_pytorch_names_the_version_that_has_it(key: str, since: str, strict: bool):
    value, field = STICKY[key]
    error = refusal(f"{key}:{value}", strict, torch="2.11")
    assert error.key == key
    assert f"PyTorch {since} and later have it, PyTorch 2.11 does not" in str(error)
    assert key not in error.allowed
    assert error.hint.startswith("torch='2.15'")
    newest = DEFAULT.apply(f"{key}:{value}", strict, torch="2.15")
    assert getattr(newest, field) != getattr(DEFAULT, field)
    newest.check_version("2.15")
    with pytest.raises(SettingsError, match=f"{key}: PyTorch {since} and later"):
        newest.check_version("2.11")


@pytest.mark.parametrize("make", [bfc.CachingAllocator, bfc.PinnedAllocator])
def test_an_allocator_of_an_older_pytorch_refuses_them(make: Callable[..., Any]):
    text, later = "pinned_max_cached_size_mb:4", "PyTorch 2.13 and later"
    kind = bfc.CachingSettings if make is bfc.CachingAllocator else PinnedSettings
    with pytest.raises(SettingsError, match=later):
        make(bfc.HostSubAllocator("8 MiB"), settings=text, torch="2.11")
    with pytest.raises(SettingsError, match=later):
        make(bfc.HostSubAllocator("8 MiB"), settings=kind().apply(text), torch="2.11")
    allocator = make(bfc.HostSubAllocator("8 MiB"), torch="2.11")
    with allocator, pytest.raises(SettingsError, match=later):
        allocator.set_settings(text)
    with make(bfc.HostSubAllocator("8 MiB"), settings=text) as allocator:
        assert allocator.settings == text


@pytest.mark.parametrize("torch", ["2.12", "2.14", "3", ""])
def test_settings_of_an_unknown_version(torch: str):
    with pytest.raises(ValueError, match=re.escape(repr(torch))):
        DEFAULT.apply("max_split_size_mb:40", torch=torch)
    with pytest.raises(ValueError, match=r"2\.15"):
        DEFAULT.check_version(torch)


@pytest.mark.parametrize("bad", ["x", "-1", "0", "inf", "nan", "0.5x", "G", "0G", "1e400", "0x1"])
def test_a_wrong_reserve_is_an_error_and_under_strict_a_warning(bad: str):
    assert "not a part of the device" in str(refusal(f"expandable_segments_reserve:{bad}"))
    listed = f"expandable_segments_reserve_by_class:[a:{bad},b:0.5]"
    assert "not a part of the device" in str(refusal(listed))
    before = DEFAULT.apply("expandable_segments_reserve:0.25")
    with pytest.warns(UserWarning, match="is ignored"):
        assert before.apply(f"expandable_segments_reserve:{bad}", strict=True) == (
            dataclasses.replace(before, text=f"expandable_segments_reserve:{bad}")
        )
    with pytest.warns(UserWarning, match="is ignored"):
        kept = DEFAULT.apply(listed, strict=True).expandable_segments_reserve_by_class
    assert kept == (("b", 0.5),)


@pytest.mark.parametrize("strict", [False, True])
def test_reserves_by_class_are_a_list(strict: bool):
    assert "takes a list" in str(refusal("expandable_segments_reserve_by_class:3", strict))
    assert "takes no list" in str(refusal("expandable_segments_reserve:[a:1]", strict))


@pytest.mark.parametrize("text", ["a" * 5000, "max_split_size_mb:" + "9" * 5000, "\x00\n\ud800:1"])
def test_an_error_is_short_and_printable(text: str):
    said = str(refusal(text))
    assert len(said) < 700
    assert said.replace("\n", "").isprintable()


def test_an_error_survives_pickling_and_copying():
    error = refusal("max_split_siz:4").found_in("SOMEWHERE")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is SettingsError
        assert str(other) == str(error)
        assert vars(other) == vars(error)


# The environment -----------------------------------------------------------------------------


def test_the_environment_sets(monkeypatch: pytest.MonkeyPatch):
    assert CachingSettings.from_environment({}) == DEFAULT
    assert CachingSettings.from_environment({VARIABLE: ""}) == DEFAULT
    text = "max_split_size_mb:40"
    assert CachingSettings.from_environment({VARIABLE: text}) == DEFAULT.apply(text)
    monkeypatch.setitem(os.environ, VARIABLE, text)
    assert CachingSettings.from_environment() == DEFAULT.apply(text)
    loose = {VARIABLE: text + "x"}
    assert CachingSettings.from_environment(loose, strict=True).max_split_size == 40 * MIB


def test_an_error_names_the_variable():
    with pytest.raises(SettingsError, match=r"^BFC_ALLOC_CONF: max_split_size_mb: '2' is too sm"):
        CachingSettings.from_environment({"BFC_ALLOC_CONF": "max_split_size_mb:2"})


# Keyword arguments ---------------------------------------------------------------------------


@pytest.mark.parametrize("key", [*RESET, *STICKY])
def test_a_keyword_argument_is_the_same_as_the_text(key: str):
    value, _ = (RESET | STICKY)[key]
    argument = {"True": True, "0.5": 0.5, "[a:1G]": {"a": "1G"}}.get(value) or int(value)
    assert DEFAULT.with_options(**{key: argument}) == DEFAULT.apply(f"{key}:{value}")


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ({64: 8, 256: 4}, "[64:8,256:4]"),
        ({64: 8, ">": 2}, "[64:8,>:2]"),
        ({">": 2}, "[>:2]"),
        ({}, "[]"),
        (8, "8"),
    ],
)
def test_divisions_as_a_number_or_a_dict(argument: object, text: str):
    settings = DEFAULT.with_options(roundup_power2_divisions=argument)
    assert settings.roundup_power2_divisions == divisions(text)


def test_an_option_resets_nothing():
    settings = DEFAULT.apply("max_split_size_mb:40,roundup_power2_divisions:[64:8]")
    more = settings.with_options(garbage_collection_threshold=0.8)
    assert changed(more) == changed(settings) | {"garbage_collection_threshold": 0.8}
    assert more.text == (
        "max_split_size_mb:40,garbage_collection_threshold:0.8,roundup_power2_divisions:[64:8]"
    )
    assert settings.with_options() is settings
    assert settings.with_options(roundup_power2_divisions={}).roundup_power2_divisions == (0,) * 16


def test_an_option_moves_the_non_split_rounding_with_the_large_segment_size():
    assert DEFAULT.with_options(large_segment_size_mb=30).max_non_split_rounding == 30 * MIB
    own = DEFAULT.apply("max_non_split_rounding_mb:50")
    assert own.with_options(large_segment_size_mb=30).max_non_split_rounding == 50 * MIB
    with pytest.raises(SettingsError, match="max_split_size_mb: '25' is too small"):
        DEFAULT.apply("max_split_size_mb:25").with_options(large_segment_size_mb=30)


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"max_split_size_mb": 19}, "max_split_size_mb: '19' is too small"),
        ({"max_split_size_mb": -1}, "max_split_size_mb: '-1' has a sign"),
        ({"max_split_size_mb": 10**30}, "is not below 2"),
        ({"max_split_size_mb": 10**10000}, r"'2\*\*33219 or more' is not"),
        ({"garbage_collection_threshold": 1}, "'1.0' is out of range"),
        ({"garbage_collection_threshold": float("nan")}, "'nan' is out of range"),
        ({"per_process_memory_fraction": -0.5}, "'-0.5' is out of range"),
        ({"per_process_memory_fraction": float("inf")}, "'inf' is out of range"),
        ({"roundup_power2_divisions": 3}, "'3' is not a power of two"),
        ({"roundup_power2_divisions": {3: 4}}, "'3' is not a power of two"),
        ({"roundup_power2_divisions": {64: 3}}, "'64:3' has divisions"),
        ({"pinned_num_register_threads": 256}, "'256' is out of range"),
    ],
)
def test_an_option_out_of_range(options: dict[str, object], fact: str):
    with pytest.raises(SettingsError, match=fact):
        DEFAULT.with_options(**options)


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"max_split_size_mb": 40.0}, "max_split_size_mb is an int, not 40.0"),
        ({"max_split_size_mb": "40"}, "is an int, not '40'"),
        ({"max_split_size_mb": True}, "is an int, not True"),
        ({"roundup_power2_divisions": "[64:8]"}, "is an int or a dict"),
        ({"roundup_power2_divisions": {"64": 8}}, "is an int or a dict"),
        ({"roundup_power2_divisions": [8] * 16}, "is an int or a dict"),
        ({"release_lock_on_cudamalloc": 1}, "is a bool, not 1"),
        ({"max_split_size": 40}, "unexpected keyword"),
    ],
)
def test_an_option_of_a_wrong_type(options: dict[str, object], fact: str):
    with pytest.raises(TypeError, match=fact):
        DEFAULT.with_options(**options)


# As PyTorch shows them -----------------------------------------------------------------------


def test_the_settings_of_a_snapshot():
    limits = {"max_round_threshold": -1, "max_cached_size": -1}
    assert DEFAULT.as_torch() == DEFAULT.as_torch("2.11") | limits
    limited = "pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:2"
    shown = DEFAULT.apply(limited).as_torch("2.15")
    assert (shown["max_round_threshold"], shown["max_cached_size"]) == (MIB, 2 * MIB)
    assert DEFAULT.as_torch("2.11") == {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": False,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "roundup_power2_divisions": {str(1 << i): 0 for i in range(16)},
    }


def test_the_settings_of_a_snapshot_after_a_text():
    text = (
        "max_split_size_mb:40, garbage_collection_threshold:0.5,release_lock_on_hipmalloc:True,"
        "roundup_power2_divisions:[2:4,>:2],pinned_num_register_threads:8"
    )
    shown = DEFAULT.apply(text).as_torch()
    assert shown["PYTORCH_CUDA_ALLOC_CONF"] == text
    assert shown["max_split_size"] == 40 * MIB
    assert shown["garbage_collection_threshold"] == 0.5
    assert shown["release_lock_on_cudamalloc"] is True
    assert shown["pinned_num_register_threads"] == 8
    assert list(shown["roundup_power2_divisions"].items())[:3] == [("1", 4), ("2", 4), ("4", 2)]
    assert DEFAULT.apply("max_split_size_mb:-1", strict=True).as_torch()["max_split_size"] == -MIB


# Any text ------------------------------------------------------------------------------------

NUMBERS = (
    *("40", "20", "19", "30", "25", "11", "10", "0", "1", "2", "3", "4", "8", "64", "128", "256"),
    *("-1", "+40", "40abc", "1.0", "0.5", "0.9x", ".5", "5e-1", "1e-400", "0x1p-1", "nan", "inf"),
    *("18446744073709551615", "18446744073709551616", "36028797018963968"),
)
WORDS = (*KEYS, *ALIASES, *NUMBERS, "True", "False", "native", ">", "x", " ")
SEPARATORS = (",", ":", "[", "]")


def draw_list(dice: random.Random) -> str:
    intervals = ["1", "2", "64", "256", ">", "32768", *dice.choice(([], [], [], ["65536", "3"]))]
    pairs = [
        dice.choice(intervals)
        + (":" if dice.random() < 0.97 else dice.choice(SEPARATORS))
        + (dice.choice(("0", "1", "2", "8")) if dice.random() < 0.97 else dice.choice(NUMBERS))
        for _ in range(dice.randint(0, 4))
    ]
    return f"[{','.join(pairs)}{dice.choice((']', ']', ']', ',]', '', ']]'))}"


def draw_value(dice: random.Random, key: str) -> str:
    if dice.random() < 0.1:
        return dice.choice(WORDS)
    if key == "roundup_power2_divisions":
        return draw_list(dice) if dice.random() < 0.7 else dice.choice(("1", "2", "4", "8", "3"))
    if key in ("garbage_collection_threshold", "per_process_memory_fraction"):
        return dice.choice(("0.5", "0.9", "1e-3", ".5", "0", "1", "1.0"))
    if key.startswith("expandable_segments_reserve"):
        size = dice.choice(("0.5", "1", "2G", "1.5g", "0", "G", "-1", "1e300G"))
        return f"[a:{size},>:2]" if key.endswith("by_class") else size
    if key.startswith(("expandable", "release", "graph", "pinned_use", "throw", "pinned_free")):
        return dice.choice(("True", "False"))
    if key == "pinned_num_register_threads":
        return dice.choice(("1", "2", "128", "256", "3"))
    if key == "backend":
        return "native"
    return dice.choice(("20", "25", "30", "40", "11", "19"))


def draw_text(dice: random.Random) -> str:
    """A text that is right, or nearly, or not at all."""
    if dice.random() < 0.15:
        return "".join(dice.choice(WORDS + SEPARATORS * 9) for _ in range(dice.randint(1, 8)))
    items = []
    for _ in range(dice.randint(0, 4)):
        key = dice.choice((*KEYS, *ALIASES))
        colon = ":" if dice.random() < 0.97 else dice.choice((",", "]", "[", ""))
        items.append(f"{key}{colon}{draw_value(dice, key)}")
    joint = "," if dice.random() < 0.9 else dice.choice((*SEPARATORS, ",,"))
    return joint.join(items) + (dice.choice((",", "]", "x", " ")) if dice.random() < 0.1 else "")


texts = st.one_of(st.text(), st.randoms(use_true_random=False).map(draw_text))


@pytest.mark.filterwarnings("ignore:expandable_segments_reserve")
@given(texts, st.booleans())
@example("expandable_segments_reserve:1e300G", True)
@example("roundup_power2_divisions:[64:8]large_segment_size_mb", True)
def test_no_text_does_anything_but_set_or_raise_a_settings_error(text: str, strict: bool):
    with contextlib.suppress(SettingsError):
        settings = DEFAULT.apply(text, strict)
        assert settings.text == text
        assert settings.max_non_split_rounding >= settings.large_segment_size > 10 * MIB
        assert settings.max_split_size is None or (
            settings.max_split_size >= settings.large_segment_size
        )
        assert 0 <= settings.garbage_collection_threshold < 1
        assert 0 <= settings.per_process_memory_fraction <= 1
        assert len(settings.roundup_power2_divisions) == ENTRIES
        assert all(n.bit_count() < 2 for n in settings.roundup_power2_divisions)
        settings.as_torch()


@given(texts)
def test_what_is_accepted_means_the_same_when_strict(text: str):
    with contextlib.suppress(SettingsError):
        assert DEFAULT.apply(text) == DEFAULT.apply(text, strict=True)


@pytest.mark.filterwarnings("ignore:expandable_segments_reserve")
@given(texts)
def test_a_text_can_be_written_anew(text: str):
    with contextlib.suppress(SettingsError):
        settings = DEFAULT.apply(text, strict=True)
        again = DEFAULT.apply(settings.as_text())
        assert changed(again) == changed(settings)
        assert again.as_text() == settings.as_text()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("start", "repeated"),
    [
        *(("", "a"), ("", "max_split_size_mb"), ("", "max_split_size_mb:40,"), ("", "backend:")),
        *(("max_split_size_mb:", "9"), ("max_split_size_mb:", "0")),
        *(("garbage_collection_threshold:0.", "9"), ("garbage_collection_threshold:0.", "0")),
        *(("garbage_collection_threshold:0x1p-", "9"), ("garbage_collection_threshold:5e", "9")),
        *(("roundup_power2_divisions:[", ">:2,"), ("roundup_power2_divisions:", "[")),
        *(("", mark) for mark in (" ", ",", ":", "[", "]", "\0")),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_a_hostile_text_is_read_or_refused_at_once(start: str, repeated: str, strict: bool):
    text = start + repeated * (200_000 // len(repeated))
    began = time.perf_counter()
    for end in ("", "1", "]"):
        with contextlib.suppress(SettingsError):
            DEFAULT.apply(text + end, strict)
    assert time.perf_counter() - began < 10


# Beside the original -------------------------------------------------------------------------

SIZES = (1200, 4097, 84 * MIB, *(n * MIB + 1 for n in (1, 2, 3, 5, 65, 129, 257, 33 << 10)))


@pytest.fixture(params=VERSIONS)
def fresh(request: pytest.FixtureRequest) -> Iterator[Callable[..., TorchPeer]]:
    """Makes peers of 200 GiB, of each version; each new one ends the one before."""
    peers: list[TorchPeer] = []

    def start(**options: object) -> TorchPeer:
        if peers:
            peers.pop().close()
        peers.append(TorchPeer(torch=start.torch, capacity=200 * GIB, **options))
        return peers[-1]

    start.torch = request.param
    yield start
    for peer in peers:
        peer.close()


def handed_out(peer: TorchPeer, nbytes: int) -> int:
    """The size of the block that a request gets."""
    address = peer.malloc(nbytes)
    blocks = (block for segment in peer.snapshot() for block in segment["blocks"])
    return next(block["size"] for block in blocks if block["address"] == address)


def same_rounding(peer: TorchPeer, settings: CachingSettings) -> None:
    split = settings.max_split_size or 2**64
    for size in SIZES:
        rounded = settings.round_size(size)
        # From large segments the rest may be too small to split off, or must stay.
        slack = MIB if rounded < split else max(2 * MIB, settings.large_segment_size)
        assert rounded <= handed_out(peer, size) <= rounded + slack, size


def same_values(peer: TorchPeer, settings: CachingSettings) -> None:
    """The values in a process that started with this text."""
    assert peer.stats()["max_split_size"] == settings.as_torch()["max_split_size"]
    assert peer.memory_fraction() == pytest.approx(settings.per_process_memory_fraction)
    fits = settings.per_process_memory_fraction >= 0.5 and settings.large_segment_size < GIB
    if fits and settings.round_size(4 * MIB) < 10 * MIB:
        peer.malloc(4 * MIB)
        assert peer.snapshot()[0]["total_size"] == settings.large_segment_size


def check_against(fresh: Callable[..., TorchPeer], text: str) -> None:
    refused = fresh().set_settings(text)
    assert accepts(text, strict=True, torch=fresh.torch) == (refused is None), (text, refused)
    if refused is None:
        settings = DEFAULT.apply(text, strict=True, torch=fresh.torch)
        same_values(fresh(settings=text), settings)
        all_fit = settings.per_process_memory_fraction == 1 and settings.large_segment_size < GIB
        if all_fit and settings.expandable_segments_reserve is None:
            same_rounding(fresh(settings=text), settings)


@pytest.mark.filterwarnings("ignore:expandable_segments_reserve")
@pytest.mark.peers
@pytest.mark.parametrize("seed", range(4))
def test_strict_accepts_and_means_what_the_original_does(
    fresh: Callable[..., TorchPeer], seed: int
):
    dice = random.Random(seed)
    for _ in range(400):
        text = draw_text(dice)
        check_against(fresh, text)


@pytest.mark.filterwarnings("ignore:expandable_segments_reserve")
@pytest.mark.peers
@pytest.mark.parametrize(
    "text",
    [
        *(
            f"max_split_size_mb:{n}"
            for n in (*NUMBERS, "4 0", "- 40", "--40", "[40]", "4\x000", "")
        ),
        *(f"max_non_split_rounding_mb:{n}" for n in NUMBERS),
        *(f"large_segment_size_mb:{n}" for n in NUMBERS),
        *(f"garbage_collection_threshold:{n}" for n in NUMBERS),
        *(
            f"garbage_collection_threshold:{n}"
            for n in ("1e-5", "0x1p-1030", "0.5e", "-nan", "1e5")
        ),
        *(f"garbage_collection_threshold:{n}" for n in (".", "0x", "1e400", "1e-310", "nan(a)")),
        *(f"per_process_memory_fraction:{n}" for n in NUMBERS),
        *(f"roundup_power2_divisions:{n}" for n in NUMBERS),
        *(f"pinned_num_register_threads:{n}" for n in NUMBERS),
        *(f"pinned_reserve_segment_size_mb:{n}" for n in NUMBERS),
        *(f"expandable_segments_reserve:{n}{unit}" for n in NUMBERS for unit in ("", "G")),
        *(f"expandable_segments_reserve_by_class:[a:{n}]" for n in NUMBERS),
        *(f"{key}:True" for key in (*STICKY, *ALIASES, "backend")),
        *(f"{key}:true" for key in (*KEYS, *ALIASES)),
        *(f"{key}:False" for key in (*KEYS, *ALIASES)),
        *("backend:native", "backend:nat ive", "backend:foo", "backend:cudaMallocAsync"),
        *(",", "max_split_size_mb:40,", ",max_split_size_mb:40", "max_\x0csplit_size_mb:40"),
        *("max_split_size_mb:40;", "max_split_size_mb\u00a0:40", "max_split_size_mb:40\x1c"),
        *("max_split_size_mb]40", "max_split_size_mb:40]garbage_collection_threshold:0.5"),
        *("backend:native[max_split_size_mb:40", "max_split_size_mb:25,max_split_size_mb:5"),
        "max_split_size_mb:12,large_segment_size_mb:11",
        "max_split_size_mb:20,large_segment_size_mb:30",
        "large_segment_size_mb:30,large_segment_size_mb:11,max_split_size_mb:20",
        "large_segment_size_mb:11,large_segment_size_mb:30,max_split_size_mb:20",
    ],
)
def test_the_edges_are_those_of_the_original(fresh: Callable[..., TorchPeer], text: str):
    check_against(fresh, text)


@pytest.mark.peers
@pytest.mark.parametrize(
    "setting",
    [
        *("[]", "[64:8,128:2,>:1]", "[>:2]", "[>:2,64:8]", "[>:2,>:4]", "[64:8,>:2,256:4]"),
        *("[64:8,256:4]", "[64:8,2:4,>:1]", "[32768:8,>:2]", "[65536:4]", "[64:8,64:2]", "[64:0]"),
        *("[64:8,]", "[64:8]]", "[64:8].", "[64:8]x", "[64:8:128:2]", "[64:8[128:2]", "[64,8]"),
        *("[64x:8y]", "[64]8]", "[64:8,128]2]", "[-9223372036854775808:2]", "[64:-0]", "[64:-1]"),
        *("[64:8", "[64:8,", "[64]", "[64:]", "[:8]", "[,64:8]", "[0:4]", "[3:4]", "[64:3]", "]"),
        *("[64:8][128:2]", "64:8", "[>>:2]", "[> :2]", "[>2:2]", "[>:3]", "[>:0]", "[[64:8]]"),
        *(
            "[64:8]large_segment_size_mb",
            "[64:8]large_segment_size_mb:30",
            "[64:8]x,backend:native",
        ),
        *("4,roundup_power2_divisions:[]", "4,roundup_power2_divisions:[2:8]"),
        *("18014398509481984", "36028797018963968", "9223372036854775808"),
    ],
)
def test_the_lists_are_read_as_by_the_original(fresh: Callable[..., TorchPeer], setting: str):
    check_against(fresh, f"roundup_power2_divisions:{setting}")


def reuses(peer: TorchPeer, free: int, request: int) -> bool:
    """Whether the request is served from a free block of that size."""
    peer.empty_cache()
    whole = peer.malloc(free)
    peer.free(whole)
    part = peer.malloc(request)
    peer.free(part)
    return part == whole


def split_size_in_force(peer: TorchPeer, nbytes: int) -> bool:
    return not reuses(peer, nbytes, nbytes - 4 * MIB) and reuses(
        peer, nbytes - 2 * MIB, nbytes - 4 * MIB
    )


def rounding_in_force(peer: TorchPeer, nbytes: int, rounding: int) -> bool:
    """Whether an oversize request gets a free block that is less than so much larger."""
    return not reuses(peer, nbytes + rounding, nbytes) and reuses(
        peer, nbytes + rounding - 2 * MIB, nbytes
    )


@pytest.mark.peers
@pytest.mark.parametrize("seed", range(3))
def test_what_sticks_and_what_is_reset_is_that_of_the_original(
    fresh: Callable[..., TorchPeer], seed: int
):
    """(rows 50 and 51) A history of texts, every one of which is accepted."""
    dice = random.Random(seed)
    peer, settings = fresh(), DEFAULT
    for _ in range(40):
        parts = [
            f"max_split_size_mb:{dice.choice((40, 64))}",
            f"max_non_split_rounding_mb:{dice.choice((40, 48))}",
            f"large_segment_size_mb:{dice.choice((12, 20, 32))}",
            f"roundup_power2_divisions:{dice.choice(('1', '[2:1]', '[>:1]'))}",
            "pinned_use_background_threads:True",
        ]
        text = ",".join(dice.sample(parts, dice.randint(0, len(parts))))
        assert peer.set_settings(text) is None
        settings = settings.apply(text, strict=True)
        peer.empty_cache()
        peer.free(peer.malloc(4 * MIB))
        assert peer.snapshot()[0]["total_size"] == settings.large_segment_size
        if settings.max_split_size is None:
            assert not split_size_in_force(peer, 40 * MIB)
            assert not split_size_in_force(peer, 64 * MIB)
        else:
            assert split_size_in_force(peer, settings.max_split_size)
            assert rounding_in_force(peer, 80 * MIB, settings.max_non_split_rounding)


@pytest.mark.peers
def test_the_threshold_and_the_divisions_are_reset_as_by_the_original(
    fresh: Callable[..., TorchPeer],
):
    """(rows 46 and 51)"""
    peer, settings = fresh(), DEFAULT
    peer.set_memory_fraction(121 / (200 << 10))
    for text in ("garbage_collection_threshold:0.5", "", "roundup_power2_divisions:4", ""):
        peer.empty_cache()
        assert peer.set_settings(text) is None
        settings = settings.apply(text, strict=True)
        small = peer.malloc(5 * MIB + 1)
        assert peer.snapshot()[0]["blocks"][0]["size"] == settings.round_size(5 * MIB + 1)
        peer.free(small)
        peer.empty_cache()
        for address in [peer.malloc(40 * MIB), peer.malloc(40 * MIB)]:
            peer.free(address)
        before = peer.stats()["num_alloc_retries"]
        large = peer.malloc(80 * MIB)  # with a threshold, it collects before it has to retry
        collected = peer.stats()["num_alloc_retries"] == before
        assert collected == (settings.garbage_collection_threshold > 0)
        peer.free(large)
