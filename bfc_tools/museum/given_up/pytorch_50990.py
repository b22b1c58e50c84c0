"""pytorch#50990."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="pytorch/pytorch#50990",
    date="2021-01-23",
    observed="On a V100 a convolution takes 904,212,480 bytes at most in single precision, and "
    "1,123,495,936 in half.",
    reason="In single 904,173,568 come out. In half cuDNN 7.6 chose an algorithm with a workspace "
    "of its own; with CUDA 11 its author does not see it.",
    whose="hardware",
)
