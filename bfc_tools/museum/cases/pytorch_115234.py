"""pytorch#115234: a snapshot with a number that a web page could not read."""

import io
import pickle
import pickletools

import bfc
from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    pool = trial.pytorch("1 GiB")
    pool.pool.record_history(context=None)
    pool.refuses("20 MiB")
    content = pool.pool.snapshot().to_torch()
    for event in content["device_traces"][0]:
        event["stream"] = -1 % 2**64
    data = pickle.dumps(content, protocol=4)
    long = [(arg, at) for op, arg, at in pickletools.genops(data) if op.name == "LONG1"]
    number, at = max((arg, at) for arg, at in long if isinstance(arg, int) and at is not None)
    trial.used("the number", "18446744073709551615", number)
    trial.published("bytes of the number", "9", data[at + 1])
    trial.cured("events that bfc reads from it", "2", len(bfc.Trace.from_torch(io.BytesIO(data))))


CASE = Case(
    title="A snapshot with a number of nine bytes cannot be opened",
    source="pytorch/pytorch#115234",
    date="2023-12-06",
    library="PyTorch",
    kind="snapshots",
    version="2.2, nightly",
    observed="The viewer of snapshots fails: a number is bigger than 8 bytes, namely 9. It is "
    "18,446,744,073,709,551,615.",
    why="A -1 of C++ was taken for a number without a sign, and Python's numbers have one: a "
    "pickle needs a ninth byte for it. The viewer's own reader of pickles stopped at eight.",
    cure="bfc report, bfc replay and the like",
    upstream="pytorch#115264 let the viewer read numbers of any length.",
    inferred=(
        "The number stands for a stream: the thread does not say for what it stood.",
        "The version, from the date.",
    ),
    reproduce=reproduce,
)
