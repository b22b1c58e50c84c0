"""opt_einsum#133: sixteen factors of a batch, and a core of 17 dimensions."""

import bfc
from bfc_tools.museum.case import Case, Trial

LETTERS = "ijklmnopqrstuvwx"


def reproduce(trial: Trial) -> None:
    import torch

    for is_cured in (False, True):
        batch = 1 if is_cured else 512
        with bfc.predict(device="h100"):
            factors = [
                torch.zeros(batch, 25, 25, 2, device="cuda", dtype=torch.float64) for _ in LETTERS
            ]
            largest, letters = factors[0], LETTERS[0]
            for factor, letter in zip(factors[1:], LETTERS[1:], strict=True):
                equation = f"abc{letters},abc{letter}->abc{letters}{letter}"
                largest, letters = torch.einsum(equation, largest, factor), letters + letter
            size = largest.nbytes
        if is_cured:
            trial.cured("one of the batch at a time", "312.5 MiB", size)
        else:
            trial.published("to be allocated", "156 GiB", size)


CASE = Case(
    title="A contraction that reports 640,000 numbers at most asks for 156 GiB",
    source="dgasmith/opt_einsum#133",
    date="2020-03-24",
    library="PyTorch",
    kind="prediction",
    version="1.4",
    observed="opt_einsum plans a contraction of 17 tensors in one step, with 640,000 numbers at "
    "most. torch.einsum asks for 156 GiB.",
    why="A limit on the memory lets the plan give up and leave one step of all tensors, of which "
    "only the result is counted. torch.einsum multiplies two at a time, and sixteen factors make "
    "65,536 numbers for each of 320,000 places.",
    cure="a part of the batch at a time",
    upstream="Closed: one step of many tensors is as good as its backend.",
    inferred=("From left to right, as torch.einsum went.",),
    reproduce=reproduce,
    needs_torch=True,
)
