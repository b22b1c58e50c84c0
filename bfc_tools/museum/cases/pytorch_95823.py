"""pytorch#95823: pinning half-precision values of 8.1 GiB."""

from bfc_tools.museum.case import Case, Trial

NBYTES = 4_347_592_704 * 2


def reproduce(trial: Trial) -> None:
    pool, exact = trial.pinned(), trial.pinned("pinned_max_round_threshold_mb:1024")
    kept = [pool.empty(NBYTES), exact.empty(NBYTES)]
    trial.published("growth of shared memory, 1.13.1", "16394 MiB", pool.taken)
    trial.published("growth of shared memory, 1.10.1", "8302 MiB", exact.taken, cure=True)
    del kept


CASE = Case(
    title="A pinned tensor of 8.1 GiB takes 16",
    source="pytorch/pytorch#95823",
    date="2023-03-01",
    library="PyTorch",
    kind="pinned memory",
    version="1.13.1",
    observed="Pinning 4,347,592,704 values of two bytes raises the shared memory of the host from "
    "12 to 16,406 MiB. PyTorch 1.10 raised it to 8,314.",
    why="Since 1.11 pinned blocks are rounded up to a power of two, here from 8.1 to 16 GiB. Before"
    " that they had the size that was asked for.",
    cure="pinned_max_round_threshold_mb:1024",
    upstream="The issue was closed; pytorch#150517 reports the same for smaller tensors.",
    inferred=("The other 10 MiB of shared memory are the CUDA context's, in both versions.",),
    reproduce=reproduce,
)
