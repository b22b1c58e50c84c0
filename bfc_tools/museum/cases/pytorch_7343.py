"""pytorch#7343: a gradient that has a graph of its own."""

import gc
import warnings

import bfc
from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    import torch

    for how, text in (("tanh", "2048"), ("sum", "0"), ("grad", "0")):
        with bfc.predict(device="v100"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns of it today
            before = torch.cuda.memory_allocated()
            x = torch.randn(1, device="cuda", requires_grad=True)
            y = x + 1 if how == "sum" else x.tanh()
            if how == "grad":
                torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
            else:
                torch.autograd.backward(y, torch.ones_like(y), create_graph=True)
            del x, y
            gc.collect()
            left = torch.cuda.memory_allocated() - before
        if how == "grad":
            trial.cured("left behind by autograd.grad, bytes", text, left)
        else:
            trial.published(f"left behind by backward, {how}, bytes", text, left)


CASE = Case(
    title="backward(create_graph=True) leaves a tensor and its gradient behind for ever",
    source="pytorch/pytorch#7343",
    date="2018-05-07",
    library="PyTorch",
    kind="leaks",
    version="as of May 2018",
    observed="After the backward pass of a tanh with create_graph=True, 867,328 bytes are allocated"
    " in place of 865,280 when all is deleted. After that of a sum nothing is left.",
    why="The gradient belongs to the tensor, and its graph holds the tensor: a circle that goes "
    "through C++. The gradient of a sum needs no tensor, so there is no circle.",
    cure="torch.autograd.grad",
    upstream="Open when it was read; PyTorch warns since.",
    inferred=("A V100: the thread names no GPU.",),
    reproduce=reproduce,
    needs_torch=True,
)
