"""pytorch#35901."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="pytorch/pytorch#35901",
    date="2020-04-02",
    observed="10.84 GiB are refused with 10.26 GiB free and 12.53 GiB reserved for 1.06 GiB of "
    "tensors.",
    reason="The thread shows states before and after, but not the sizes and the order of the "
    "requests between them.",
    whose="thread",
)
