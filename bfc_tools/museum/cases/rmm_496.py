"""rmm#496: two buffers of 8 GiB on a GPU of 32."""

from bfc_tools.museum.case import Case, Trial
from bfc_tools.museum.other_pools import SplittingPool, rmm_growth

GPU, BUFFER = 32_510 << 20, 8 << 30


def reproduce(trial: Trial) -> None:
    for greedy in (True, False):
        pool = SplittingPool(GPU, rounding=256, initial=GPU // 2, grows=rmm_growth(greedy))
        free = GPU - pool.total - (512 << 20)  # what the driver still has
        first = pool.refuses(BUFFER)
        grown = pool.grows(pool, BUFFER)
        second = "fits" if grown <= free else "refused"
        if greedy:
            trial.published("the first buffer of 8 GiB", "fits", first)
            trial.published("the second", "refused", second)
        else:
            trial.published("the second, less greedy", "fits", second, cure=True)


CASE = Case(
    title="A pool asks for all that is left of the GPU, and is refused a quarter of it",
    source="rapidsai/rmm#496",
    date="2020-08-13",
    library="RMM",
    kind="growth",
    version="0.15",
    observed="With 32,510 MiB available, the second of two buffers of 8 GiB runs out of memory.",
    why="The pool begins with half of the GPU, of which the second buffer needs a little more than "
    "is left. It then asked the driver for all of the other half, of which contexts have a part.",
    cure="RMM with rmm#498, which asks for 8 GiB then",
    upstream="rmm#498 made the growth less greedy the next day.",
    inferred=(
        "The pool begins with half of the GPU, and 512 MiB belong to the context and others.",
        "RMM's pool is a model of it: best fit, splits, and the growth that rmm#498 describes.",
    ),
    reproduce=reproduce,
)
