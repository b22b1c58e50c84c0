"""labs-molt#121: chunks in single precision that wait for the backward pass."""

import bfc
from bfc_tools.museum.case import Case, Trial

TOKENS, VOCABULARY, ROWS = 8192, 248_320, 1024


def reproduce(trial: Trial) -> None:
    import torch.utils.checkpoint

    for is_cured in (False, True):
        with bfc.predict(device="h100"):
            logits = torch.zeros(TOKENS, VOCABULARY, device="cuda", dtype=torch.bfloat16)
            kept, before = [], torch.cuda.memory_allocated()
            for part in logits.requires_grad_().split(ROWS):
                if is_cured:
                    run = torch.utils.checkpoint.checkpoint
                    kept += [run(lambda x: x.float().logsumexp(-1), part, use_reentrant=False)]
                else:
                    kept += [part.float().logsumexp(-1)]
            held = torch.cuda.memory_allocated() - before
            del kept
        if is_cured:
            trial.cured("kept for the backward pass", "0.03 MiB", held)
        else:
            trial.published("kept for the backward pass", "8 GiB", held)


CASE = Case(
    title="Log-probabilities in chunks still keep every chunk in single precision",
    source="NVIDIA-NeMo/labs-molt#121",
    date="2026-09-17",
    library="PyTorch",
    kind="prediction",
    version="as of September 2026",
    observed="Chunks bound what the log-probabilities need at once, but 8 GiB stay until the "
    "backward pass, for 8 thousand tokens and a vocabulary of 248 thousand.",
    why="logsumexp keeps its input for the backward pass, and each chunk in single precision is "
    "such an input. Together they are twice as large as the logits in bfloat16.",
    cure="checkpoint each chunk, which is computed again in the backward pass",
    upstream="Merged.",
    inferred=(
        "8,192 tokens, a vocabulary of 248,320, chunks of 1,024.",
        "8 GiB is rounded: the sizes give 7.58.",
    ),
    reproduce=reproduce,
    needs_torch=True,
)
