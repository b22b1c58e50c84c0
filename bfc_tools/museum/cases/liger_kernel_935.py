"""Liger-Kernel#935: the layers between two attentions, in four tiles."""

from typing import Any

import bfc
from bfc_tools.museum.case import Case, Trial

RUNS = ((1024, 1, "264.25 MiB"), (1024, 4, "190.25 MiB"), (16_384, 4, "1168.25 MiB"))
SHAPES = ((2048, 4096), (2048, 4096), (4096, 2048))


def reproduce(trial: Trial) -> None:
    import torch

    def run(x: Any, gate: Any, up: Any, down: Any) -> Any:
        return torch.nn.functional.silu(x @ gate) * (x @ up) @ down

    for tokens, tiles, text in RUNS:
        with bfc.predict(device="rtx4090"), torch.device("cuda"):
            *weights, x = (torch.zeros(it).bfloat16() for it in (*SHAPES, (2 * tokens, 2048)))
            for it in (*weights, x):
                it.requires_grad_().grad = torch.zeros_like(it)
            with torch.no_grad():
                y = torch.cat([run(it, *weights) for it in x.chunk(tiles)])
            made: Any = torch.zeros_like(x) if tiles > 1 else x.grad
            given = torch.zeros_like(y) if tiles > 1 else y.zero_()
            for at, tile in enumerate(x.detach().chunk(tiles)):
                tile.requires_grad_().grad = made.chunk(tiles)[at]
                run(tile, *weights).backward(given.chunk(tiles)[at], retain_graph=tiles == 1)
            peak = torch.cuda.max_memory_allocated()
        trial.published(f"at most, {tokens:,}, {tiles} tile(s)", text, peak, cure=tiles > 1)


CASE = Case(
    title="Four tiles halve what the layers between two attentions need",
    source="linkedin/Liger-Kernel#935",
    date="2025-11-19",
    library="PyTorch",
    kind="prediction",
    version="as of November 2025",
    observed="The layers of width 2,048 and 4,096 take 264.25 MiB for two sequences of 1,024 "
    "tokens with the backward pass on an RTX 4090, and 2,416.25 for 16,384. In four tiles, as "
    "DeepSpeed does it, they take 190.25 and 1,168.25.",
    why="Four tensors of the inner width are kept for the backward pass, and gradients of them "
    "join. In tiles nothing of the inner width is kept, and only a quarter of it lives at once.",
    cure="tiles, each computed again in the backward pass",
    upstream="Merged; its own tiles take 186.25 and 1,056.25 MiB.",
    inferred=("The second iteration is measured: the gradients exist.",),
    reproduce=reproduce,
    needs_torch=True,
)
