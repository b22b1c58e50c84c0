"""Automodel#2428: the loss of a draft model, against all probabilities of its target."""

import bfc
from bfc_tools.museum.case import Case, Trial

VOCABULARY = 32_000
RUNS = ((4096, 1, "2.10"), (32_768, 1, "16.78"), (32_768, 16, "4.98"))


def reproduce(trial: Trial) -> None:
    import torch

    for tokens, pieces, text in RUNS:
        with bfc.predict(device="a100"), torch.no_grad():
            options = {"device": "cuda", "dtype": torch.bfloat16}
            logits, target = (torch.zeros(tokens, VOCABULARY, **options) for _ in range(2))
            for x, wanted in zip(logits.chunk(pieces), target.chunk(pieces), strict=True):
                likely = torch.log_softmax(x.float(), -1)
                (wanted.float() * likely).sum(-1)
                del likely
            peak = torch.cuda.max_memory_allocated()
        add = trial.published if pieces == 1 else trial.cured
        add(f"at most, {tokens:,} tokens, {pieces} part(s)", f"{text} GB", peak)


CASE = Case(
    title="A loss against probabilities takes four times what goes into it",
    source="NVIDIA-NeMo/Automodel#2428",
    date="2026-06-05",
    library="PyTorch",
    kind="prediction",
    version="as of June 2026",
    observed="The loss over 32,000 words takes 2.10 GB at most for 4,096 tokens on an A100, and "
    "16.78 GB for 32,768. A kernel of its own takes 4.19 there, which are its inputs.",
    why="Logits and probabilities have two bytes each, and are widened to four. The logarithms "
    "and the product of both have that size, too, so that three such tensors live beside the "
    "inputs.",
    cure="some tokens at a time",
    upstream="Merged, with a kernel that computes the softmax as it goes.",
    inferred=(
        "The inputs count, since the kernel's figure is theirs.",
        "The probabilities are widened as well, as four times the inputs show.",
    ),
    reproduce=reproduce,
    needs_torch=True,
)
