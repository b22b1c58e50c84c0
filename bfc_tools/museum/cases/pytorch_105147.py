"""pytorch#105147: a sum in place that keeps itself alive."""

import gc
import os
from unittest import mock

import bfc
from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    import torch

    without = mock.patch.dict(os.environ, {"CUBLAS_WORKSPACE_CONFIG": ":0:0"})
    for is_cured in (False, True):
        with without, bfc.predict(device="rtx3090"):
            y = torch.nn.Linear(1, 1, device="cuda")(torch.ones(1, 1, device="cuda"))
            a = torch.ones(1, 1, device="cuda")
            a += y if is_cured else a * y
            del a, y
            gc.collect()
            left = torch.cuda.memory_allocated()
        text = "0" if is_cured else "2048"
        trial.published("left behind, bytes", text, left, cure=is_cured)


CASE = Case(
    title="a += a * y is never freed, and a += y is",
    source="pytorch/pytorch#105147",
    date="2023-07-13",
    library="PyTorch",
    kind="leaks",
    version="1.13.1",
    observed="When all variables of a function are gone and the garbage is collected, 2,048 bytes "
    "stay allocated. With a += y they do not.",
    why="The product keeps its factor for the backward pass, and the sum makes that very tensor the"
    " result of a graph that holds the product. The circle goes through C++, where Python's garbage"
    " collector does not look.",
    cure="a + a * y, or a += y",
    upstream="The issue was closed as a limit of autograd.",
    inferred=("Without cuBLAS's workspace, which PyTorch 1.13 did not count.",),
    reproduce=reproduce,
    needs_torch=True,
)
