"""What sets the versions of TensorFlow's BFC apart.

TensorFlow's behaviour, 0.3, lists the differences. Code that behaves differently asks a field of
`Rules`; no other file compares versions.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """The rules of one version."""

    version: str  # "2.21" or "2.23"
    #: A request's alignment decides where it is placed. If False, it is ignored.
    honours_alignment: bool = True
    #: After a refusal of the device, 0.9 times the size is rounded down to a multiple of 256. If
    #: False, it is rounded up.
    rounds_down: bool = True
    #: Requests may come from two ends of one region (XLA's spatial partitioning).
    has_ends: bool = True


_RULES = {
    "2.21": Rules("2.21", honours_alignment=False, rounds_down=False, has_ends=False),
    "2.23": Rules("2.23"),
}
VERSIONS = tuple(_RULES)
#: What an allocator follows that is not told which.
USUAL = VERSIONS[0]


def rules_of(version: str) -> Rules:
    """The rules of a version. Raises ValueError if bfc does not have them.

    >>> rules_of("2.21").honours_alignment, rules_of("2.23").honours_alignment
    (False, True)
    """
    if not isinstance(version, str):
        raise TypeError(f"tensorflow is a text such as {USUAL!r}, not {type(version).__name__}")
    if version in _RULES:
        return _RULES[version]
    offered = " or ".join(map(repr, VERSIONS))
    raise ValueError(f"tensorflow is {offered}, not {version!r}")
