"""pytorch#147628: to sort the rows of a graph's matrix."""

import bfc
from bfc_tools.museum.case import Case, Trial

SHAPE = (69_878, 10_677)


def reproduce(trial: Trial) -> None:
    import torch

    for is_cured in (False, True):
        with bfc.predict(device="a100"):
            matrix = torch.zeros(SHAPE, dtype=torch.bool, device="cuda")
            if is_cured:
                parts = [part.sort().indices.short() for part in matrix.split(4096)]
            else:
                parts = list(torch.sort(matrix))
            peak = torch.cuda.max_memory_reserved()
            del parts
        if is_cured:
            trial.cured("reserved at most, in parts", "3,302 MiB", peak)
        else:
            trial.published("reserved at most", "20 GB", peak)


CASE = Case(
    title="To sort a matrix of 0.75 GB takes 20 GB",
    source="pytorch/pytorch#147628",
    date="2025-02-21",
    library="PyTorch",
    kind="prediction",
    version="as of February 2025",
    observed="Sorting 69,878 rows of 10,677 boolean values takes about 20 GB.",
    why="Each value of one byte gets an index of eight. The sort has them three times: as its "
    "input, as its result, and in a buffer between.",
    cure="rows in parts, with indices of two bytes",
    upstream="pytorch#170978 proposes smaller indices, and was closed.",
    inferred=("The cache counts, as the thread says.", "An A100: the thread names no GPU."),
    reproduce=reproduce,
    needs_torch=True,
)
