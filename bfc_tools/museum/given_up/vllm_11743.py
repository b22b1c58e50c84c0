"""vllm#11743."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="vllm-project/vllm#11743",
    date="2025-01-05",
    observed="Asleep, a server leaves 78.29 of 79.22 GiB free.",
    reason="What stays is the CUDA context, whose size only the device knows; without it the "
    "figure is 0.7 % off.",
    whose="hardware",
)
