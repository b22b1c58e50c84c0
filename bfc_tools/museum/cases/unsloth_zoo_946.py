"""unsloth-zoo#946: what a logit costs while both of its copies have a name."""

import bfc
from bfc_tools.museum.case import Case, Trial

VOCABULARY = 151_936
TABLE = ((1024, "18.01", ""), (2048, "18.02", "5.22 GiB"), (4096, "18.00", "10.43 GiB"))


def reproduce(trial: Trial) -> None:
    import torch
    from torch.nn.functional import cross_entropy

    for tokens, each, in_all in (*TABLE, (2048, "", "")):
        with bfc.predict(device="t4"):
            options = {"device": "cuda", "dtype": torch.half}
            head = torch.nn.Linear(1024, VOCABULARY, bias=False, **options)
            hidden = torch.randn(tokens, 1024, **options)
            labels = torch.randint(0, VOCABULARY, (tokens,), device="cuda")
            _ = hidden[:1] @ hidden[:1].T  # makes cuBLAS's workspace
            before = torch.cuda.memory_allocated()
            kept = [half := head(hidden), half.float()] if each else []
            cross_entropy(kept[1] if each else head(hidden).float(), labels).backward()
            peak = torch.cuda.max_memory_allocated() - before
        if in_all:
            trial.published(f"at most, {tokens} tokens", in_all, peak)
        each_of = trial.published if each else trial.cured
        what = f"bytes a logit, {tokens} tokens" + ("" if each else ", no copy kept")
        each_of(what, each or "12.01", peak / tokens / VOCABULARY)


CASE = Case(
    title="A loss that was planned with 4 bytes a logit takes 18",
    source="unslothai/unsloth-zoo#946",
    date="2026-07-25",
    library="PyTorch",
    kind="prediction",
    version="as of July 2026",
    observed="The head, a cast to single precision, the loss and its backward pass take 18.01, "
    "18.02 and 18.00 bytes a logit, so that chunks planned with 1.16 GB take 5.22.",
    why="The logits in half and in single precision stay alive under their names, beside the "
    "log-softmax and two gradients: once 2 and four times 4 bytes. What is above 18 are segments "
    "of whole 2 MiB whose last MiB is not split off.",
    cure="neither copy kept in a variable, which leaves 12 bytes",
    upstream="Merged: the plan has a term for the logits and one for the head (unsloth-zoo#947).",
    inferred=(
        "Logits in half precision, from 1,024 numbers a token, which do not count.",
        "cuBLAS's workspace was there before.",
        "Figures that the thread calls GB are GiB.",
    ),
    reproduce=reproduce,
    needs_torch=True,
)
