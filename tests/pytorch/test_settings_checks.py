"""Settings that were made directly, switches that are none, and limits that are given twice."""

from __future__ import annotations

import dataclasses
import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import bfc
from bfc.errors import SettingsError
from bfc.pytorch.settings import CachingSettings
from bfc.pytorch.sizes import ENTRIES, MIB


def allocator(**options: object) -> bfc.CachingAllocator:
    return bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), **options)


@pytest.mark.parametrize(
    ("fields", "fault", "allowed"),
    [
        ({"roundup_power2_divisions": (4,) * 4096}, "has 4096 entries", "16 numbers"),
        ({"roundup_power2_divisions": ()}, "has 0 entries", "16 numbers"),
        ({"roundup_power2_divisions": (3,) * ENTRIES}, "nor a power of two", "or 0"),
        ({"roundup_power2_divisions": (-4,) * ENTRIES}, "nor a power of two", "or 0"),
        ({"roundup_power2_divisions": (1 << 64,) * ENTRIES}, "nor a power of two", "or 0"),
        ({"garbage_collection_threshold": math.nan}, "nan is out of range", "above 0"),
        ({"garbage_collection_threshold": 1.0}, "1.0 is out of range", "below 1"),
        ({"garbage_collection_threshold": -0.1}, "-0.1 is out of range", "or 0.0"),
        ({"per_process_memory_fraction": math.inf}, "inf is out of range", "from 0 to 1"),
        ({"per_process_memory_fraction": math.nan}, "nan is out of range", "from 0 to 1"),
        ({"large_segment_size": 512}, "512 bytes are not a whole number of MiB", "at least 11"),
        ({"large_segment_size": 10 * MIB}, "10485760 bytes are out of range", "at least 11"),
        ({"large_segment_size": 1 << 64}, "bytes are out of range", "at least 11"),
        ({"large_segment_size": 30 * MIB}, "20971520 bytes are out of range", "here 30"),
        ({"max_split_size": 19 * MIB}, "19922944 bytes are out of range", "here 20"),
        ({"max_split_size": -MIB}, "-1048576 bytes are out of range", "here 20"),
        ({"max_split_size": MIB << 9999}, "or more bytes are out of range", "here 20"),
        ({"max_non_split_rounding": 0}, "0 bytes are out of range", "here 20"),
        ({"pinned_reserve_segment_size": -MIB}, "are out of range", "at least 1, or 0"),
        ({"pinned_num_register_threads": 3}, "3 is out of range", "from 1 to 128"),
        ({"pinned_num_register_threads": 0}, "0 is out of range", "from 1 to 128"),
    ],
)
def test_a_field_out_of_range_is_refused(fields: dict[str, object], fault: str, allowed: str):
    with pytest.raises(SettingsError) as caught:
        CachingSettings(**fields)
    error = caught.value
    assert fault in error.fault
    assert allowed in error.allowed
    assert error.key in (*fields, "max_non_split_rounding")
    assert len(str(error)) < 400
    with pytest.raises(SettingsError):
        dataclasses.replace(CachingSettings(), **fields)


@pytest.mark.parametrize(
    ("fields", "fact"),
    [
        ({"roundup_power2_divisions": 4}, "is a tuple of ints, not 4"),
        ({"roundup_power2_divisions": (True,) * ENTRIES}, "is a tuple of ints"),
        ({"max_split_size": 40.0}, "max_split_size is an int of bytes, not 40.0"),
        ({"large_segment_size": None}, "is an int of bytes, not None"),
        ({"pinned_num_register_threads": True}, "is an int, not True"),
        ({"garbage_collection_threshold": "0.5"}, "is a float, not '0.5'"),
        ({"release_lock_on_cudamalloc": "no"}, "is a bool, not 'no'"),
        ({"text": b""}, "text is a str, not b''"),
    ],
)
def test_a_field_of_a_wrong_type_is_refused(fields: dict[str, object], fact: str):
    with pytest.raises(TypeError, match=fact):
        CachingSettings(**fields)


def test_a_field_that_is_right_is_taken_in_its_own_type():
    settings = CachingSettings(
        max_split_size=40 * MIB,
        garbage_collection_threshold=0,
        roundup_power2_divisions=[4] * ENTRIES,
        per_process_memory_fraction=1,
        pinned_reserve_segment_size=3 * MIB,
    )
    assert settings.roundup_power2_divisions == (4,) * ENTRIES
    assert type(settings.garbage_collection_threshold) is float
    assert type(settings.per_process_memory_fraction) is float
    assert CachingSettings().apply(settings.as_text()) == dataclasses.replace(
        settings, text=settings.as_text()
    )


UNCHECKED = """
import bfc
from bfc.pytorch.settings import CachingSettings
settings = CachingSettings()
object.__setattr__(settings, "roundup_power2_divisions", (4,) * 4096)
try:
    bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), settings=settings)
except bfc.SettingsError as error:
    print(error.fault)
"""


def test_fields_that_were_set_past_the_checks_do_not_reach_the_pool():
    """On its own: memory was overwritten once."""
    folder = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", UNCHECKED], cwd=folder, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "has 4096 entries\n"), ran.stderr


def test_settings_survive_a_pickle_and_serve():
    settings = CachingSettings().apply("roundup_power2_divisions:4")
    again = pickle.loads(pickle.dumps(settings))
    assert again == settings
    with allocator(settings=again) as made:
        assert made.allocated_size(made.allocate_raw(84 * MIB)) == 96 * MIB


@pytest.mark.parametrize("value", ["no", 0, 1, 1.0, []])
@pytest.mark.parametrize(
    "name", ["strict", "search_again", "collect_without_limit", "release_only_what_is_needed"]
)
def test_a_switch_is_a_bool(name: str, value: object):
    with pytest.raises(TypeError, match=f"{name} is True or False, not"):
        allocator(**{name: value})


# Limits that are given twice, or too late ----------------------------------------------------


def test_two_arguments_for_one_limit_are_a_mistake():
    with pytest.raises(ValueError, match="give one of them"):
        allocator(memory_limit="100 MiB", per_process_memory_fraction=0.5)


@pytest.mark.parametrize("strict", [False, True])
def test_a_limit_goes_before_the_fraction_of_the_settings(strict: bool):
    text = "per_process_memory_fraction:0.5"
    with allocator(settings=text, strict=strict) as made:
        assert made.memory_fraction == 0.5
    with allocator(memory_limit="128 MiB", settings=text, strict=strict) as made:
        assert made.memory_fraction == 0.125
    with allocator(memory_limit=0.25, settings=text, strict=strict) as made:
        assert made.memory_fraction == 0.25


def test_a_fraction_that_comes_too_late_is_refused_unless_strict():
    with allocator() as made:
        with pytest.raises(SettingsError) as caught:
            made.set_settings("roundup_power2_divisions:4,per_process_memory_fraction:0.5")
        assert caught.value.key == "per_process_memory_fraction"
        assert caught.value.hint == "allocator.set_memory_fraction(0.5)"
        assert (made.settings, made.memory_fraction) == ("", 1.0)
        assert made.allocated_size(made.allocate_raw(84 * MIB)) == 84 * MIB
    text = "per_process_memory_fraction:0.5"
    with allocator(settings=text) as made:
        made.set_memory_fraction(0.75)
        made.set_settings(f"{text},max_split_size_mb:40")  # the same as before
        assert made.memory_fraction == 0.75
    with allocator(strict=True) as made:
        made.set_settings(text)
        assert (made.settings, made.memory_fraction) == (text, 1.0)
