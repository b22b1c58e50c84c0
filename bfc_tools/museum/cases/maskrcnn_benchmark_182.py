"""maskrcnn-benchmark#182: tensors that grow by four megabytes in each step."""

from bfc_tools.museum.case import Case, Trial
from bfc_tools.museum.other_pools import SplittingPool

ALLOCATED = "4.700 12.450 20.075 27.700 35.325 42.950 50.575 58.200 65.825 73.450".split()
RESERVED = "4.875 12.625 24.125 39.500 58.625 81.625 108.375 139.000 173.375 211.625".split()


def reproduce(trial: Trial) -> None:
    pool = SplittingPool(16 << 30, rounding=128 << 10, initial=1 << 20)
    before, live, peak = 0.8252 * 2**20, [], 0.0
    today = trial.pytorch("16 GiB", "expandable_segments:True", cure=True)
    for step, (allocated, reserved) in enumerate(zip(ALLOCATED, RESERVED, strict=True), 1):
        kept, live = live, [pool.allocate(4_000_000 * step), today.empty(4_000_000 * step)]
        peak = max(peak, before + pool.used)
        say = trial.used if step == 1 else trial.published
        say(f"allocated at most, step {step}", f"{allocated} MiB", peak)
        say(f"cached at most, step {step}", f"{reserved} MiB", pool.total)
        pool.free(kept[0]) if kept else None
        del kept
    trial.cured("reserved, expandable segments, PyTorch 2.15", "120 MiB", today.peak_reserved)


CASE = Case(
    title="A tensor that grows a little in each step leaves all of its predecessors behind",
    source="facebookresearch/maskrcnn-benchmark#182",
    date="2018-11-27",
    library="PyTorch",
    kind="fragmentation",
    version="1.0 nightly",
    observed="Ten tensors of 1000 by 1000 by 1 to 10 values, each in place of the last, have 73.45 "
    "MiB at most. 211.625 MiB are cached.",
    why="No cached block is large enough for the next tensor, so each gets a block of its own from "
    "the driver. The old ones are not neighbours, so they do not join.",
    cure="expandable_segments:True",
    upstream="It was an explanation, and no fault was seen.",
    inferred=(
        "0.825 MiB in a block of 1 MiB were live before: the state of the random numbers.",
        "PyTorch's allocator of 2018 is a model of it: sizes in steps of 128 KiB, and no 20 MiB.",
    ),
    reproduce=reproduce,
)
