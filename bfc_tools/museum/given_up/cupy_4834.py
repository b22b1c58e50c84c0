"""cupy#4834."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="cupy/cupy#4834",
    date="2021-03-08",
    observed="A sum over three arrays asks for 1,600,000,000 bytes with 1,832,800,256 allocated.",
    reason="Arrays and the intermediate make up 1,681,600,000 of these. The others are a "
    "workspace that cuTENSOR chose for that GPU.",
    whose="hardware",
)
