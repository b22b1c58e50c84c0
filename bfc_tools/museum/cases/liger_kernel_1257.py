"""Liger-Kernel#1257: a norm, the sum of its result, and the backward pass."""

import bfc
from bfc_tools.museum.case import Case, Trial

TOKENS = 4096


def reproduce(trial: Trial) -> None:
    import torch

    runs = (1024, "40.02", False), (16_384, "640.11", False), (1024, "", True)
    for width, text, is_cured in runs:
        with bfc.predict(device="h100"):
            options = {"device": "cuda", "dtype": torch.bfloat16}
            norm = torch.nn.RMSNorm(width, eps=1e-6, **options)
            x = torch.zeros(TOKENS, 1, width, **options, requires_grad=True)
            for tensor in (x, norm.weight):
                tensor.grad = torch.zeros_like(tensor)
            if is_cured:
                norm(x).sum().backward()
                peak = torch.cuda.max_memory_allocated()
                trial.cured("at most, result not kept", "32.02 MiB", peak)
            else:
                y = norm(x)
                y.sum().backward()
                peak = torch.cuda.max_memory_allocated()
                trial.published(f"at most, width {width:,}", f"{text} MiB", peak)


CASE = Case(
    title="A result that is summed and kept costs a fifth of a layer's peak",
    source="linkedin/Liger-Kernel#1257",
    date="2026-06-10",
    library="PyTorch",
    kind="leaks",
    version="as of June 2026",
    observed="RMSNorm over 4,096 tokens of width 1,024 in bfloat16 takes 40.02 MiB with its "
    "backward pass on an H100, 80.03 for width 2,048 and 640.11 for 16,384.",
    why="Five tensors of the input's size live at once: input, its gradient, the result, a "
    "gradient of the sum that is spread out, and the new gradient of the input. The result is not "
    "needed any more, but a variable holds it.",
    cure="keep no name for the result",
    upstream="Merged; it is a measurement of both implementations in the same way.",
    inferred=("The second iteration is measured: the gradients exist.",),
    reproduce=reproduce,
    needs_torch=True,
)
