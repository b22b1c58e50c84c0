"""torchtune#1185."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="meta-pytorch/torchtune#1185",
    date="2024-07-16",
    observed="expandable_segments lowers a fine-tuning from 16.39 to 10.831 GiB.",
    reason="The run depends on the lengths of the texts in a data set, which the thread lacks.",
    whose="thread",
)
