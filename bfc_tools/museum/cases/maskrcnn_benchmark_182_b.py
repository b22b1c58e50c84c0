"""maskrcnn-benchmark#182, with each tensor deleted before the next."""

from bfc_tools.museum.case import Case, Trial
from bfc_tools.museum.other_pools import SplittingPool

FIGURES = (
    ("4.700 MiB", "4.875 MiB"),
    ("8.575 MiB", "12.625 MiB"),
    ("12.325 MiB", "24.125 MiB"),
    ("16.200 MiB", "39.500 MiB"),
    ("19.950 MiB", "58.625 MiB"),
    ("23.825 MiB", "81.625 MiB"),
)


def reproduce(trial: Trial) -> None:
    pool = SplittingPool(16 << 30, rounding=128 << 10, initial=1 << 20)
    today = trial.pytorch("16 GiB", "expandable_segments:True", cure=True)
    before, peak = 0.8252 * 2**20, 0.0
    for step, (allocated, cached) in enumerate(FIGURES, 1):
        block = pool.allocate(4_000_000 * step)
        peak = max(peak, before + pool.used)
        say = trial.used if step == 1 else trial.published
        say(f"allocated at most, step {step}", allocated, peak)
        say(f"cached at most, step {step}", cached, pool.total)
        pool.free(block)
        tensor = today.empty(4_000_000 * step)
        del tensor
    trial.cured("reserved, expandable segments, PyTorch 2.15", "40 MiB", today.peak_reserved)


CASE = Case(
    title="To delete each tensor before the next one lowers what is allocated, not what is cached",
    source="facebookresearch/maskrcnn-benchmark#182",
    date="2018-11-27",
    library="PyTorch",
    kind="fragmentation",
    version="1.0 nightly",
    observed="Ten tensors, each larger than the last and each deleted before the next one is made: "
    "the most that is allocated is nearly halved, and as much is cached as without the deletions.",
    why="A block that was freed is too small for the next tensor, whether it was freed before or "
    "after. So each tensor has a block of its own in either order.",
    cure="expandable_segments:True",
    upstream="It was an explanation, and no fault was seen.",
    inferred=(
        "0.825 MiB in a block of 1 MiB were live before: the state of the random numbers.",
        "PyTorch's allocator of 2018 is a model of it: sizes in steps of 128 KiB, and no 20 MiB.",
        "The text that was read ends with the sixth step.",
    ),
    reproduce=reproduce,
)
