"""OpenRLHF#718: the probabilities of the tokens that were chosen."""

import bfc
from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    import torch

    with bfc.predict(device="h100"):
        logits = torch.randn(16, 1024, 32_768, device="cuda")
        tokens = torch.randint(0, 32_768, (16, 1024), device="cuda")
        for is_cured in (False, True):
            torch.cuda.reset_peak_memory_stats()
            rows = zip(logits, tokens, strict=True) if is_cured else [(logits, tokens)]
            chosen = [
                row.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
                for row, index in rows
            ]
            if is_cured:
                chosen = [torch.stack(chosen)]
            text = "2282 MB" if is_cured else "4295 MB"
            peak = torch.cuda.max_memory_allocated()
            trial.published("at most, with the logits", text, peak, cure=is_cured)
            del chosen


CASE = Case(
    title="A number for each token needs as much memory as all of its logits",
    source="OpenRLHF/OpenRLHF#718",
    date="2025-02-06",
    library="PyTorch",
    kind="prediction",
    version="as of February 2025",
    observed="For 16 sequences of 1,024 tokens and a vocabulary of 32,768, log_softmax and gather "
    "take 4,295 MB. Row by row they take 2,282 MB, of which 2,147 are the logits.",
    why="log_softmax makes a tensor as large as the logits, of which one value for each token is "
    "used. Row by row only a sixteenth of it lives at once.",
    cure="row by row",
    upstream="Merged.",
    inferred=("Logits in single precision, as the published 2,147 MB show.",),
    reproduce=reproduce,
    needs_torch=True,
)
