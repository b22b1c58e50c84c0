"""cupy#7678: a second array that is larger than the first, under a limit."""

from bfc_tools.museum.case import Case, Trial
from bfc_tools.museum.other_pools import SplittingPool

FIRST, SECOND = 256 * 512 * 512 * 2 * 4, 256 * 512 * 512 * 3 * 4


def reproduce(trial: Trial) -> None:
    pool = SplittingPool(2**30, rounding=512)
    block = pool.allocate(FIRST)
    trial.published("used, first array", "536,870,912", pool.used)
    pool.free(block)
    trial.used("asked for by the second", "805,306,368", SECOND)
    trial.published("the second array", "refused", pool.refuses(SECOND))
    trial.published("used after that", "0", pool.used)
    trial.published("free after that", "536,870,912", pool.total - pool.used)
    pool.releases = True
    trial.cured("the second array, once free blocks are given back", "fits", pool.refuses(SECOND))
    ours = trial.pytorch("1 GiB", cure=True)
    trial.cured("the first array in PyTorch's allocator", "fits", ours.refuses(FIRST))
    trial.cured("the second in PyTorch's allocator", "fits", ours.refuses(SECOND))


CASE = Case(
    title="A pool below its limit refuses an array although nothing is in use",
    source="cupy/cupy#7678",
    date="2023-06-30",
    library="CuPy",
    kind="limits",
    version="12",
    observed="Under a limit of 1 GiB an array of 512 MiB is freed, and one of 768 MiB is refused. "
    "The pool says that 0 bytes are used.",
    why="The freed block stays in the pool and counts against the limit, and no block of 768 MiB "
    "fits beside it. Free blocks were given back only when the driver refused, not at the limit.",
    cure="CuPy with cupy#7679, or a pool of bfc",
    upstream="cupy#7679 mended it within days.",
    inferred=("CuPy's pool is a model of it: best fit, splits, and sizes in steps of 512 bytes.",),
    reproduce=reproduce,
)
