"""pytorch#58466."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="pytorch/pytorch#58466",
    date="2021-05-18",
    observed="With a fraction of 0.5 of 10,989 MiB, nvidia-smi shows 6,509.",
    reason="What is above the limit belongs to the CUDA context and to libraries, whose size only "
    "the device and its driver know.",
    whose="hardware",
)
