"""pytorch#133206: attention within a window, over 40,320 tokens."""

import bfc
from bfc_tools.museum.case import Case, Trial

TOKENS, WINDOW = 40_320, 512


def reproduce(trial: Trial) -> None:
    import torch

    for is_cured in (False, True):
        with bfc.predict(device="h100"):
            q, k = (torch.zeros(1, 16, TOKENS, 2, device="cuda").half() for _ in range(2))
            _ = q[:, :, :8] @ k[:, :, :8].mT  # takes the workspace
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            for at in range(0, TOKENS if is_cured else 1, WINDOW):
                rows = slice(at, at + WINDOW) if is_cured else slice(None)
                near = slice(max(0, at - WINDOW), at + 2 * WINDOW) if is_cured else rows
                scores = q[:, :, rows] @ k[:, :, near].mT
            peak = torch.cuda.max_memory_allocated() - before
            del scores
        if is_cured:
            trial.cured("scores within the window", "48 MiB", peak)
        else:
            trial.published("scores of all tokens", "48 GiB", peak)


CASE = Case(
    title="A window of 512 tokens still computes the scores of 40,320 against all",
    source="pytorch/pytorch#133206",
    date="2024-08-12",
    library="PyTorch",
    kind="prediction",
    version="2.5, nightly",
    observed="flex_attention with a window over 40,320 tokens runs out of memory: it asks for 48 "
    "GB for the scores.",
    why="Without torch.compile its operators run one by one, and the mask is applied to scores "
    "that are all there. Sixteen heads have 40,320 times 40,320 of them, in half precision.",
    cure="torch.compile, or the keys of a window at a time",
    upstream="Closed: flex_attention is meant to be compiled, and warns since.",
    inferred=(
        "16 heads of two numbers in half precision: the same program is in attention-gym#15.",
        "What the thread calls GB are GiB.",
    ),
    reproduce=reproduce,
    needs_torch=True,
)
