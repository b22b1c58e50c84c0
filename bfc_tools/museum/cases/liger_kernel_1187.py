"""Liger-Kernel#1187: a sum and its norm, step by step and at once."""

import bfc
from bfc_tools.museum.case import Case, Trial

ROWS = 2048
RUNS = ((1024, "104.03", False), (32_768, "3328.625", False), (1024, "80.02", True))


def reproduce(trial: Trial) -> None:
    import torch

    for width, text, is_fused in RUNS:
        with bfc.predict(device="h100"):
            weights = [torch.ones(width, device="cuda", requires_grad=True) for _ in range(4)]
            x, residual = (torch.zeros(ROWS, width, device="cuda") for _ in range(2))
            gradients = torch.zeros_like(x), torch.zeros_like(x)
            for it in (weights[0], x, residual):
                it.requires_grad_().grad = torch.zeros_like(it)
            added = x + residual
            if is_fused:
                y = torch.rms_norm(added, (width,), weights[0], 1e-6)
            else:
                y = weights[0] * (added * (added.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt())
            torch.autograd.backward((y, added), gradients)
            peak = torch.cuda.max_memory_allocated()
        add = trial.cured if is_fused else trial.published
        add(f"at most, width {width:,}{', fused' * is_fused}", f"{text} MiB", peak)


CASE = Case(
    title="A norm that is written out in steps needs a third more than in one piece",
    source="linkedin/Liger-Kernel#1187",
    date="2026-04-08",
    library="PyTorch",
    kind="prediction",
    version="as of April 2026",
    observed="Adding a residual to 2,048 rows of 1,024 floats and their RMSNorm take 104.03 MiB "
    "with the backward pass on an H100, 416.10 for 4,096 and 3,328.625 for 32,768.",
    why="Square, normalised rows and weighted rows are tensors of their own, and the backward "
    "pass makes gradients of each. PyTorch's rms_norm keeps its input and a number for each row.",
    cure="torch.nn.functional.rms_norm",
    upstream="Merged; its own kernel takes 72.55 MiB for a width of 1,024.",
    inferred=(
        "The second iteration is measured: the gradients exist.",
        "The weights of the other implementations lie beside these.",
    ),
    reproduce=reproduce,
    needs_torch=True,
)
