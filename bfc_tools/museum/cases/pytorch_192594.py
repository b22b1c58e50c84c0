"""pytorch#192594: two samples from each of 256 distributions."""

import bfc
from bfc_tools.museum.case import Case, Trial

ROWS, CHOICES = 256, 65_536


def reproduce(trial: Trial) -> None:
    import torch

    for is_cured in (False, True):
        with bfc.predict(device="a10"):
            chances = torch.rand(ROWS, CHOICES, device="cuda")
            before = torch.cuda.memory_allocated()
            for part in chances.split(16 if is_cured else ROWS):
                torch.multinomial(part, 2, replacement=True)
            peak = torch.cuda.max_memory_allocated() - before
        if is_cured:
            trial.cured("at most, 16 rows at a time", "12.0005 MiB", peak)
        else:
            trial.published("the distributions", "64.0000 MiB", before)
            trial.published("at most, beside them", "192.0039 MiB", peak)


CASE = Case(
    title="To draw two samples copies the distributions three times",
    source="pytorch/pytorch#192594",
    date="2026-08-08",
    library="PyTorch",
    kind="prediction",
    version="as of August 2026",
    observed="On an A10 distributions of 64.0000 MiB take another 192.0039 MiB at most when two "
    "samples are drawn from each.",
    why="The distributions are copied, the copy is copied to be normalised, and their sums are a "
    "third of the same size. Nothing reads the first copy.",
    cure="some rows at a time",
    upstream="The issue was closed.",
    inferred=(),
    reproduce=reproduce,
    needs_torch=True,
)
