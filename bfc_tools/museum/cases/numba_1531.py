"""numba#1531: an array that is deleted, and whose memory does not come back."""

from bfc_tools.museum.case import Case, Trial
from bfc_tools.museum.other_pools import SplittingPool

FREE, ARRAY = 4_134_227_968, 900_000_000 * 4


def reproduce(trial: Trial) -> None:
    for ratio, text in (None, "0.533983232 GB"), (0.2, "4.134227968 GB"):
        device = SplittingPool(FREE, rounding=2**20)
        block = device.allocate(ARRAY)
        if ratio is None:
            trial.used("the array", "3.6 GB", ARRAY)
            trial.published("free with the array", "0.533983232 GB", FREE - device.used)
        waiting = [block]  # what is deleted waits, so that the device is not stopped for each
        if ratio is not None and sum(it[0] for it in waiting) > ratio * (FREE - device.used):
            device.free(waiting.pop())
        add = trial.published if ratio is None else trial.cured
        add("free after it was deleted", text, FREE - device.used)


CASE = Case(
    title="The memory of a deleted array does not come back, and the next array is refused",
    source="numba/numba#1531",
    date="2015-11-15",
    library="Numba",
    kind="limits",
    version="0.22",
    observed="4.134 GB of a GPU are free. An array of 3.6 GB leaves 0.533983232 GB, and so it "
    "stays after the array was deleted.",
    why="Numba does not free at once, since that would wait for the GPU: what is deleted goes "
    "into a queue that was emptied after ten arrays, whatever their size.",
    cure="a limit in bytes for the queue, or Numba on a pool of bfc",
    upstream="numba#2046 also empties the queue above a fifth of what is free, and before it "
    "refuses.",
    inferred=(
        "The version, from the date.",
        "The queue is a model of it. The device gives whole MiB.",
    ),
    reproduce=reproduce,
)
