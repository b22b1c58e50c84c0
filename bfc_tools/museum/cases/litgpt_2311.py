"""litgpt#2311: cross entropy in one piece and in chunks."""

import bfc
from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    import torch
    from torch.nn.functional import cross_entropy

    for chunk in (4096, 512):
        with bfc.predict(device="t4"):
            logits = torch.randn(2 * 2048, 32_000, device="cuda", requires_grad=True)
            targets = torch.randint(0, 32_000, (2 * 2048,), device="cuda")
            parts = zip(logits.split(chunk), targets.split(chunk), strict=True)
            torch.cat([cross_entropy(*part, reduction="none") for part in parts]).mean().backward()
            peak = torch.cuda.max_memory_allocated()
        if chunk == 4096:
            trial.published("allocated at most, one piece", "2097 MB", peak)
        else:
            trial.published(f"allocated at most, chunks of {chunk}", "1580 MB", peak, cure=True)


CASE = Case(
    title="Cross entropy in one piece needs four times the memory of its logits",
    source="Lightning-AI/litgpt#2311",
    date="2026-08-28",
    library="PyTorch",
    kind="prediction",
    version="as of August 2026",
    observed="With 4,096 tokens and a vocabulary of 32,000 the peak is 2,097 MB on a T4, and about "
    "1,580 MB for chunks of 32 to 512 tokens.",
    why="The log-softmax, its gradient and the gradient of the loss have the size of the logits, "
    "and live at once. In chunks one of the three is never there as a whole.",
    cure="chunked_cross_entropy",
    upstream="Open when it was read.",
    inferred=("Logits in single precision, as the published 500 MB blocks show.",),
    reproduce=reproduce,
    needs_torch=True,
)
