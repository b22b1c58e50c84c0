"""jax#7046."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="jax-ml/jax#7046",
    date="2021-06-21",
    observed="An array of 763 MiB raises the use of a GPU of 7,982 MiB from 1,250 to 7,523 MiB.",
    reason="JAX takes 90 % of what is free at its start, but what its context and compiler take "
    "beside it is not in the thread, and only the device knows it.",
    whose="hardware",
)
