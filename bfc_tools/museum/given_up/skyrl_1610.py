"""SkyRL#1610."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="NovaSky-AI/SkyRL#1610",
    date="2026-05-01",
    observed="Logarithms of probabilities in chunks save 42 GB for 65K tokens and 128K words.",
    reason="The table of what each chunk size takes is not in the text that was read, and one "
    "difference does not say what lives at once.",
    whose="thread",
)
