"""rmm#601: a pool that grows by its own size, and by less if it must."""

from bfc_tools.museum.case import Case, Trial
from bfc_tools.museum.other_pools import SplittingPool


def reproduce(trial: Trial) -> None:
    for limit in 16 * 2**30, 2**40:
        tries: list[int] = []

        def grows(pool: SplittingPool, nbytes: int, tries: list[int] = tries) -> int:
            tries.append(max(nbytes, pool.total))
            while pool.total + tries[-1] > pool.limit and tries[-1] > nbytes:
                tries.append(max(nbytes, tries[-1] // 2))
            return tries[-1]

        pool = SplittingPool(limit, rounding=256, initial=15 * 10**9, grows=grows)
        pool.allocate(8 * 10**9)
        answer = pool.refuses(8 * 10**9)
        if limit == 2**40:
            trial.published("the same, managed memory", "fits", answer, cure=True)
        else:
            trial.published("another array of 8 GB", "refused", answer)
            trial.published("asked of the GPU first", "15000000000", tries[0])
            trial.published("asked next", "8000000000", tries[1])


CASE = Case(
    title="A pool of 15 GB with 7 free asks for another 15, then for 8, and gets neither",
    source="rapidsai/rmm#601",
    date="2020-10-09",
    library="RMM",
    kind="growth",
    version="0.17",
    observed="A pool of 15 GB at first cannot hold a column of a thousand million numbers: "
    "15,000,000,000 bytes are tried, then 8,000,000,000, and then it is out of memory.",
    why="A copy beside the column finds no 8 GB in the 7 that are left, and the pool must grow by "
    "a region that holds it. The GPU has less than that beside the pool, so that no smaller step "
    "can help.",
    cure="managed memory below the pool, of which there is more than the GPU has",
    upstream="Merged: without a maximum the pool grows by its size, and falls back to the request.",
    inferred=(
        "A GPU of 16 GiB, and two allocations of 8 GB.",
        "RMM's pool is a model of it: each refused step is halved, down to the request.",
        "The version, from the date.",
    ),
    reproduce=reproduce,
)
