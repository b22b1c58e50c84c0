"""pytorch#95668: a linear layer of one weight."""

import os

import bfc
from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    import torch

    for workspace in (None, ":0:0"):
        if workspace:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace
        with bfc.predict(device="a10g"):
            model = torch.nn.Linear(1, 1, device="cuda")
            model(torch.randn(1, 1, device="cuda"))
            del model
            left = torch.cuda.memory_allocated()
        if workspace:
            trial.cured("the same without a workspace", "0", left)
            del os.environ["CUBLAS_WORKSPACE_CONFIG"]
        else:
            trial.published("allocated when all is gone", "8519680", left)


CASE = Case(
    title="The first matrix product leaves 8 MiB allocated for ever",
    source="pytorch/pytorch#95668",
    date="2023-02-28",
    library="PyTorch",
    kind="prediction",
    version="2.0.0.dev20230227, CUDA 11.8",
    observed="When a linear layer, its input and its output are gone, 8,519,680 bytes stay "
    "allocated. PyTorch 1.13 left none.",
    why="cuBLAS gets a workspace from PyTorch's allocator at its first call, and keeps it for the "
    "next ones. Before 2.0 it took that memory itself, where nobody counted it.",
    cure="CUBLAS_WORKSPACE_CONFIG=:0:0",
    upstream="The issue was closed.",
    inferred=(),
    reproduce=reproduce,
    needs_torch=True,
)
