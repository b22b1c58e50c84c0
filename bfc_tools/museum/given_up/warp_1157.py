"""warp#1157."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="NVIDIA/warp#1157",
    date="2026-01-07",
    observed="Three arrays of 1 GB, one after the other in a captured graph, take 3 GB.",
    reason="The memory belongs to the driver's own graph allocations, which bfc does not model; a "
    "private pool takes 1 GB.",
    whose="ours",
)
