"""numba-cuda-mlir#194."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="NVIDIA/numba-cuda-mlir#194",
    date="2026-07-06",
    observed="A kernel whose 262,144 threads each take 16 bytes from the heap of the device, which "
    "has 8 MiB, faults.",
    reason="The threads ask for 4 MiB together. What the heap inside the driver takes beside each "
    "request is published by nobody, and no allocator of the host is asked.",
    whose="hardware",
)
