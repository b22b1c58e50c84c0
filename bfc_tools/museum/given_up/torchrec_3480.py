"""torchrec#3480."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="meta-pytorch/torchrec#3480",
    date="2025-10-24",
    observed="5.06 GB on two streams reserve 10.13 GB, and 5.11 GB on one.",
    reason="The sizes of the tensors are not in the text that was read; a case made to fit the sums"
    " would show nothing.",
    whose="thread",
)
