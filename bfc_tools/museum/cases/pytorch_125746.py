"""pytorch#125746: a matrix that is not dense, times 2,048 vectors."""

import bfc
from bfc_tools.museum.case import Case, Trial

SIZE = 2048


def reproduce(trial: Trial) -> None:
    import torch

    for is_cured in (False, True):
        with bfc.predict(device="h200") as program:
            options = {"dtype": torch.complex64, "device": "cuda"}
            a = torch.zeros(1, SIZE, 2 * SIZE, **options)[:, :, ::2]
            b = torch.zeros(1, SIZE, SIZE, 1, **options)
            torch.matmul(a.clone() if is_cured else a, b)
        largest = int(program.trace.size.max())
        if is_cured:
            trial.cured("largest request, after clone()", "67108864", largest)
        else:
            trial.published("largest request", "68719476736", largest)


CASE = Case(
    title="A product of 32 MiB with 32 MiB asks for 64 GiB, and does not after a clone()",
    source="pytorch/pytorch#125746",
    date="2024-05-08",
    library="PyTorch",
    kind="prediction",
    version="2.3.0",
    observed="A matrix of 2,048 by 2,048 complex numbers times 2,048 vectors asks for "
    "68,719,476,736 bytes. When the matrix is cloned first, it does not.",
    why="The matrix is repeated for each vector, which costs nothing as long as it is a view. A "
    "matrix that is not dense has to be copied for the product, and it is copied 2,048 times.",
    cure="clone() before the product",
    upstream="Open when it was read.",
    inferred=(
        "The matrix, which comes from a file, is every second column of another.",
        "The thread ran on the CPU, and the case predicts a GPU: the copy is the same.",
    ),
    reproduce=reproduce,
    needs_torch=True,
)
