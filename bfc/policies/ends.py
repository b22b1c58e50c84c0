"""Requests from two ends of one region (XLA's spatial partitioning): the words of its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from bfc.policies.tensorflow_rules import Rules


class AllocationEnd(StrEnum):
    """The end of a partitioned allocator's memory that a request is served from.

    Attributes
    ----------
    LOWER, UPPER : AllocationEnd
        The low addresses, and the high ones.

    Examples
    --------
    >>> import bfc
    >>> bfc.AllocationEnd("upper") is bfc.AllocationEnd.UPPER
    True
    """

    LOWER = "lower"
    UPPER = "upper"


@dataclass(frozen=True)
class EndPolicy:
    """How a BFCAllocator serves one end, where it has two (XLA's `AllocationPolicy`).

    Attributes
    ----------
    hole_order : {"ascending", "descending"}
        Of free chunks of one size, which address comes first.
    hole_split_policy : {"retain_padding", "exact"}
        What becomes of the rest of a free chunk that an end has to itself. "retain_padding" is
        TensorFlow's rule: the request keeps it if it is less than the request, and less than
        `fragmentation_fraction` says. "exact" always splits it off.
    gap_split_policy : {"retain_padding", "exact"}
        The same for the free memory between the ends.

    Examples
    --------
    >>> import bfc
    >>> bfc.EndPolicy(hole_order="descending").gap_split_policy
    'exact'
    """

    hole_order: Literal["ascending", "descending"] = "ascending"
    hole_split_policy: Literal["retain_padding", "exact"] = "retain_padding"
    gap_split_policy: Literal["retain_padding", "exact"] = "exact"

    def __post_init__(self) -> None:
        for name, known in (
            ("hole_order", ("ascending", "descending")),
            ("hole_split_policy", ("retain_padding", "exact")),
            ("gap_split_policy", ("retain_padding", "exact")),
        ):
            if getattr(self, name) not in known:
                offered = " or ".join(map(repr, known))
                raise ValueError(f"{name} is {offered}, not {getattr(self, name)!r}")


def end_from(end: object) -> AllocationEnd:
    """An end as a user names it. Raises ValueError if there is none of that name."""
    if isinstance(end, str) and end in list(AllocationEnd):
        return AllocationEnd(end)
    offered = " or ".join(repr(str(it)) for it in AllocationEnd)
    raise ValueError(f"allocation_end is {offered}, not {end!r}")


def check_ends(
    rules: Rules,
    *,
    partitioned: bool,
    virtual_memory: bool,
    planned: bool,
    grows: bool,
    collects: bool,
    initial: object,
    policies: tuple[object, object],
) -> None:
    """Refuses arguments of two ends that do not go together."""
    for policy in policies:
        if policy is not None and not isinstance(policy, EndPolicy):
            raise TypeError(f"the policy of an end is a bfc.EndPolicy, not {type(policy).__name__}")
    if not partitioned:
        if initial is not None or policies != (None, None):
            raise ValueError(
                "initial_region_bytes and the policies of ends are for "
                "enable_spatial_partitioning=True"
            )
        return
    if not rules.has_ends:
        raise ValueError(
            f"TensorFlow {rules.version} has one end: enable_spatial_partitioning needs "
            "tensorflow='2.23'"
        )
    if virtual_memory:
        raise ValueError(
            "enable_spatial_partitioning is for memory in regions, and virtual_memory=True maps "
            "pages: choose one"
        )
    if planned:
        raise ValueError("a plan has places of its own, and none at two ends: choose one")
    if grows and (initial is None or collects):
        raise ValueError(
            "partitioned memory that grows needs initial_region_bytes, and "
            "garbage_collection=False: what the lower end holds has to stay"
        )
    if not grows and initial is not None:
        raise ValueError(
            "initial_region_bytes is for allow_growth=True: without, the first region is the "
            "memory limit"
        )
