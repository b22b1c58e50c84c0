"""ComfyUI#15135: the same attention, for 16,000 tokens."""

import bfc
from bfc_tools.museum.case import Case, Trial

TOKENS = 16_000


def reproduce(trial: Trial) -> None:
    import torch

    for is_expanded in (False, True):
        answer = "fits"
        with bfc.predict(device="rtx5090", oom=True):
            options = {"device": "cuda", "dtype": torch.half}
            q, k, v = (torch.zeros(1, heads, TOKENS, 128, **options) for heads in (28, 4, 4))
            mask = torch.zeros(TOKENS, TOKENS, **options)
            if is_expanded:
                k, v = (it.repeat_interleave(7, dim=1) for it in (k, v))
            attention = torch.nn.functional.scaled_dot_product_attention
            try:
                attention(q, k, v, mask, enable_gqa=not is_expanded)
            except torch.OutOfMemoryError:
                answer = "refused"
        if is_expanded:
            trial.cured("16,000 tokens, keys and values expanded", "fits", answer)
        else:
            trial.published("16,000 tokens", "refused", answer)


CASE = Case(
    title="Attention over 16,000 tokens with shared heads does not fit into 32 GiB",
    source="Comfy-Org/ComfyUI#15135",
    date="2026-07-30",
    library="PyTorch",
    kind="limits",
    version="2.9.1, CUDA 13.0",
    observed="28 heads of queries and 4 of keys with a mask run out of memory for 16,000 tokens "
    "on an RTX 5090, where 8,000 take 15.48 GiB.",
    why="The scores of all heads are computed as matrices, and twice as many tokens have four "
    "times as many scores. Their inputs have 0.14 GiB, and the mask 0.48.",
    cure="expand the keys and values first",
    upstream="ComfyUI#15146 puts cuDNN's kernel first, which takes both.",
    inferred=("Nothing else lives on the GPU.",),
    reproduce=reproduce,
    needs_torch=True,
)
