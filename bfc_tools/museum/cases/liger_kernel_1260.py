"""Liger-Kernel#1260: Megatron's loss over a vocabulary that several GPUs share."""

import bfc
from bfc_tools.museum.case import Case, Trial

RUNS = ((4096, 1, "256 MiB"), (131_072, 1, "8192 MiB"), (131_072, 8, "1024 MiB"))


def reproduce(trial: Trial) -> None:
    import torch

    for vocabulary, gpus, text in RUNS:
        with bfc.predict(device="h100"):
            options = {"device": "cuda", "dtype": torch.bfloat16}
            logits = torch.zeros(8192, vocabulary // gpus, **options)
            softmax = logits.float().exp_()
            softmax.div_(softmax.sum(-1, keepdim=True))
            loss = softmax[:, 0].log()
            gradient = torch.ones_like(loss)
            logits.grad = softmax.mul_(gradient.unsqueeze(-1)).to(torch.bfloat16)
            peak = torch.cuda.max_memory_allocated()
        trial.published(f"at most, vocabulary of {vocabulary:,} on {gpus}", text, peak)


CASE = Case(
    title="Eight GPUs share a vocabulary, and each needs eight bytes for a logit of its part",
    source="linkedin/Liger-Kernel#1260",
    date="2026-06-16",
    library="PyTorch",
    kind="prediction",
    version="as of June 2026",
    observed="Megatron's unfused cross entropy over 8,192 tokens takes 256 MB for a vocabulary of "
    "4K on one H100, and 1,024 MB of each of eight GPUs for 128K.",
    why="Logits and their gradient have two bytes each, and the softmax four: it is computed in "
    "place, and turned into the gradient in place, but in single precision.",
    cure="",
    upstream="Merged; its own kernel takes as much.",
    inferred=(
        "2,048 tokens in batches of 4: the table of the project says so.",
        "What the other GPUs do is left out: it moves numbers for each token only.",
    ),
    reproduce=reproduce,
    needs_torch=True,
)
