"""Liger-Kernel#732: the same attention on two GPUs."""

import os
from unittest.mock import patch

import bfc
from bfc_tools.museum.case import Case, Trial

SMALL = {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}
NONE: dict[str, str] = {}
RUNS = (("rtx3090", NONE, "321.27"), ("h100", NONE, "369.02"), ("h100", SMALL, "321.27"))


def reproduce(trial: Trial) -> None:
    import torch

    for device, settings, text in RUNS:
        with patch.dict(os.environ, settings), bfc.predict(device=device):
            layers = [torch.nn.Linear(512, 512, device="cuda") for _ in range(8)]
            x, gradient = (torch.zeros(2, 1024, 512, device="cuda") for _ in range(2))
            for it in (x, *(it for layer in layers[:4] for it in layer.parameters())):
                it.requires_grad_().grad = torch.zeros_like(it)
            q, k, v = (layer(x).view(2, 1024, 8, 64).transpose(1, 2) for layer in layers[:3])
            mask = torch.ones(1024, 1024, device="cuda", dtype=torch.bool)
            scores = (q @ k.mT * 0.125).masked_fill(mask, float("-inf"))
            joined = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
            del q, k, v, mask, scores
            layers[3](joined).backward(gradient, retain_graph=True)
            peak = torch.cuda.max_memory_allocated()
        add = trial.cured if settings else trial.published
        add(f"at most, {device}{', small workspaces' if settings else ''}", f"{text} MiB", peak)


CASE = Case(
    title="The same attention needs 47.75 MiB more on an H100 than on an RTX 3090",
    source="linkedin/Liger-Kernel#732",
    date="2025-06-05",
    library="PyTorch",
    kind="prediction",
    version="as of May 2025",
    observed="Attention over neighbours, computed with all scores in single precision, takes "
    "321.27 MiB for 1,024 tokens on an RTX 3090 and 369.02 on an H100. For every length the "
    "difference is 47.75 MiB.",
    why="cuBLAS has a workspace of 8.125 MiB on the one and 32 MiB on the other. There are two: "
    "one for each thread that multiplies, and the backward pass has a thread of its own.",
    cure="CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8",
    upstream="Merged; its own kernel does without the scores.",
    inferred=(
        "The figures are those of the published table, after the first iteration: gradients exist.",
        "The weights of the other implementation, which is compared with, lie beside these.",
    ),
    reproduce=reproduce,
    needs_torch=True,
)
