"""nanochat#825."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="karpathy/nanochat#825",
    date="2026-08-09",
    observed="Attention on a T4 takes 296 to 305 MB more than on a newer GPU.",
    reason="282 MB come out; the type and the size of a head are not in the thread.",
    whose="thread",
)
