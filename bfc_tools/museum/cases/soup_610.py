"""Soup#610: what a logit costs in the loss, for four vocabularies."""

import bfc
from bfc_tools.museum.case import Case, Trial

TOKENS = 2048
TABLE = ((8192, "12.0000"), (32_768, "12.0000"), (49_152, "12.0000"), (151_936, "12.0101"))


def reproduce(trial: Trial) -> None:
    import torch
    from torch.nn.functional import cross_entropy

    for settings in ("", "expandable_segments:True"):
        for vocabulary, text in TABLE[-1:] if settings else TABLE:
            with bfc.predict(device="a10g", settings=settings):
                options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
                logits = torch.randn(TOKENS, vocabulary, **options)
                labels = torch.randint(0, vocabulary, (TOKENS,), device="cuda")
                before = torch.cuda.memory_allocated()
                cross_entropy(logits.float(), labels).backward()
                peak = torch.cuda.max_memory_allocated() - before
            each = round(peak / (TOKENS * vocabulary), 4)
            what = f"bytes a logit, vocabulary of {vocabulary:,}"
            if settings:
                trial.cured(f"{what}, expandable segments", "12.0000", each)
            else:
                trial.published(what, text, each)


CASE = Case(
    title="A logit costs 12 bytes, and 12.01 with the vocabulary of Qwen",
    source="MakazhanAlpamys/Soup#610",
    date="2026-08-31",
    library="PyTorch",
    kind="rounding",
    version="2.13.0, CUDA 13.0",
    observed="The loss and its backward pass take 12.0 bytes a logit for vocabularies of 8,192, "
    "32,768 and 49,152 tokens on an A10G, and 12.01010951979781 for 151,936.",
    why="Three tensors of 1,187 MiB live at once, each in a segment of its own of 1,188 MiB. A rest"
    " of 1 MiB is not split off, so that all of it counts as allocated.",
    cure="expandable_segments:True",
    upstream="Merged.",
    inferred=(
        "2,048 tokens: the published digits are those of 1,024 or 2,048, and of no other number.",
    ),
    reproduce=reproduce,
    needs_torch=True,
)
