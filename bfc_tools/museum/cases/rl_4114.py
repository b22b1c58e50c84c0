"""RL#4114: the probabilities of 4,096 tokens, and their backward pass."""

import bfc
from bfc_tools.museum.case import Case, Trial

TOKENS, VOCABULARY = 4096, 128_256


def reproduce(trial: Trial) -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    def chances(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return logits.float().log_softmax(-1).gather(-1, index)

    for size in (TOKENS, 512):
        with bfc.predict(device="h200"):
            options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
            logits = torch.randn(1, TOKENS, VOCABULARY, **options)
            index = torch.randint(0, VOCABULARY, (1, TOKENS, 1), device="cuda")
            before = torch.cuda.memory_allocated()
            parts = zip(logits.split(size, 1), index.split(size, 1), strict=True)
            sum(checkpoint(chances, *it, use_reentrant=False).sum() for it in parts).backward()
            peak = torch.cuda.max_memory_allocated() - before
        if size == 512:
            trial.cured("at most, in parts of 512", "1.96 GiB", peak)
        else:
            trial.published("at most, over the inputs", "5.87 GiB", peak)


CASE = Case(
    title="The probabilities of 4,096 tokens need six times the memory of their logits",
    source="NVIDIA-NeMo/RL#4114",
    date="2026-09-14",
    library="PyTorch",
    kind="prediction",
    version="as of September 2026",
    observed="For 4,096 tokens and a vocabulary of 128,256 the loss and its backward pass take "
    "5.87 GiB above the logits, although chunks of 512 tokens were asked for.",
    why="Logits in half become single precision, and so are their log-softmax and its gradient: "
    "three tensors of twice the size of the logits. The setting did not reach this path.",
    cure="parts of 512 tokens, each computed again in the backward pass",
    upstream="Open when it was read; with a function of its own it takes 2.45 GiB.",
    inferred=(),
    reproduce=reproduce,
    needs_torch=True,
)
