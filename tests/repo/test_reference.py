"""The reference has every public name and every member of a public class."""

from __future__ import annotations

import re
import types

from public_names import REFERENCE, public_members, thing_of
from sources import assert_none

import bfc
from bfc import study, testing

MODULES_OF_USERS = ("cuda", "opencl", "pinned", "integrations", "testing")


def public_names() -> list[str]:
    """Every name that the reference must have, with the module that a user takes it from: what
    `bfc` has too is described there alone."""
    names = [f"bfc.{name}" for name in bfc.__all__ if name not in MODULES_OF_USERS]
    of_testing = [
        name
        for name in testing.__all__
        if name != "cuda_emulator" and getattr(testing, name) is not getattr(bfc, name, None)
    ]
    names += [f"bfc.study.{name}" for name in study.__all__]
    return names + [f"bfc.testing.{name}" for name in of_testing]


def test_every_public_name_stands_in_the_reference() -> None:
    shown: dict[str, list[str]] = {}
    for line, name in re.findall(r"^ *(\.\. auto\w+:: ([\w.]+))$", REFERENCE, re.MULTILINE):
        shown.setdefault(name, []).append(line)
    assert_none(
        f"{name}: {shown.get(name, [])}"
        for name in public_names()
        if shown.get(name, []) != [f".. auto{kind_of(name)}:: {name}"]
    )


def kind_of(name: str) -> str:
    thing = thing_of(name)
    if not isinstance(thing, type):
        return "function"
    return "exception" if issubclass(thing, BaseException) else "class"


def is_described(owner: type, name: str) -> bool:
    """Whether it has a docstring, or stands among the attributes of a class that the reference
    shows, or by itself there."""
    for member in (vars(kind)[name] for kind in owner.__mro__ if name in vars(kind)):
        is_value = isinstance(member, types.MemberDescriptorType) or not hasattr(member, "__get__")
        if not is_value and (getattr(member, "__doc__", None) or "").strip():
            return True
    shown = [
        kind
        for kind in owner.__mro__
        if re.search(rf":: bfc\.(\w+\.)*{kind.__name__}$", REFERENCE, re.MULTILINE)
    ]
    listed = re.compile(rf"^ *(\w+, )*{name}(, \w+)* : ", re.MULTILINE)
    by_hand = f"   .. attribute:: {name}\n" in REFERENCE
    return by_hand or any(listed.search(kind.__doc__ or "") for kind in shown)


#: Those whose members are for pytest and Hypothesis to call.
RUN_BY_OTHERS = ("bfc.testing.AllocatorMachine", "bfc.testing.SubAllocatorContract")
CLASSES = [name for name in public_names() if kind_of(name) == "class"]


def test_every_public_member_stands_in_the_reference() -> None:
    owners = {name: thing_of(name) for name in CLASSES if name not in RUN_BY_OTHERS}
    assert_none(
        f"{name}.{member}"
        for name, owner in owners.items()
        for member in public_members(owner)
        if not is_described(owner, member)
    )


def test_every_module_of_users_stands_in_the_reference() -> None:
    assert [name for name in MODULES_OF_USERS if f":: bfc.{name}." not in REFERENCE] == []


def test_every_public_name_says_what_it_is() -> None:
    assert [name for name in bfc.__all__ if not (getattr(bfc, name).__doc__ or "").strip()] == []


def test_every_public_method_of_an_allocator_says_what_it_does():
    policies = (bfc.BFCAllocator, bfc.CachingAllocator, bfc.MemPool, bfc.CachingSettings)
    assert_none(
        f"{owner.__name__}.{name}"
        for owner in (*policies, bfc.Buffer, bfc.Trace, bfc.Snapshot, bfc.SharedCounter)
        for name in dir(owner)
        if not name.startswith("_") and callable(getattr(owner, name))
        if not (getattr(owner, name).__doc__ or "").strip()
    )
