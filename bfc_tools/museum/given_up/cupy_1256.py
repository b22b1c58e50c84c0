"""cupy#1256."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="cupy/cupy#1256",
    date="2018-05-21",
    observed="60 % of a GPU are refused although 70 % could be had, at the first attempt only.",
    reason="The freed blocks were kept alive by local variables of the pool's own Python code. A "
    "model of the pool has no such variables.",
    whose="ours",
)
