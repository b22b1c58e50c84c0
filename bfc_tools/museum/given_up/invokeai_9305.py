"""InvokeAI#9305."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="invoke-ai/InvokeAI#9305",
    date="2026-06-30",
    observed="Working memory of a decoder at ten resolutions.",
    reason="It needs the decoder itself, and the workspaces that cuDNN chooses on that GPU.",
    whose="hardware",
)
