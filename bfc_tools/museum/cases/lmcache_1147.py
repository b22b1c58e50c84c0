"""LMCache#1147: a pinned buffer of 5 GiB."""

from bfc_tools.museum.case import Case, Trial

TABLE = (("4.0 GiB", "4.0 GiB"), ("4.1 GiB", "8 GiB"), ("5.0 GiB", "8 GiB"), ("8.0 GiB", "8 GiB"))


def reproduce(trial: Trial) -> None:
    for size, text in TABLE:
        pool, exact = trial.pinned(), trial.pinned("pinned_max_round_threshold_mb:1024")
        kept = [pool.empty(size), exact.empty(size)]
        trial.published(f"pinned for {size}", text, pool.taken)
        trial.cured(f"pinned for {size}, rounded up to 1 GiB only", size, exact.taken)
        del kept


CASE = Case(
    title="A cache of 5 GiB in host memory takes 8",
    source="LMCache/LMCache#1147",
    date="2025-07-25",
    library="PyTorch",
    kind="pinned memory",
    version="2.7.0",
    observed="LMCACHE_MAX_LOCAL_CPU_SIZE of 5.0, 4.1 or 8.0 takes 8 GiB, and 4.0 takes 4.",
    why="The cache is one pinned tensor, and pinned blocks are rounded up to a power of two. Memory"
    " that is allocated once and kept gains nothing from that.",
    cure="pinned_max_round_threshold_mb:1024",
    upstream="The issue was closed. PyTorch has thresholds for the rounding since 2.15.",
    inferred=(),
    reproduce=reproduce,
)
