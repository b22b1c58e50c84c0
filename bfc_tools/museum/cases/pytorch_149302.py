"""pytorch#149302: one matrix for 8,192 rows of 32 heads."""

import bfc
from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    import torch

    for is_cured in (False, True):
        with bfc.predict(device="h100"):
            options = {"dtype": torch.bfloat16, "device": "cuda"}
            if is_cured:
                a, b = torch.rand(8192, 32, 1024, **options), torch.rand(32, 1024, 128, **options)
                torch.einsum("abc,bcd->abd", a, b)
            else:
                a = torch.rand(8192, 32, 1, 1024, **options)
                torch.matmul(a, torch.rand(1, 32, 1024, 128, **options))
            peak = torch.cuda.max_memory_allocated()
        if is_cured:
            trial.cured("at most, einsum", "0.60 GiB", peak)
        else:
            trial.published("at most, matmul", "66 GiB", peak)


CASE = Case(
    title="matmul copies a matrix of 8 MiB 8,192 times",
    source="pytorch/pytorch#149302",
    date="2025-03-17",
    library="PyTorch",
    kind="prediction",
    version="2.6.0",
    observed="The product of 512 MiB with 8 MiB, which are shared by 8,192 rows, takes about 66 "
    "GiB. einsum takes 2.",
    why="matmul spreads the shared matrix over all rows and heads, and a batch of products needs it"
    " as a dense tensor. einsum makes one product for each head instead.",
    cure="einsum",
    upstream="The issue was closed; pytorch#189519 would mend it, and was open when it was read.",
    inferred=("The thread rounds, and its figures have the CUDA context in them.",),
    reproduce=reproduce,
    within=0.025,
    needs_torch=True,
)
