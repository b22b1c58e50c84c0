"""sglang#27985."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="sgl-project/sglang#27985",
    date="2026-06-12",
    observed="One buffer for gathered logits halves what the pool of 52 graphs reserves, "
    "from 1,619 MB to 789.",
    reason="The model is not in the thread, so that the sizes of what is captured are unknown.",
    whose="thread",
)
