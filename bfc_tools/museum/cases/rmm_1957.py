"""rmm#1957: a pool that has an initial size and a maximum."""

from bfc_tools.museum.case import Case, Trial
from bfc_tools.museum.other_pools import SplittingPool, rmm_growth


def reproduce(trial: Trial) -> None:
    for initial, text in ((256, "refused"), (0, "fits")):
        pool = SplittingPool(1024, rounding=256, initial=initial, grows=rmm_growth(False))
        trial.published(f"1024 bytes, initial size {initial}", text, pool.refuses(1024))
    pool = SplittingPool(1024, rounding=256, initial=256, grows=rmm_growth(False), releases=True)
    trial.published("the same, free regions given back", "fits", pool.refuses(1024), cure=True)
    ours = trial.tensorflow(1 << 20, allow_growth=True, cure=True)
    ours.allocate(256)
    trial.cured("the whole limit in BFC after 256 bytes", "fits", ours.refuses((1 << 20) - 256))


CASE = Case(
    title="A pool with an initial size cannot reach its maximum",
    source="rapidsai/rmm#1957",
    date="2025-06-11",
    library="RMM",
    kind="growth",
    version="25.08",
    observed="A pool with 256 bytes at first and 1,024 at most refuses 1,024 bytes, and one that "
    "begins empty serves them.",
    why="Each growth is an allocation of its own beside the initial one, and the two are not "
    "neighbours. The free initial region uses up a part of the maximum for ever.",
    cure="RMM with rmm#2470, or no initial size",
    upstream="rmm#2470 gives free regions back first; it was merged in July 2026.",
    inferred=(
        "The version, from the date.",
        "RMM's pool is a model of it: best fit, splits, and growth by half of what is left.",
    ),
    reproduce=reproduce,
)
