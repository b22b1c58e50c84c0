"""RL#3314: the loss of a student over 64 of 151,936 tokens."""

import bfc
from bfc_tools.museum.case import Case, Trial

VOCABULARY, K = 151_936, 64
TABLE = (
    (2048, "4.06 GiB", "1.16 GiB"),
    (4096, "8.12 GiB", "2.32 GiB"),
    (8192, "16.23 GiB", "4.64 GiB"),
    (12_288, "24.35 GiB", "6.96 GiB"),
)


def reproduce(trial: Trial) -> None:
    import torch

    for tokens, *texts in TABLE:
        for is_cured in (False, True):
            with bfc.predict(device="h100"):
                options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
                logits = torch.randn(1, tokens, VOCABULARY, **options)
                chosen = torch.randint(0, VOCABULARY, (K,), device="cuda")
                teacher = torch.randn(1, tokens, K, device="cuda").log_softmax(-1)
                if is_cured:
                    student = logits.index_select(-1, chosen).float().log_softmax(-1)
                else:
                    student = logits.float().log_softmax(-1).index_select(-1, chosen)
                (teacher.exp() * (teacher - student.log_softmax(-1))).sum().backward()
                peak = torch.cuda.max_memory_allocated()
            trial.published(f"at most, {tokens} tokens", texts[is_cured], peak, cure=is_cured)


CASE = Case(
    title="A loss over 64 tokens is computed over all 151,936 of them, and takes 3.5 times as much",
    source="NVIDIA-NeMo/RL#3314",
    date="2026-07-27",
    library="PyTorch",
    kind="prediction",
    version="2.13.0, CUDA 13.0",
    observed="On an RTX 4090 the loss and its backward pass take 4.06 GiB for 2,048 tokens and "
    "24.35 GiB for 12,288. When the 64 tokens are chosen first they take 1.16 and 6.96 GiB.",
    why="The log-softmax of the whole vocabulary and its gradients are in single precision, beside "
    "logits in half. The loss divides the sum over the vocabulary out again, so it is not needed.",
    cure="choose the 64 tokens first",
    upstream="Merged.",
    inferred=("One process; the thread's code gathers from several.",),
    reproduce=reproduce,
    needs_torch=True,
)
