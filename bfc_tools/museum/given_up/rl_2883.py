"""RL#2883."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="NVIDIA-NeMo/RL#2883",
    date="2026-06-22",
    observed="A step takes 4,055 MiB, and 508 after a change.",
    reason="The shapes behind the two figures are not in the thread.",
    whose="thread",
)
