"""sglang#39021: layers of a diffusion model, pinned one by one."""

from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    pool, exact = trial.pinned(), trial.pinned("pinned_max_round_threshold_mb:1024")
    kept = [each.empty("1.20 GiB") for each in (pool, exact) for _ in range(5)]
    trial.published("five layers of 1.20 GiB", "10.01 GiB", pool.taken)
    trial.published("the same, as they are", "6.00 GiB", exact.taken, cure=True)
    kept += [pool.empty("1.20 GiB") for _ in range(34 - 5)]
    trial.published("34 layers", "68 GiB", pool.taken)
    kept.clear()


CASE = Case(
    title="Pinned layers for which 41 GiB were planned take more than the 60 of the host",
    source="sgl-project/sglang#39021",
    date="2026-09-11",
    library="PyTorch",
    kind="pinned memory",
    version="as of September 2026",
    observed="Five pinned layers of 1.20 GiB raise the process's shared memory by 10.01 GiB. With "
    "34 of 50 layers it is killed on a host of 60 GB.",
    why="Pinned blocks are rounded up to a power of two, here from 1.20 to 2 GiB. The plan counted "
    "what it asked for.",
    cure="pinned_max_round_threshold_mb:1024, or memory that is registered after it was allocated",
    upstream="Merged: layers are registered at their exact size.",
    inferred=("The 0.01 GiB above 10 are the process's own.",),
    reproduce=reproduce,
)
