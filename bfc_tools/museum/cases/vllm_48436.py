"""vllm#48436: a cache of keys and values in host memory, on two workers."""

from bfc_tools.museum.case import Case, Trial

GIB = 2**30


def reproduce(trial: Trial) -> None:
    for cache, before, after in (64, "35 GiB", "35 GiB"), (80, "67 GiB", "43 GiB"):
        pool, exact = trial.pinned(), trial.pinned("pinned_max_round_threshold_mb:1024")
        kept = [each.empty(cache * GIB // 2) for each in (pool, exact)]
        say = trial.used if cache == 64 else trial.published
        say(f"resident, {cache} GiB of cache", before, pool.taken + 3 * GIB)
        trial.published(
            f"the same, pinned as it is, {cache}", after, exact.taken + 3 * GIB, cure=True
        )
        del kept
    pool = trial.pinned()
    kept = [pool.empty(33 * GIB)]
    trial.published("pinned for 33 GiB", "64 GiB", pool.taken)
    del kept


CASE = Case(
    title="Eighty GiB of cache on two workers take 128 GiB of the host",
    source="vllm-project/vllm#48436",
    date="2026-07-12",
    library="PyTorch",
    kind="pinned memory",
    version="as of July 2026",
    observed="With --kv-offloading-size 64 each of two workers has 35 GB resident, and with 80 it "
    "has 67 in place of 43.",
    why="Each worker pins its half in one tensor, and pinned blocks are rounded up to a power of "
    "two. 32 GiB are one, and 40 become 64.",
    cure="pinned_max_round_threshold_mb:1024, or memory that is registered after it was allocated",
    upstream="The pull request, which registers memory instead, was closed.",
    inferred=(
        (
            "Each worker has 3 GiB beside the cache, as the thread says: figures that it calls GB"
            " are GiB."
        ),
    ),
    reproduce=reproduce,
)
