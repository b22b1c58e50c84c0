"""pytorch#74443: two linear layers, before and after backward."""

import bfc
from bfc_tools.museum.case import Case, Trial

#: Of cuBLAS, for each thread that multiplies.
WORKSPACE = 8_519_680


def reproduce(trial: Trial) -> None:
    import torch

    with bfc.predict(device="a100"):
        layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(2)]
        model = torch.nn.Sequential(*layers).cuda()
        x = torch.rand(4, 256, 1024).cuda()
        y = model(x).sum()
        forward = torch.cuda.memory_allocated() - WORKSPACE
        trial.published("allocated after forward", "16777728", forward)
        y.backward()
        backward = torch.cuda.memory_allocated() - 2 * WORKSPACE
        trial.published("allocated after backward", "20972032", backward)


CASE = Case(
    title="What two layers allocate before and after backward, to the byte",
    source="pytorch/pytorch#74443",
    date="2022-03-21",
    library="PyTorch",
    kind="prediction",
    version="1.11",
    observed="After the forward pass 16,777,728 bytes are allocated, and after the backward pass "
    "20,972,032.",
    why="Weights, input, one activation and a scalar of 512 bytes are live first; then the "
    "activation is gone and two gradients are there. Each tensor is rounded up to 512 bytes.",
    cure="",
    upstream="The issue, which is about another shape, was closed.",
    inferred=(
        (
            "The workspaces of cuBLAS, which PyTorch has counted since 2.0, are taken off: one "
            "for the forward thread and one for the backward thread."
        ),
        "The version, from the date.",
    ),
    reproduce=reproduce,
    needs_torch=True,
)
