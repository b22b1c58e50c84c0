"""What an allocation is for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

#: What an allocation is for. What no one says more of is of the phase that it was made in.
KINDS = (
    "other",
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "inputs",
    "workspaces",
    "backward pass",
    "optimizer step",
    "buckets of gradients",
    "KV cache",
)
OTHER, PARAMETERS, GRADIENTS, OPTIMIZER_STATE, ACTIVATIONS = range(5)
INPUTS, WORKSPACES, BACKWARD_PASS, OPTIMIZER_STEP, BUCKETS, KV_CACHE = range(5, 11)
#: What a program makes once, and not in each step, unless it gives as much back.
MADE_ONCE = (PARAMETERS, GRADIENTS, OPTIMIZER_STATE, WORKSPACES)


def told(kinds: Iterable[int]) -> dict[str, Any]:
    """The kind of each allocation, as the meta of a trace holds it: the names, and a text with one
    letter for each id, "a" for the first name.

    >>> told([1, 0])["of"]
    'ba'
    """
    return {"names": KINDS, "of": bytes(_FIRST + kind for kind in kinds).decode()}


_FIRST = ord("a")
