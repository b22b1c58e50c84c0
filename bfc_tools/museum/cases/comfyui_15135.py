"""ComfyUI#15135: attention with a mask and fewer heads of keys."""

import bfc
from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    import torch

    for tokens, fallback, fused in (4000, "3.99 GiB", "0.03 GiB"), (8000, "15.48 GiB", "0.05 GiB"):
        with bfc.predict(device="rtx5090"):
            options = {"device": "cuda", "dtype": torch.half}
            q, k, v = (torch.randn(1, heads, tokens, 128, **options) for heads in (28, 4, 4))
            mask = torch.full((tokens, tokens), float("-inf"), **options).triu(1)
            for is_expanded in (False, True):
                _ = q[0, 0, :1] @ q[0, 0, :1].T  # takes the workspace
                if is_expanded:
                    k, v = (it.repeat_interleave(7, dim=1) for it in (k, v))
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                attention = torch.nn.functional.scaled_dot_product_attention
                attention(q, k, v, mask, enable_gqa=not is_expanded)
                peak = torch.cuda.max_memory_allocated() - before
                text = fused if is_expanded else fallback
                trial.published(f"at most, {tokens} tokens", text, peak, cure=is_expanded)


CASE = Case(
    title="Attention with a mask and shared heads falls back to a kernel with all scores",
    source="Comfy-Org/ComfyUI#15135",
    date="2026-07-30",
    library="PyTorch",
    kind="prediction",
    version="2.9.1, CUDA 13.0",
    observed="28 heads of queries and 4 of keys with a mask take 3.99 GiB for 4,000 tokens, 15.48 "
    "GiB for 8,000, and run out of memory for 16,000. With expanded keys they take 0.03 and 0.05 "
    "GiB.",
    why="No fused kernel takes both a mask and fewer heads of keys, so PyTorch computes the scores "
    "of all heads as matrices: in single precision, with their softmax, and a mask of a byte for "
    "each.",
    cure="expand the keys and values first",
    upstream="ComfyUI#15146 puts cuDNN's kernel first, which takes both.",
    inferred=("The figures are those of the call alone, above what its inputs take.",),
    reproduce=reproduce,
    needs_torch=True,
)
