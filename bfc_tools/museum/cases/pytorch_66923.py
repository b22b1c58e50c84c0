"""pytorch#66923: the gradient of one piece of 128."""

import bfc
from bfc_tools.museum.case import Case, Trial

MIB = 2**20


def reproduce(trial: Trial) -> None:
    import torch

    for is_cured in (False, True):
        with bfc.predict(device="v100"):
            x = torch.arange(128 * MIB, dtype=torch.float16, device="cuda").requires_grad_(True)
            x.grad = torch.zeros_like(x)
            if not is_cured:
                allocated = torch.cuda.memory_allocated()
                trial.published("allocated before backward", "512 MiB", allocated)
            piece = x.detach()[:MIB].requires_grad_() if is_cured else torch.split(x, MIB)[0]
            if is_cured:
                piece.grad = x.grad[:MIB]
            piece.sum().backward()
            peak = torch.cuda.max_memory_allocated()
        if is_cured:
            trial.cured("at most, the piece as a leaf", "512 MiB", peak)
        else:
            trial.published("at most", "1022 MiB", peak)
            trial.published("allocated after backward", "512 MiB", allocated)


CASE = Case(
    title="The gradient of one piece of a tensor is made twice as large as the tensor",
    source="pytorch/pytorch#66923",
    date="2021-10-20",
    library="PyTorch",
    kind="prediction",
    version="as of October 2021",
    observed="A tensor and its gradient have 512 MiB. The backward pass of one of its 128 pieces "
    "takes 1,022 MiB.",
    why="The gradient of split puts all pieces together, and makes zeros for the 127 that have "
    "none. These zeros, and what they are put into, are nearly twice the tensor.",
    cure="pieces that are leaves, whose gradients are views of the whole one",
    upstream="Open when it was read.",
    inferred=("A V100: the thread names no GPU.", "What the thread prints is MiB."),
    reproduce=reproduce,
    needs_torch=True,
)
