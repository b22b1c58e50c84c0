"""Liger-Kernel#1127: the distance between two distributions."""

import bfc
from bfc_tools.museum.case import Case, Trial

ROWS = 16_384


def reproduce(trial: Trial) -> None:
    import torch

    for choices, text, pieces in (4096, "2048.001", 1), (32_768, "16384.000", 1), (4096, "", 8):
        with bfc.predict(device="h100"):
            made = torch.zeros(ROWS, choices, device="cuda", requires_grad=True)
            made.grad = torch.zeros_like(made)
            p = made.softmax(-1)
            q = torch.zeros(ROWS, choices, device="cuda").softmax(-1)
            torch.cuda.reset_peak_memory_stats()
            for p_part, q_part in zip(
                p.split(ROWS // pieces), q.split(ROWS // pieces), strict=True
            ):
                distance = (torch.abs(p_part - q_part) / 2.0).sum() / ROWS
                distance.backward(retain_graph=True)
            peak = torch.cuda.max_memory_allocated()
        if pieces == 1:
            trial.published(f"at most, {choices:,} choices", f"{text} MiB", peak)
        else:
            trial.cured(f"at most, {choices:,} choices, in eighths", "1824.001 MiB", peak)


CASE = Case(
    title="One number about two distributions needs eight times the memory of either",
    source="linkedin/Liger-Kernel#1127",
    date="2026-03-04",
    library="PyTorch",
    kind="prediction",
    version="as of March 2026",
    observed="The total variation of 16,384 pairs of distributions over 4,096 choices takes "
    "2,048.001 MiB with its backward pass on an H100, and 16,384 MiB over 32,768 choices.",
    why="Difference, absolute value and their gradients have the size of a distribution each, and "
    "the softmax behind it adds the gradient of its input. Beside them lie both distributions, "
    "what they were made from and its gradient.",
    cure="some rows at a time",
    upstream="Merged; its own kernel keeps the gradient alone.",
    inferred=("The second iteration is measured: the gradient of the input exists.",),
    reproduce=reproduce,
    needs_torch=True,
)
