"""recsys-examples#439."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="NVIDIA/recsys-examples#439",
    date="2026-07-13",
    observed="Some 30 graphs with a pool and logits of their own take 45 GiB in place of 24.",
    reason="The vocabulary and the sizes of the batches are not in the thread.",
    whose="thread",
)
