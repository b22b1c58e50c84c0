"""unsloth-zoo#947: chunks of a loss with its head, trained and frozen."""

import bfc
from bfc_tools.museum.case import Case, Trial

VOCABULARY, SIZE = 151_936, 4096


def reproduce(trial: Trial) -> None:
    import torch
    from torch.nn.functional import cross_entropy

    def loss(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy((hidden @ head.T).float(), labels)

    for tokens, text in (128, "74.16"), (256, "42.08"), (512, "26.07"), (512, ""):
        with bfc.predict(device="t4"):
            hidden = torch.randn(tokens, SIZE, device="cuda", dtype=torch.half)
            head = torch.randn(VOCABULARY, SIZE, device="cuda", dtype=torch.half)
            labels = torch.zeros(tokens, device="cuda", dtype=torch.long)
            step = torch.func.grad_and_value(loss, argnums=(0, 1) if text else 0)
            step(hidden[:1], head[:1], labels[:1])  # makes both workspaces of cuBLAS
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step(hidden, head, labels)
            each = (torch.cuda.max_memory_allocated() - before) / tokens / VOCABULARY
        what = f"bytes a logit, {tokens} tokens" + ("" if text else ", head frozen")
        trial.published(what, text or "14", each, cure=not text)


CASE = Case(
    title="Smaller chunks of a loss cost more a logit, because each makes a whole gradient",
    source="unslothai/unsloth-zoo#947",
    date="2026-09-08",
    library="PyTorch",
    kind="prediction",
    version="as of September 2026",
    observed="The loss of a chunk with a head of 4,096 numbers a token takes 74.16 bytes a logit "
    "for 128 tokens, 42.08 for 256 and 26.07 for 512, and about 14 when the head is frozen.",
    why="Every chunk makes a gradient of the whole head, which does not shrink with the chunk: two "
    "bytes for each weight. Beside it are ten bytes a logit, because torch.func keeps the graph of "
    "the gradients.",
    cure="a frozen head, or larger chunks",
    upstream="Merged: the plan has both terms.",
    inferred=(
        "A vocabulary of 151,936 tokens, and half precision.",
        "cuBLAS's workspaces of both threads were there before.",
    ),
    reproduce=reproduce,
    needs_torch=True,
)
