"""vllm#50094: one allocation of pinned memory, by two ways."""

from bfc_tools.museum.case import Case, Trial

TABLE = (("6 GiB", "8.00 GiB"), ("10 GiB", "16.00 GiB"), ("12 GiB", "16.00 GiB"))


def reproduce(trial: Trial) -> None:
    for size, text in TABLE:
        pool, exact = trial.pinned(), trial.pinned("pinned_max_round_threshold_mb:1024")
        kept = [pool.empty(size), exact.empty(size)]
        trial.published(f"resident, {size} pinned", text, pool.taken)
        exactly = size.replace(" ", ".00 ")
        trial.published(f"resident, {size} as they are", exactly, exact.taken, cure=True)
        del kept


CASE = Case(
    title="Ten GiB of offloaded cache take sixteen of the host, and ten when they are registered",
    source="vllm-project/vllm#50094",
    date="2026-07-28",
    library="PyTorch",
    kind="pinned memory",
    version="as of July 2026",
    observed="6, 10 and 12 GiB of pinned zeros raise the resident memory by 8, 16 and 16 GiB. "
    "Memory that is mapped first and registered then adds 6, 10 and 12.",
    why="Pinned blocks are rounded up to a power of two, so that a freed one fits more requests. "
    "Nothing ever asks for the rest of a cache that is allocated once.",
    cure="pinned_max_round_threshold_mb:1024, or memory that is registered after it was allocated",
    upstream="Merged: the cache is a shared mapping that is registered.",
    inferred=("The date, from the number.",),
    reproduce=reproduce,
)
