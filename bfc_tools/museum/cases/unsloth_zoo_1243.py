"""unsloth-zoo#1243: a loss in one chunk, and in four."""

import bfc
from bfc_tools.museum.case import Case, Trial

TOKENS, VOCABULARY, SIZE = 2048, 248_320, 2048


def reproduce(trial: Trial) -> None:
    import torch
    from torch.nn.functional import cross_entropy

    def loss(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy((hidden @ head.T).float(), labels)

    for chunk, text in (TOKENS, "7.6 GiB"), (TOKENS // 4, "3.14 GiB"):
        with bfc.predict(device="b200"):
            hidden = torch.randn(chunk, SIZE, device="cuda", dtype=torch.bfloat16)
            head = torch.randn(VOCABULARY, SIZE, device="cuda", dtype=torch.bfloat16)
            labels = torch.zeros(chunk, device="cuda", dtype=torch.long)
            before = torch.cuda.memory_allocated()
            in_all = torch.zeros_like(head)
            for _ in range(TOKENS // chunk):
                in_all += torch.func.grad(loss, argnums=1)(hidden, head, labels)
            peak = torch.cuda.max_memory_allocated() - before
        say = trial.published if chunk == TOKENS else trial.cured
        say(f"at most, {TOKENS // chunk} chunks", text, peak)


CASE = Case(
    title="A limit of 4 GiB cuts a loss of 7.6 GiB in four on a GPU of 183",
    source="unslothai/unsloth-zoo#1243",
    date="2026-09-16",
    library="PyTorch",
    kind="prediction",
    version="as of September 2026",
    observed="On a B200 all that the loss of 2,048 tokens makes is about 7.6 GiB, with a "
    "vocabulary of 248,320 and 2,048 numbers a token. A fixed limit of 4 GiB cuts it in four.",
    why="A logit costs 14 bytes at most, because torch.func keeps the graph of the gradients, and "
    "the gradient of the head is there from the start. Each chunk makes another such gradient, so "
    "that four chunks do not take a quarter.",
    cure="four chunks where memory is short, which the limit is for",
    upstream="Closed: a limit that grows with the GPU was an option of the pull request.",
    inferred=("bfloat16, and a head that is trained.",),
    reproduce=reproduce,
    needs_torch=True,
)
