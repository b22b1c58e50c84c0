"""lightning-thunder#1792."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="Lightning-AI/lightning-thunder#1792",
    date="2025-02-24",
    observed="Sharing a pool between captured graphs saves nothing in one library, and does so in "
    "plain PyTorch.",
    reason="The script is there, but the figures that it prints are not in the text that was read.",
    whose="thread",
)
