"""pytorch#27600: linear layers until memory runs out, twice."""

from bfc_tools.museum.case import Case, Trial
from bfc_tools.museum.other_pools import OutOfMemoryError, SplittingPool

MIB = 2**20
BATCH, WIDTH = 100, 10_000
FREE, CONTEXT = 231 * MIB, 552 * MIB


def layers(pool: SplittingPool, kept: list[list[int]]) -> int:
    """Allocates until it is refused, and returns the number of layers."""
    try:
        while True:
            kept.append(pool.allocate(4 * BATCH * WIDTH))  # the input, which autograd keeps
            kept.append(pool.allocate(4 * WIDTH * WIDTH))
    except OutOfMemoryError:
        return len(kept) // 2


def reproduce(trial: Trial) -> None:
    pool = SplittingPool(int(7.92 * 1024) * MIB - CONTEXT, rounding=128 << 10)
    kept, again = list[list[int]](), list[list[int]]()
    trial.published("layers that fit", "19", layers(pool, kept))
    trial.published("already allocated", "7.16 GiB", pool.used + 19 * 40_448)
    trial.published("tried to allocate", "381.50 MiB", kept[1][0])
    trial.published("layers that fit the second time", "0", layers(pool, again))
    for block in kept + again:
        pool.free(block)
    trial.cured("the same, when the exception is gone", "19", layers(pool, []))


CASE = Case(
    title="After a refusal nothing fits, because the exception holds what did",
    source="pytorch/pytorch#27600",
    date="2019-10-09",
    library="PyTorch",
    kind="leaks",
    version="1.2",
    observed="On a GPU of 7.92 GiB the 20th linear layer of 10,000 by 10,000 runs out of memory "
    "with 7.16 GiB allocated. Called again, the first one does.",
    why="The traceback of the exception holds the frame of the function, and the frame its "
    "variables. They are free when the exception is gone, so a second attempt belongs behind the "
    "except clause.",
    cure="try again behind the except clause, not in it",
    upstream="The issue was closed.",
    inferred=(
        "The version, from the date and from the 381.50 MiB: sizes in steps of 128 KiB.",
        "552 MiB belong to the context: what is left of 7.92 GiB beside 231 MiB of free memory.",
        "The allocator of that time is modelled, without small blocks: they are the 452.5 KiB.",
    ),
    reproduce=reproduce,
)
