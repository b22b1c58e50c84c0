"""modular#7145: three kinds of pages that must tile one block."""

import math

from bfc_tools.museum.case import Case, Trial

KIB = 1024
PAGES = {"attention": 3072 * KIB, "convolution": 648 * KIB, "recurrent": 9216 * KIB}


def reproduce(trial: Trial) -> None:
    trial.used("page of attention", "3.00 MiB", PAGES["attention"])
    trial.used("page of a convolution", "648.00 KiB", PAGES["convolution"])
    trial.used("page of a recurrent state", "9.00 MiB", PAGES["recurrent"])
    trial.used("budget of the workload", "51.00 MiB", 51 * KIB * KIB)
    block = math.lcm(*PAGES.values())
    trial.published("block that all three tile", "81.00 MiB", block)
    for budget in (51 * KIB * KIB, 30_870_077_440 - 2_041_330_328):
        is_cured = budget > 2**30
        pool = trial.tensorflow(budget, cure=is_cured)
        answer = pool.refuses(block)
        if is_cured:
            trial.cured("with what is free as the budget", "fits", answer)
        else:
            trial.published("within the budget", "refused", answer)


CASE = Case(
    title="A budget for a small workload is smaller than one block of its pages",
    source="modular/modular#7145",
    date="2026-09-16",
    library="MAX",
    kind="limits",
    version="nightly of September 2026",
    observed="A small model does not start with one sequence of 4,096 tokens: 51.00 MiB are too "
    "small for its pages, which need 81.00 MiB a block. The device has 25 GB free.",
    why="Pages of three sizes share blocks, and a block must be a multiple of each: 81 MiB is the "
    "least. The budget is what the workload needs, with no floor at a single block.",
    cure="a budget of at least one block, or all that is free",
    upstream="Open; a floor was proposed.",
    inferred=("What is free is the published free memory less the published static one.",),
    reproduce=reproduce,
)
