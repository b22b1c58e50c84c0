"""Liger-Kernel#1326: the activation between two layers of a transformer."""

import bfc
from bfc_tools.museum.case import Case, Trial

TABLE = ((1024, "112.001"), (32_768, "3584.001"))


def reproduce(trial: Trial) -> None:
    import torch
    from torch.nn.functional import silu

    def swiglu(pair: torch.Tensor) -> torch.Tensor:
        gate, up = pair.chunk(2, -1)
        return silu(gate) * up

    for width, text in (*TABLE, (1024, "")):
        with bfc.predict(device="h100"):
            options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
            x = torch.zeros(2048, 4, 2 * width, **options)
            kept = [swiglu(x)]
            (kept[0] if text else kept.pop()).sum().backward()
            peak = torch.cuda.max_memory_allocated()
        if text:
            trial.published(f"at most, width {width:,}", f"{text} MiB", peak)
        else:
            trial.cured(f"at most, width {width:,}, result not kept", "96.001 MiB", peak)


CASE = Case(
    title="The activation of a transformer needs seven times the memory of its result",
    source="linkedin/Liger-Kernel#1326",
    date="2026-08-10",
    library="PyTorch",
    kind="prediction",
    version="as of July 2026",
    observed="SwiGLU over 8,192 tokens in bfloat16 takes 112.001 MiB for a width of 1,024 with "
    "its backward pass on an H100, 448.001 for 4,096 and 3,584.001 for 32,768.",
    why="Input and its gradient have twice the size of the result each. Beside them live the "
    "result, the activation that is kept, and a gradient on its way to one half.",
    cure="keep no name for the result",
    upstream="Merged; Megatron's own fused form takes 80.001 MiB, and one that writes the "
    "gradient over the input 64.001.",
    inferred=(),
    reproduce=reproduce,
    needs_torch=True,
)
