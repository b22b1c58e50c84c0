"""rmm#1664: eight blocks of 8 MiB under a limit of 64."""

from bfc_tools.museum.case import Case, Trial
from bfc_tools.museum.other_pools import SplittingPool, rmm_growth


def reproduce(trial: Trial) -> None:
    for initial, text in ((1_000_192, "refused"), (64 << 20, "fits")):
        pool = SplittingPool(64 << 20, rounding=256, initial=initial, grows=rmm_growth(False))
        answers = [pool.refuses(8 << 20) for _ in range(8)]
        last = "refused" if "refused" in answers else "fits"
        if text == "refused":
            trial.published("eight blocks, small initial size", text, last)
        else:
            trial.cured("eight blocks, initial size of 64 MiB", text, last)
    ours = trial.tensorflow("64 MiB", allow_growth=True, cure=True)
    kept = [ours.allocate("8 MiB") for _ in range(8)]
    trial.cured("blocks that fit in BFC, growing", "8", len(kept))


CASE = Case(
    title="Blocks that add up to the limit of a pool do not fit into it",
    source="rapidsai/rmm#1664",
    date="2024-08-28",
    library="RMM",
    kind="growth",
    version="24.08",
    observed="A pool with 1,000,192 bytes at first and 64 MiB at most refuses one of eight blocks "
    "of 8 MiB.",
    why="The pool grows by half of what is left, and no block may span two growths. The ends of the"
    " growths, and the initial megabyte, hold no block of 8 MiB.",
    cure="an initial size that is the maximum, or a pool whose regions join",
    upstream="The issue was closed; rmm#2470 gives free regions back first.",
    inferred=(
        "The version, from the date.",
        "RMM's pool is a model of it: best fit, splits, and growth by half of what is left.",
    ),
    reproduce=reproduce,
)
