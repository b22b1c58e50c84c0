"""pytorch#138685: two sums over products, fused and not."""

import bfc
from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    import torch

    for is_fused in (True, False):
        with bfc.predict(device="a100"):
            a, b = (torch.randn(1024 * 32, 16, device="cuda") for _ in range(2))
            c = torch.randn(16, 1024 * 32, device="cuda")
            flushed = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
            if is_fused:
                first, second = a @ c, b @ c
                _ = first.sum(dim=-1) + second.sum(dim=-1)
                trial.published("at most, fused", "8.886 GB", torch.cuda.max_memory_allocated())
            else:
                _ = (a @ c).sum(dim=-1) + (b @ c).sum(dim=-1)
                peak = torch.cuda.max_memory_allocated()
                trial.published("at most, one after the other", "4.591 GB", peak, cure=True)
            del flushed


CASE = Case(
    title="Fusing two reductions keeps both of their large inputs alive",
    source="pytorch/pytorch#138685",
    date="2024-10-23",
    library="PyTorch",
    kind="prediction",
    version="2.6 nightly",
    observed="torch.compile fuses two sums over products of 4 GB, and the peak is 8.886 GB; without"
    " the fusion it is 4.591 GB, and as fast.",
    why="A fused kernel reads both products, so both are live when it runs. One after the other, "
    "the second takes the memory of the first.",
    cure="no fusion of the two reductions",
    upstream="Closed and open again; in 2026 it could not be reproduced on main.",
    inferred=(
        "Eager code that holds both products stands for the fused kernel.",
        "The benchmark has a buffer of 256 MiB to flush the cache.",
        "The GPU is an A100, whose workspace for products has 8 MiB.",
    ),
    reproduce=reproduce,
    needs_torch=True,
)
