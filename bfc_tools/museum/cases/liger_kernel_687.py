"""Liger-Kernel#687: sparsemax, which sorts each row."""

import bfc
from bfc_tools.museum.case import Case, Trial

RUNS = ((4096, 1, "328.05"), (8192, 1, "704.00"), (8192, 4, "388.00"))


def reproduce(trial: Trial) -> None:
    import torch

    for width, pieces, text in RUNS:
        with bfc.predict(device="rtx3090"), torch.device("cuda"):
            x, gradient = torch.zeros(2048, width), torch.zeros(2048, width)
            x.requires_grad_().grad = torch.zeros_like(x)
            for part, its in zip(x.chunk(pieces), gradient.chunk(pieces), strict=True):
                ordered = part.sort(-1, descending=True)[0]
                bound = 1 + torch.arange(1.0, width + 1).view(1, width) * ordered
                support = bound > ordered.cumsum(-1)
                count = support.sum(-1, keepdim=True).clamp(min=1)
                threshold = ((ordered * support).sum(-1, keepdim=True) - 1) / count
                result = torch.clamp(part - threshold, min=0)
                del ordered, bound, support, count, threshold
                result.backward(its, retain_graph=True)
            peak = torch.cuda.max_memory_allocated()
        add = trial.published if pieces == 1 else trial.cured
        add(f"at most, {width:,} values, {pieces} part(s)", f"{text} MiB", peak)


CASE = Case(
    title="Rows of 8,192 values cost more than twice as much as rows of 4,096",
    source="linkedin/Liger-Kernel#687",
    date="2025-05-15",
    library="PyTorch",
    kind="prediction",
    version="as of April 2025",
    observed="Sparsemax over 2,048 rows, written with PyTorch's operators, takes 328.05 MiB for "
    "4,096 values on an RTX 3090, and 704.00 for 8,192.",
    why="Up to 4,096 values are sorted in a block of threads each. More go through a radix sort "
    "of all rows, which has copies of values and positions beside its result.",
    cure="some rows at a time",
    upstream="Merged; its own kernel keeps the result alone.",
    inferred=("The second iteration is measured: the gradient of the input exists.",),
    reproduce=reproduce,
    needs_torch=True,
)
