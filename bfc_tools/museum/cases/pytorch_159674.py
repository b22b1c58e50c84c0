"""pytorch#159674: a larger tensor after a smaller one, inside use_mem_pool."""

import bfc
from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    inside, outside = trial.pytorch("79 GiB"), trial.pytorch("79 GiB", cure=True)
    with bfc.use_mem_pool(bfc.MemPool(inside.pool)):
        trial.published("60 GiB in the pool", "fits", inside.refuses("60 GiB"))
        trial.published("70 GiB in the pool", "refused", inside.refuses("70 GiB"))
    trial.published("60 GiB without a pool", "fits", outside.refuses("60 GiB"), cure=True)
    trial.published("70 GiB without a pool", "fits", outside.refuses("70 GiB"), cure=True)


CASE = Case(
    title="Inside use_mem_pool memory that was freed does not make room for a larger tensor",
    source="pytorch/pytorch#159674",
    date="2025-08-01",
    library="PyTorch",
    kind="private pools",
    version="2.7",
    observed="On a GPU of 80 GiB, 60 GiB are allocated and freed, and 70 GiB then run out of memory"
    " inside a MemPool. Without the pool both fit.",
    why="The step that gives cached segments back and tries again is left out while a pool is in "
    "use. So the 60 GiB stay in the pool, and 70 more are asked of the driver.",
    cure="no pool, or empty_cache() between the two",
    upstream="Open when it was read.",
    inferred=(
        "A GPU of 80 GiB leaves 79 to PyTorch.",
        "The version, from the date.",
    ),
    reproduce=reproduce,
)
