"""pytorch#69526: one convolution and two poolings, again and again."""

import bfc
from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    import torch
    from torch import nn

    for size in (512, 64):
        with bfc.predict(device="v100"), torch.no_grad():
            pool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
            net = nn.Sequential(nn.Conv2d(3, 28, 3), pool, pool).to("cuda")
            frames = torch.randn(512, 3, 224, 224).to("cuda")
            if size == 512:
                allocated = torch.cuda.memory_allocated()
                trial.published("allocated before the first pass", "294 MiB", allocated)
                trial.published("reserved before it", "296 MiB", torch.cuda.memory_reserved())
            torch.cat([net(part) for part in frames.split(size)])
            reserved = torch.cuda.memory_reserved()
        if size == 512:
            trial.published("reserved after it", "5014 MiB", reserved)
        else:
            trial.cured("reserved after eight parts", "1,060 MiB", reserved)


CASE = Case(
    title="One pass through three layers reserves 5 GB for a result of 172 MB",
    source="pytorch/pytorch#69526",
    date="2021-12-07",
    library="PyTorch",
    kind="prediction",
    version="as of December 2021",
    observed="Before the first pass 294 MB are allocated and 296 reserved. After it 5,014 MB are "
    "reserved, and empty_cache() gives back a part of them only.",
    why="The convolution's result, the first pooling's and its indices of eight bytes each live at "
    "once, in segments of their own. They stay in the cache when they are freed.",
    cure="batches of 64, or empty_cache() after the pass",
    upstream="The issue was closed.",
    inferred=("A V100: the thread names no GPU.", "What the thread calls MB are MiB."),
    reproduce=reproduce,
    needs_torch=True,
)
