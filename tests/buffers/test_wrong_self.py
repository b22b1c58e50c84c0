"""A compiled method that is called on its class, with another object in the place of `self`."""

from __future__ import annotations

import types

import pytest

import bfc

COMPILED = [
    *(bfc.BFCAllocator, bfc.CachingAllocator, bfc.PinnedAllocator),
    *(bfc.Buffer, bfc.SharedCounter),
]
METHODS = [
    (cls, name)
    for cls in COMPILED
    for name in dir(cls)
    if not name.startswith("__") and isinstance(getattr(cls, name), types.MethodDescriptorType)
]


def test_there_are_such_methods() -> None:
    assert {cls for cls, _ in METHODS} == set(COMPILED)
    assert len(METHODS) > 60


@pytest.mark.parametrize(("cls", "name"), METHODS, ids=lambda part: getattr(part, "__name__", part))
def test_a_wrong_self_is_refused(cls: type, name: str) -> None:
    for wrong in (3, object(), None):
        with pytest.raises(TypeError):
            getattr(cls, name)(wrong)
