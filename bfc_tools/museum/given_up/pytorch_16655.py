"""pytorch#16655."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="pytorch/pytorch#16655",
    date="2019-02-01",
    observed="The cache doubles in the second step, from 5.571 to 10.456 GiB.",
    reason="The model is in a repository of its own, and the sizes are not in the thread. What "
    "cuDNN asked for in 2019 is not known.",
    whose="thread",
)
