"""pytorch#107667."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="pytorch/pytorch#107667",
    date="2023-08-22",
    observed="Under a limit of 100 MiB nvidia-smi shows 430 MiB for a small model.",
    reason="The model itself fits below the limit. The rest is the CUDA context, whose size only "
    "the device and its driver know.",
    whose="hardware",
)
