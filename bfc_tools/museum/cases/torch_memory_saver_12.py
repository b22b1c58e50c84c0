"""torch_memory_saver#12: two tensors of a billion bytes, one of which should sleep."""

from bfc_tools.museum.case import Case, Trial

SIZE = 1_000_000_000


def reproduce(trial: Trial) -> None:
    pool = trial.pytorch("80 GiB")
    kept = [pool.empty(SIZE), pool.empty(SIZE), pool.empty(512)]
    del kept[2]  # what printing a tensor needs
    trial.published("allocated", "1908.00 MiB", pool.allocated)
    trial.published("reserved", "1910.00 MiB", pool.reserved)
    ours = trial.pytorch("80 GiB", stitch=True, cure=True)
    kept.append(ours.empty(SIZE))
    with ours.pool.tag("pauseable"):
        kept.append(ours.empty(SIZE))
    trial.cured("reserved, stitch=True", "1908.00 MiB", ours.reserved)
    ours.pool.sleep(drop=["pauseable"])
    trial.cured("reserved while it sleeps", "954.00 MiB", ours.reserved)
    ours.pool.wake()
    trial.cured("reserved when it is awake", "1908.00 MiB", ours.reserved)
    kept.clear()


CASE = Case(
    title="A tensor that was put to sleep keeps its memory, and the statistics do not tell",
    source="fzyzcjy/torch_memory_saver#12",
    date="2025-05-15",
    library="PyTorch",
    kind="sleep",
    version="as of May 2025",
    observed="Two tensors of a billion bytes, one of which can be paused: 1,908.00 MB are "
    "allocated and 1,910.00 reserved, before the pause, in it and after it.",
    why="The library that would take the pages away was not loaded, and said so in a warning only. "
    "PyTorch's statistics count addresses, so that they would have been the same if it were.",
    cure="pool.tag() and pool.sleep() of bfc, which count what is mapped",
    upstream="The pull request, an example that prints these figures, was closed.",
    inferred=(
        "A tensor has 953.7 MiB in a segment of 954, whose rest is too small to be split off.",
        "The other 2 MiB are the segment of small blocks that printing a tensor takes.",
        "What the thread calls MB are MiB.",
    ),
    reproduce=reproduce,
)
