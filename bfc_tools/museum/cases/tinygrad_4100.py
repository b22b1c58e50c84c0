"""tinygrad#4100: a graph that keeps the input it was captured with."""

from bfc_tools.museum.case import Case, Trial
from bfc_tools.museum.other_pools import SplittingPool

MIB = 1 << 20
DATA = 1024 * 256 * 1024 * 4


def reproduce(trial: Trial) -> None:
    for keeps in (True, False):
        card, seen = SplittingPool(24 << 30, rounding=2 * MIB), []
        card.allocate(264 * MIB)  # the context, the kernels and the weights
        for step in (1, 2, 3):
            data, small = card.allocate(DATA), card.allocate(4)
            graph = card.allocate(4) if step == 2 else None
            seen.append(card.total)
            for block in [small] if keeps and graph else [small, data]:
                card.free(block)
            card.release()
            seen.append(card.total)
        if keeps:
            trial.used("first step, cache freed", "264 MiB", seen[1])
            trial.used("captured", "1292 MiB", seen[2])
        for what, at, text, cured in FIGURES:
            trial.published(what, text if keeps else cured, seen[at], cure=not keeps)


FIGURES = (
    ("first step", 0, "1290 MiB", "1290 MiB"),
    ("captured, cache freed", 3, "1290 MiB", "266 MiB"),
    ("third step", 4, "2316 MiB", "1292 MiB"),
    ("third step, cache freed", 5, "1290 MiB", "266 MiB"),
)

CASE = Case(
    title="A CUDA graph keeps the input of its capture, and the next input is beside it",
    source="tinygrad/tinygrad#4100",
    date="2024-04-07",
    library="tinygrad",
    kind="private pools",
    version="as of April 2024",
    observed="A step with an input of 1 GiB takes 1,290 MiB, and 264 once the cache is freed. When "
    "its kernels have been captured it takes 2,316, and freeing the cache leaves 1,290.",
    why="The captured graph refers to the input that it was captured with, although every launch "
    "names another. So that input is never free, and the next one needs new memory.",
    cure="drop the references to inputs after the capture",
    upstream="Merged.",
    inferred=(
        "The process takes 264 MiB besides, which is what is left when the cache is free.",
        "Results and the graph are small, and take the driver's 2 MiB each.",
        "The cache hands a block out again only for the same size, or a smaller one.",
    ),
    reproduce=reproduce,
)
