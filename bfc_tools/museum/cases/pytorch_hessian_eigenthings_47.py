"""pytorch-hessian-eigenthings#47: the Hessian of a loss, times a vector."""

import bfc
from bfc_tools.museum.case import Case, Trial

ROWS, VOCABULARY = 64 * 256, 50_304


def reproduce(trial: Trial) -> None:
    import torch

    for is_cured in (False, True):
        with bfc.predict(device="a100"):
            logits, u = (torch.zeros(ROWS, VOCABULARY, device="cuda") for _ in range(2))
            mask = torch.zeros(ROWS, 1, device="cuda")
            p = logits.softmax(-1)
            if is_cured:
                for p_, u_ in zip(p.split(64), u.split(64), strict=True):
                    p_.mul_(u_ - (p_ * u_).sum(-1, keepdim=True))
            else:
                _ = (p * u - p * (p * u).sum(-1, keepdim=True)) * mask / ROWS
            peak = torch.cuda.max_memory_allocated()
        text = "9.89 GB" if is_cured else "19.78 GB"
        trial.published("at most" + ", some rows at a time" * is_cured, text, peak, cure=is_cured)


CASE = Case(
    title="A product with the Hessian of a loss holds six tensors of the size of its logits",
    source="noahgolmant/pytorch-hessian-eigenthings#47",
    date="2026-05-13",
    library="PyTorch",
    kind="prediction",
    version="as of May 2026",
    observed="For 64 sequences of 256 tokens and a vocabulary of 50,304 in single precision the "
    "product takes 19.78 GB at most on an A100. In one piece, compiled or by hand, it takes 9.89.",
    why="Logits, vector, softmax, two products and their difference live at once, and each has "
    "3.3 GB. Three of them are enough: what goes in, and the result.",
    cure="some rows at a time, over the softmax",
    upstream="Merged, with a kernel that needs no softmax.",
    inferred=("The formula is that of the softmax: p times u, less p times the sum of both.",),
    reproduce=reproduce,
    needs_torch=True,
)
