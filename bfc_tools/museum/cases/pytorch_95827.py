"""pytorch#95827: a small pinned block between two large ones."""

from bfc_tools.museum.case import Case, Trial
from bfc_tools.museum.other_pools import SplittingPool


def reproduce(trial: Trial) -> None:
    old, today = SplittingPool(1 << 40, rounding=1, splits=False), trial.pinned()
    old.free(old.allocate(4 << 30))
    first = today.empty("4 GiB")
    del first
    kept = [today.empty(10_000), today.empty("4 GiB")]
    for size in (10_000, 4 << 30):
        old.allocate(size)
    trial.published("pinned in the end", "8 GiB", old.total)
    trial.cured("pinned in the end, PyTorch 2.15", "4.00002 GiB", today.taken)
    del kept


CASE = Case(
    title="A small pinned tensor takes the cached block of 4 GiB, and the next one needs a new "
    "block",
    source="pytorch/pytorch#95827",
    date="2023-03-01",
    library="PyTorch",
    kind="pinned memory",
    version="1.13",
    observed="4 GB are pinned and freed, then 10,000 bytes, then 4 GB again: 8 GB are pinned.",
    why="The cache handed out the smallest block that was large enough, whole, however small the "
    "request. So the small tensor held 4 GB.",
    cure="PyTorch with a list of free blocks for each size",
    upstream="The pull request, which did not cache large blocks, was closed. Today's allocator "
    "keeps a list for each power of two.",
    inferred=(
        "The pool of 1.13 is a model of it: best fit, without splits.",
        "What the thread calls GB are GiB.",
    ),
    reproduce=reproduce,
)
