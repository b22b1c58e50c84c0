"""pytorch#155398."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="pytorch/pytorch#155398",
    date="2025-06-07",
    observed="Tensors that another stream uses are not reused during a capture, "
    "until memory runs out.",
    reason="The programs that run out of memory are cut off in the text that was read.",
    whose="thread",
)
