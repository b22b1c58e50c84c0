"""vllm-backport#67: pinned weights of awkward sizes."""

from bfc_tools.museum.case import Case, Trial

TABLE = (("2.25 GiB", "4.008 GiB"), ("1.125 GiB", "2.000 GiB"), ("576 MiB", "1.000 GiB"))


def reproduce(trial: Trial) -> None:
    for size, text in TABLE:
        pool, exact = trial.pinned(), trial.pinned("pinned_max_round_threshold_mb:256")
        kept = [pool.empty(size), exact.empty(size)]
        trial.published(f"pinned for {size}", text, pool.taken)
        trial.cured(f"pinned for {size}, rounded up to 256 MiB only", size, exact.taken)
        del kept


CASE = Case(
    title="Offloaded weights need 1.78 times their size in pinned memory",
    source="wtdcode/vllm-backport#67",
    date="2026-09-09",
    library="PyTorch",
    kind="pinned memory",
    version="2.13.0",
    observed="Tensor.pin_memory() of 2.250, 1.125 and 0.563 GiB adds 4.008, 2.000 and 1.000 GiB of "
    "resident memory. 146.7 GiB of experts take 260 GiB, and the process is killed.",
    why="Each pinned block is rounded up to a power of two, so that it fits other requests when it "
    "is freed. A block just above a power of two takes nearly twice its size.",
    cure="pinned_max_round_threshold_mb:256",
    upstream="The change, which pins such weights at their exact sizes, was merged.",
    inferred=("The 8 MiB that the first measurement has above 4 GiB are the process's own.",),
    reproduce=reproduce,
)
