"""Megatron-LM#1477."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="NVIDIA/Megatron-LM#1477",
    date="2025-03-13",
    observed="An optimizer with states of two bytes takes 56.0 GiB at most, and one with states "
    "of four 49.0.",
    reason="Two states are widened to 3.5 GiB each, which is the difference. How much all states "
    "have is not in the thread, so that neither figure follows.",
    whose="thread",
)
