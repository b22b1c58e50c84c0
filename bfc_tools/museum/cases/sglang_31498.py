"""sglang#31498: the log-probabilities of a large batch of prompts."""

import bfc
from bfc_tools.museum.case import Case, Trial

ROWS, VOCABULARY = 7800, 151_936


def reproduce(trial: Trial) -> None:
    import torch

    for rows in ROWS, 2048:
        with bfc.predict(device="h100"):
            logits = torch.empty(ROWS, VOCABULARY, device="cuda", dtype=torch.bfloat16)
            before = torch.cuda.memory_allocated()
            for part in logits.split(rows):
                single = part.float()
                copy = torch.cuda.memory_allocated() - before
                single.log_softmax(-1)
                del single
            peak = torch.cuda.max_memory_allocated() - before
        if rows == ROWS:
            trial.published("the logits in single precision", "4.4 GiB", copy)
            trial.published("their log-softmax", "4.4 GiB", peak - copy)
        else:
            trial.cured("both, 2,048 rows at a time", "2.32 GiB", peak)


CASE = Case(
    title="The log-probabilities of a prompt need its logits twice in single precision",
    source="sgl-project/sglang#31498",
    date="2026-07-16",
    library="PyTorch",
    kind="prediction",
    version="as of July 2026",
    observed="Large batches of prompts whose log-probabilities are asked for make two nearly equal "
    "tensors of 4.4 GiB each, for 7,800 rows and a vocabulary of 152,000.",
    why="The logits are cast to single precision, and their log-softmax is a second tensor of that "
    "size. Parts were an option that was off.",
    cure="parts of 2,048 rows",
    upstream="Merged: parts are the default.",
    inferred=("A vocabulary of 151,936 tokens, which is Qwen's.",),
    reproduce=reproduce,
    needs_torch=True,
)
