"""vllm#15105: the logits of 1,024 made-up requests, sorted."""

import bfc
from bfc_tools.museum.case import Case, Trial

VOCABULARY = 152_064


def reproduce(trial: Trial) -> None:
    import torch

    for requests, text in (1024, "1.74 GiB"), (256, "0.44 GiB"):
        with bfc.predict(device="rtx3090"):
            torch.empty(requests, VOCABULARY, device="cuda").sort(-1)
            segments = [segment["total_size"] for segment in torch.cuda.memory_snapshot()]
        say = trial.published if requests == 1024 else trial.cured
        say(f"the largest request, {requests} sorted", text, max(segments))


CASE = Case(
    title="To sort logits of 594 MiB asks for 1.74 GiB at once",
    source="vllm-project/vllm#15105",
    date="2025-03-20",
    library="PyTorch",
    kind="prediction",
    version="as of March 2025, vLLM 0.8.0",
    observed="The sampler's warm-up fails in a sort: 1.74 GiB are asked for, and 1.07 of 23.69 GiB "
    "are free.",
    why="A sort along the last axis needs room for both keys and indices, four and eight bytes a "
    "logit, in one block. The 1,024 requests that the warm-up makes up are the limit of vLLM 0.8.",
    cure="--max-num-seqs 256",
    upstream="The issue was closed.",
    inferred=("1,024 requests, and a vocabulary of 152,064 tokens.",),
    reproduce=reproduce,
    needs_torch=True,
)
