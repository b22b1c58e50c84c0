"""Liger-Kernel#1228: the divergence of Jensen and Shannon."""

from functools import partial

import bfc
from bfc_tools.museum.case import Case, Trial

VOCABULARY = 128_256
RUNS = ((1024, 1, "6526.001"), (8192, 1, "52104.0"), (1024, 8, "3325.126"))


def reproduce(trial: Trial) -> None:
    import torch

    divergence = partial(torch.nn.functional.kl_div, reduction="none", log_target=True)
    for tokens, pieces, text in RUNS:
        with bfc.predict(device="b200"):
            made = torch.zeros(tokens, VOCABULARY, device="cuda", requires_grad=True)
            made.grad = torch.zeros_like(made)
            q = made.log_softmax(-1)
            p = torch.zeros(tokens, VOCABULARY, device="cuda").log_softmax(-1)
            torch.cuda.reset_peak_memory_stats()
            for q_, p_ in zip(q.chunk(pieces), p.chunk(pieces), strict=True):
                m = torch.lerp(q_.exp(), p_.exp(), 0.5)
                loss = 0.5 * divergence(m.log(), p_).sum(-1) + 0.5 * divergence(m.log(), q_).sum(-1)
                (loss := (loss / tokens).sum()).backward(retain_graph=True)
            peak = torch.cuda.max_memory_allocated()
        add = trial.published if pieces == 1 else trial.cured
        add(f"at most, {tokens:,} tokens, {pieces} part(s)", f"{text} MiB", peak)


CASE = Case(
    title="A divergence of two distributions needs thirteen times the memory of either",
    source="linkedin/Liger-Kernel#1228",
    date="2026-05-28",
    library="PyTorch",
    kind="prediction",
    version="as of May 2026",
    observed="The Jensen-Shannon divergence of 1,024 tokens over 128,256 choices takes 6,526.001 "
    "MiB with its backward pass on a B200, 13,026.001 for 2,048 tokens and 52,104.0 for 8,192.",
    why="Each step of the formula makes a tensor of the size of a distribution, and keeps it for "
    "the backward pass. A distribution has 501 MiB.",
    cure="some tokens at a time",
    upstream="Merged; its own kernel keeps the gradient alone.",
    inferred=("The second iteration is measured: the gradient of the input exists.",),
    reproduce=reproduce,
    needs_torch=True,
)
