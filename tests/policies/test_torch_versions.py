"""The version of PyTorch whose rules an allocator follows: which there are, and where they differ.

"(V-1)" is a difference's number in docs/behaviour/pytorch.md.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

import bfc
from bfc.pytorch.rules import NEWEST, VERSIONS, rules_of

MIB = 1 << 20


def caching(torch: str | None = None) -> str:
    named = {} if torch is None else {"torch": torch}
    return bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), **named).torch


def pinned(torch: str | None = None) -> str:
    named = {} if torch is None else {"torch": torch}
    return bfc.PinnedAllocator(bfc.SimulatedSubAllocator("1 GiB"), **named).torch


def of_devices(torch: str | None = None) -> str | None:
    return bfc.opencl.DeviceAllocator(torch=torch, devices=[]).torch


EVERY = pytest.mark.parametrize("make", [caching, pinned, of_devices])


@EVERY
def test_the_newest_is_the_default(make: Callable[..., str]) -> None:
    assert make() == NEWEST == VERSIONS[-1]
    assert [make(version) for version in VERSIONS] == list(VERSIONS)


@EVERY
@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("2.12", "in a way that no other"),
        ("2.13", "Use '2.15'"),
        ("2.14", "Use '2.15'"),
        ("2.10", "'2.11' or '2.15', not '2.10'"),
        ("3.0", "'2.11' or '2.15'"),
        ("", "not ''"),
    ],
)
def test_other_versions_are_refused_in_words(
    make: Callable[..., str], version: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        make(version)


@EVERY
def test_a_version_is_a_text(make: Callable[..., str]) -> None:
    with pytest.raises(TypeError, match=r"is a text .*, not float"):
        make(2.15)


def test_the_version_is_there_for_good() -> None:
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), torch="2.11", strict=True)
    with pytest.raises(AttributeError):
        allocator.torch = "2.15"
    assert allocator.torch == "2.11"


def test_a_version_is_pytorchs_alone() -> None:
    assert bfc.opencl.DeviceAllocator("bfc", devices=[]).torch is None
    with pytest.raises(ValueError, match="policy='caching'"):
        bfc.opencl.DeviceAllocator("bfc", torch="2.15", devices=[])


def test_rules_do_not_change() -> None:
    with pytest.raises(AttributeError):
        rules_of("2.15").by_registration = False  # type: ignore[misc]
