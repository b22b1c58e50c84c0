"""pytorch#50432: a slice of one value."""

import bfc
from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    import torch

    with bfc.predict(device="a100"):
        x = torch.zeros((1024 * 1024,)).cuda()
        x = x[:1]
        trial.published("allocated after x = x[:1]", "4 MiB", torch.cuda.memory_allocated())
        x = x.clone()
        trial.cured("allocated after x.clone()", "512 B", torch.cuda.memory_allocated())


CASE = Case(
    title="A slice of one value keeps a tensor of 4 MiB that nobody can find",
    source="pytorch/pytorch#50432",
    date="2021-01-12",
    library="PyTorch",
    kind="leaks",
    version="1.7",
    observed="After x = x[:1] the garbage collector knows tensors of 4 bytes in all, and 4 MB stay "
    "allocated.",
    why="The slice refers to the storage of the whole tensor, which lives as long as the slice. The"
    " tensor object that showed its size is gone.",
    cure="x[:1].clone()",
    upstream="It was closed: the behaviour is intended.",
    inferred=("The version, from the date.",),
    reproduce=reproduce,
    needs_torch=True,
)
