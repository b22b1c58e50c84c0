"""mlx#3350."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="ml-explore/mlx#3350",
    date="2026-04-01",
    observed="Five requests of growing length leave 108 GB where 34 are expected.",
    reason="The keys and values of the four earlier requests have 59 GB, and 74 are kept: which "
    "sizes came between is not in the thread.",
    whose="thread",
)
