"""pytorch#60150: a tensor of 4000 by 4000 values, deleted."""

from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    pool = trial.pytorch("16 GiB")
    tensor = pool.empty(4000 * 4000 * 4)
    held = pool.reserved
    del tensor
    pool.empty_cache()
    trial.published("given back by empty_cache", "62 MiB", held - pool.reserved)
    trial.published("left to PyTorch's allocator", "0", pool.reserved)


CASE = Case(
    title="After empty_cache nvidia-smi still shows 1,105 MiB, none of which are PyTorch's cache",
    source="pytorch/pytorch#60150",
    date="2021-06-17",
    library="PyTorch",
    kind="leaks",
    version="1.7.1, CUDA 11.0",
    observed="With a tensor of 4000 by 4000 values nvidia-smi shows 1,167 MiB, and 1,105 when it is"
    " deleted and the cache is empty. 0 was expected.",
    why="The tensor has 61.04 MiB in a segment of 62, and these 62 went back. The rest is the CUDA "
    "context with its kernels, which lives as long as the process.",
    cure="",
    upstream="The issue was closed.",
    inferred=(
        (
            "The difference of the two published figures is what was given back, and the rest, "
            "1,105 MiB, is no tensor's."
        ),
    ),
    reproduce=reproduce,
)
