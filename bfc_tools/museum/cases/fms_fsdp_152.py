"""fms-fsdp#152: the logits of the step before."""

import bfc
from bfc_tools.museum.case import Case, Trial

TOKENS, VOCABULARY = 4096, 128 * 1024


def reproduce(trial: Trial) -> None:
    import torch

    for is_cured in (False, True):
        with bfc.predict(device="h100"):
            head = torch.zeros(VOCABULARY, 64, device="cuda", dtype=torch.bfloat16)
            states = torch.zeros(TOKENS, 64, device="cuda", dtype=torch.bfloat16)
            first = states[:8] @ head[:8].mT  # takes the workspace
            before = torch.cuda.memory_allocated()
            for _ in range(2):
                output = states @ head.mT
                if is_cured:
                    del output
            kept = torch.cuda.memory_allocated() - before
            del first
        if is_cured:
            trial.cured("kept between steps", "0 GiB", kept)
        else:
            trial.published("kept between steps", "1 GiB", kept)


CASE = Case(
    title="A name keeps the logits of one step alive through the next",
    source="foundation-model-stack/fms-fsdp#152",
    date="2025-07-10",
    library="PyTorch",
    kind="prediction",
    version="as of July 2025",
    observed="A training loop holds the logits of the step before: 1 GiB for each sequence of "
    "4,096 tokens with a vocabulary of 128 thousand, in bfloat16.",
    why="A name of a loop lives on until it is bound again, which is after the next forward pass "
    "has made its logits. So two of them are alive at once.",
    cure="del of the name when the loss is there",
    upstream="Merged.",
    inferred=("128 thousand are 131,072.", "A model of only its last layer, 64 wide."),
    reproduce=reproduce,
    needs_torch=True,
)
