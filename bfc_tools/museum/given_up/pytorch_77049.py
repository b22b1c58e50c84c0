"""pytorch#77049."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="pytorch/pytorch#77049",
    date="2022-05-08",
    observed="Sorting takes 18,380 MiB at most.",
    reason="The sort of that time had more buffers than that of today, which comes out at 13,819 "
    "MiB: bfc follows the operators of current releases.",
    whose="thread",
)
