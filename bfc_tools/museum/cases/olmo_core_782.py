"""OLMo-core#782: where each token stands among those of its expert."""

import bfc
from bfc_tools.museum.case import Case, Trial

EXPERTS, ROUTES = 512, 8192 * 8


def reproduce(trial: Trial) -> None:
    import torch

    for is_cured in (False, True):
        with bfc.predict(device="h100"):
            expert = torch.zeros(ROUTES, device="cuda", dtype=torch.long)
            before = torch.cuda.memory_allocated()
            if is_cured:
                order = expert.argsort(stable=True)
                torch.empty_like(order).scatter_(0, order, expert)
            else:
                marks = torch.zeros((EXPERTS + 1) * ROUTES, device="cuda", dtype=torch.long)
                marks.cumsum(0)
            peak = torch.cuda.max_memory_allocated() - before
        if is_cured:
            trial.cured("at most, sorted", "3 MiB", peak)
        else:
            trial.published("at most, a matrix of marks", "512 MiB", peak)


CASE = Case(
    title="To number the tokens of each expert takes 512 MiB a block",
    source="allenai/OLMo-core#782",
    date="2026-07-18",
    library="PyTorch",
    kind="prediction",
    version="as of July 2026",
    observed="512 experts and 8,192 tokens with eight experts each take about 512 MiB of "
    "temporaries in each block, for positions alone.",
    why="A matrix has a row for each expert and a column for each route, in numbers of eight "
    "bytes, and its running sums are a second one. Nearly all of it is zero.",
    cure="sort the routes by expert",
    upstream="Merged.",
    inferred=("One row more for routes that are dropped, as the thread says.",),
    reproduce=reproduce,
    needs_torch=True,
)
