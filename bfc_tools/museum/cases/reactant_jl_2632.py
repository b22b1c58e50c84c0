"""Reactant.jl#2632: three arrays of 27 GiB, and a fourth."""

from bfc_tools.museum.case import Case, Trial

GIB = 2**30
LIMIT = int(89.774 * GIB) // 256 * 256 + 153


def reproduce(trial: Trial) -> None:
    pool = trial.tensorflow(LIMIT, memory_limit=LIMIT)
    kept = [pool.allocate(27 * GIB) for _ in range(3)]
    trial.used("total size in pool", "89.77 GiB", pool.reserved)
    trial.used("available size", "153 B", LIMIT - pool.reserved)
    trial.published("size of the next region", "179.55 GiB", pool.pool.next_region_size)
    trial.published("InUse", "81.00 GiB", pool.in_use)
    trial.published("NumAllocs", "3", pool.pool.stats().num_allocs)
    trial.published("MaxAllocSize", "27.00 GiB", pool.pool.stats().largest_alloc_size)
    trial.published("the fourth array", "refused", pool.refuses(27 * GIB))
    del kept


CASE = Case(
    title="A copy of three arrays that fill the GPU needs room for a fourth",
    source="EnzymeAD/Reactant.jl#2632",
    date="2026-03-09",
    library="XLA",
    kind="growth",
    version="2026",
    observed="With 95 % of the GPU, a pool of 89.77 GiB holds three arrays of 27 GiB and refuses "
    "more. Its log names a next region of 179.55 GiB, twice the GPU.",
    why="The pool is one region from the beginning, and each region doubles the size that is "
    "planned for the next one, whatever is left. Three arrays leave 8.77 GiB, and the program has "
    "a fourth.",
    cure="",
    upstream="Open when it was read.",
    inferred=("The limit between the printed 89.77 GiB and the remainder of 153 bytes.",),
    reproduce=reproduce,
)
