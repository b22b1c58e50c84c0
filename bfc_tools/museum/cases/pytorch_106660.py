"""pytorch#106660: a threshold for collection, without a fraction."""

from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    for fraction in (None, 0.999):
        pool = trial.pytorch("10 GiB", "garbage_collection_threshold:0.5", cure=bool(fraction))
        if fraction:
            pool.pool.set_memory_fraction(fraction)
        for gigabytes in (3, 2, 1):  # the largest first, so that each block serves the next
            blocks = [pool.empty(f"{gigabytes} GiB", stream) for stream in (1, 2)]
            blocks.clear()
        kept = pool.empty("2.5 GiB", stream=3)
        if fraction:
            trial.cured("cached under a fraction of 0.999", "0 GiB", pool.cached)
        else:
            trial.published("blocks collected", "0", pool.stat("num_device_free"))
        del kept


CASE = Case(
    title="garbage_collection_threshold does nothing until a memory fraction is set",
    source="pytorch/pytorch#106660",
    date="2023-08-05",
    library="PyTorch",
    kind="limits",
    version="as of August 2023",
    observed="Without set_per_process_memory_fraction the threshold is multiplied by a limit of 0, "
    "and nothing is collected. There is no warning.",
    why="The threshold is a part of the limit that the fraction sets, and without one the step is "
    "skipped.",
    cure="torch.cuda.set_per_process_memory_fraction",
    upstream="The issue was closed; the documentation names the default now.",
    inferred=("The sizes: 6 of 10 GiB are cached when 2.5 more are asked for.",),
    reproduce=reproduce,
)
