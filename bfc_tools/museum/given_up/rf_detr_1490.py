"""rf-detr#1490."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="roboflow/rf-detr#1490",
    date="2026-09-18",
    observed="One shared pool for the graphs of eleven resolutions reserves 11.4 GiB in place of "
    "38.2.",
    reason="It needs the activations of a whole model at eleven resolutions under capture, which "
    "bfc predict has not been tried with.",
    whose="ours",
)
