"""What sets the versions of PyTorch's allocators apart.

PyTorch's behaviour, 0.3, lists the differences. Code that behaves differently asks a field of
`Rules`; no other file compares versions.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The settings that not every version has, and the first one that has them.
SINCE = {
    "throw_on_cudamalloc_oom": "2.12",
    "pinned_free_catch_all": "2.12",
    "pinned_max_round_threshold_mb": "2.13",
    "pinned_max_cached_size_mb": "2.13",
    "expandable_segments_reserve": "2.15",
    "expandable_segments_reserve_by_class": "2.15",
}


@dataclass(frozen=True)
class Rules:
    """The rules of one version."""

    version: str  # "2.11" or "2.15"
    #: Of free blocks of one size, that in the oldest segment is taken. If False, it is the one at
    #: the lowest address.
    by_registration: bool = True
    #: While any scope of a private pool is open, no event is polled, frees of memory that other
    #: streams use are put off, and a request that does not fit is not tried again.
    scopes_gate: bool = False
    #: A limit that is given as a fraction of the memory is rounded to the nearest byte. If False,
    #: it is truncated.
    rounds_limit: bool = True
    #: That a private pool's chunks are handed out whole is forgotten with its last reference. If
    #: False, it holds for a later pool with the same id, too.
    forgets_unsplit: bool = True
    #: A range of addresses that is smaller than the request is given back before anything is
    #: mapped.
    checks_range: bool = True
    #: Statistics have the reserved bytes of each private pool, and the requests that were refused
    #: without asking the driver.
    counts_private_pools: bool = True
    lacks: frozenset[str] = frozenset()  # Those of the settings in SINCE that it does not have.
    #: The history may have entries with texts of the program about an allocation.
    has_annotations: bool = True
    #: Snapshots have lists of pinned memory and of its history, and the limits on that memory.
    has_host_history: bool = True


_RULES = {
    "2.11": Rules(
        "2.11",
        by_registration=False,
        scopes_gate=True,
        rounds_limit=False,
        forgets_unsplit=False,
        checks_range=False,
        counts_private_pools=False,
        lacks=frozenset(SINCE),
        has_annotations=False,
        has_host_history=False,
    ),
    "2.15": Rules("2.15"),
}
#: Versions that are not offered, and why.
_OTHERS = {
    "2.12": "it orders free blocks in a way that no other version does. 2.11 and before, and 2.13 "
    "and later, are different from it and from each other",
    "2.13": "it places memory as 2.15 does, with two exceptions: that a private pool is not split "
    "outlives the pool, and a range of addresses that is too small is not given back at once. Use "
    "'2.15'",
    "2.14": "it places memory as 2.15 does, with one exception: a range of addresses that is too "
    "small is not given back at once. Use '2.15'",
}
VERSIONS = tuple(_RULES)
NEWEST = VERSIONS[-1]


#: In which of their rules versions that are not offered differ from the nearest that is; None: in
#: what no field says.
_DIFFERENT: dict[str, frozenset[str] | None] = {
    "2.12": None,
    "2.13": frozenset(("forgets_unsplit", "checks_range")),
    "2.14": frozenset(("checks_range",)),
}


def nearest_rules(version: tuple[int, ...]) -> tuple[str, frozenset[str] | None]:
    """The version on offer whose rules are nearest to those of another one, such as (2, 14), and
    the fields of `Rules` in which that one differs; None if it differs in what no field says.

    >>> nearest_rules((2, 14))
    ('2.15', frozenset({'checks_range'}))
    >>> nearest_rules((2, 10))
    ('2.11', frozenset())
    """
    nearest = "2.15" if version >= (2, 12) else "2.11"
    return nearest, _DIFFERENT.get(f"{version[0]}.{version[1]}", frozenset())


def rules_of(version: str) -> Rules:
    """The rules of a version. Raises ValueError if bfc does not have them, and says why.

    >>> rules_of("2.11").by_registration, rules_of("2.15").by_registration
    (False, True)
    """
    if not isinstance(version, str):
        raise TypeError(f"torch is a text such as {NEWEST!r}, not {type(version).__name__}")
    if version in _RULES:
        return _RULES[version]
    offered = " or ".join(map(repr, VERSIONS))
    why = f": {_OTHERS[version]}" if version in _OTHERS else ""
    raise ValueError(f"torch is {offered}, not {version!r}{why}")
