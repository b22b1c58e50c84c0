"""Liger-Kernel#1112: groups of four channels, normalised."""

import bfc
from bfc_tools.museum.case import Case, Trial

TABLE = ((32, "40.066"), (2048, "2564.063"))


def reproduce(trial: Trial) -> None:
    import torch

    for channels, text in (*TABLE, (2048, "")):
        with bfc.predict(device="b200"):
            norms = [torch.nn.GroupNorm(channels // 4, channels, device="cuda") for _ in range(2)]
            x, gradient = (torch.zeros(128, channels, 512, device="cuda") for _ in range(2))
            for it in norms[0].parameters():
                it.grad = torch.zeros_like(it)
            x.requires_grad_().grad = torch.zeros_like(x) if text else None
            y = norms[0](x)
            y.backward(gradient)
            peak = torch.cuda.max_memory_allocated()
        if text:
            trial.published(f"at most, {channels:,} channels", f"{text} MiB", peak)
        else:
            trial.cured(f"at most, {channels:,} channels, no old gradient", "2052.063 MiB", peak)


CASE = Case(
    title="A gradient that is added to another needs its memory twice for a moment",
    source="linkedin/Liger-Kernel#1112",
    date="2026-02-27",
    library="PyTorch",
    kind="prediction",
    version="as of February 2026",
    observed="GroupNorm over 128 batches of 512 values takes 40.066 MiB with its backward pass "
    "for 32 channels on a B200, 80.129 for 64 and 2,564.063 for 2,048.",
    why="Input, result and the gradient of the result live throughout. The gradient of the input "
    "is made anew beside the one of the last iteration, and added to it.",
    cure="zero_grad(set_to_none=True) before the backward pass",
    upstream="Merged; the kernel itself does not change this.",
    inferred=("The weights of the other implementation lie beside these.",),
    reproduce=reproduce,
    needs_torch=True,
)
