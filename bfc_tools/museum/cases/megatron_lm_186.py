"""Megatron-LM#186: the norm of a large gradient."""

import bfc
from bfc_tools.museum.case import Case, Trial

SIZE = 256 << 20


def reproduce(trial: Trial) -> None:
    import torch

    for is_cured in (False, True):
        with bfc.predict(device="h100"):
            gradient = torch.zeros(SIZE, device="cuda", dtype=torch.bfloat16)
            before = torch.cuda.memory_allocated()
            if is_cured:
                torch.linalg.vector_norm(gradient, dtype=torch.float32)
            else:
                gradient.to(torch.float32).pow(2).sum()
            times = (torch.cuda.max_memory_allocated() - before) / before
            wide = gradient.to(torch.float32)
            copy = wide.nbytes / before
        if is_cured:
            trial.cured("norm, times the gradient", "0", times)
        else:
            trial.published("sum of squares, times the gradient", "4", times)
            trial.published("the optimizer's copy, times the gradient", "2", copy)


CASE = Case(
    title="To know how long a gradient is takes four times its memory",
    source="ISEEKYAN/Megatron-LM#186",
    date="2026-08-21",
    library="PyTorch",
    kind="prediction",
    version="as of August 2026",
    observed="The sum of the squares of a gradient in bfloat16 takes four times its bytes for a "
    "moment, and the optimizer's copy of it takes twice its bytes in the same phase.",
    why="The gradient is widened to single precision, and its squares are a second tensor of that "
    "size. The first is held while the second is made.",
    cure="torch.linalg.vector_norm(gradient, dtype=torch.float32)",
    upstream="Closed; it had put a fused kernel in their place.",
    inferred=("A gradient of 512 MiB: any large one shows the same.",),
    reproduce=reproduce,
    needs_torch=True,
)
