"""nanoGPT#618."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="karpathy/nanoGPT#618",
    date="2025-06-25",
    observed="2.47 GiB are allocated and 16.69 GiB reserved during a training.",
    reason="Neither the configuration nor the GPU is in the thread.",
    whose="thread",
)
