"""vllm#32993: one pinned tensor of 257 GiB."""

from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    pool, exact = trial.pinned(), trial.pinned("pinned_max_round_threshold_mb:1024")
    kept = [pool.empty("257 GiB"), exact.empty("257 GiB")]
    trial.published("pinned for 257 GiB", "512 GiB", pool.taken)
    trial.cured("the same, rounded up to 1 GiB only", "257 GiB", exact.taken)
    del kept


CASE = Case(
    title="A model that fits into the host's memory does not fit when it is pinned",
    source="vllm-project/vllm#32993",
    date="2026-01-24",
    library="PyTorch",
    kind="pinned memory",
    version="as of January 2026",
    observed="A model that is to be offloaded runs out of memory on a host of 500 GB, although "
    "there is enough. A pinned tensor of 257 GB takes 512.",
    why="Pinned blocks are rounded up to a power of two. The worst case is a size just above one.",
    cure="pinned_max_round_threshold_mb:1024",
    upstream="The change, which pins without PyTorch's allocator, was merged.",
    inferred=("What the thread calls GB are GiB, as in its script.",),
    reproduce=reproduce,
)
