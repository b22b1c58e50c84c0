"""maskrcnn-benchmark#182: tensors that grow by four megabytes in each step."""

from bfc_tools.museum.case import Case, Trial
from bfc_tools.museum.other_pools import SplittingPool

FIGURES = (
    ("4.700 MiB", "4.875 MiB"),
    ("12.450 MiB", "12.625 MiB"),
    ("20.075 MiB", "24.125 MiB"),
    ("27.700 MiB", "39.500 MiB"),
    ("35.325 MiB", "58.625 MiB"),
    ("42.950 MiB", "81.625 MiB"),
    ("50.575 MiB", "108.375 MiB"),
    ("58.200 MiB", "139.000 MiB"),
    ("65.825 MiB", "173.375 MiB"),
    ("73.450 MiB", "211.625 MiB"),
)


def reproduce(trial: Trial) -> None:
    pool = SplittingPool(16 << 30, rounding=128 << 10, initial=1 << 20)
    today = trial.pytorch("16 GiB", "expandable_segments:True", cure=True)
    before, peak, block, tensor = 0.8252 * 2**20, 0.0, [0, 1], None
    for step, (allocated, reserved) in enumerate(FIGURES, 1):
        old, block = block, pool.allocate(4_000_000 * step)
        tensor = today.empty(4_000_000 * step)
        peak = max(peak, before + pool.used)
        say = trial.used if step == 1 else trial.published
        say(f"allocated at most, step {step}", allocated, peak)
        say(f"cached at most, step {step}", reserved, pool.total)
        if step > 1:
            pool.free(old)
    trial.cured("reserved, expandable segments, PyTorch 2.15", "120 MiB", today.peak_reserved)
    del tensor


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
