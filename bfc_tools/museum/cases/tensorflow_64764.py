"""tensorflow#64764: pinned memory that the host refuses."""

from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    pool = trial.tensorflow("1 GiB", memory_limit="128 GiB", allow_growth=True)
    trial.published("a request of 1.75 GiB", "refused", pool.refuses("1.75 GiB"))
    asked = [nbytes for _, nbytes, address in pool.device.calls if address is None]
    trial.used("asked of the host first", "2147483648", asked[0])
    trial.published("asked next", "1932735232", asked[1])


CASE = Case(
    title="When a region is refused, nine tenths of it are asked for, in single precision",
    source="tensorflow/tensorflow#64764",
    date="2024-03-29",
    library="TensorFlow",
    kind="growth",
    version="2.16",
    observed="The log of a host that runs out of pinned memory has 2,147,483,648 bytes, then "
    "1,932,735,232, and then 2,147,483,648 again.",
    why="A region that is refused is tried again at nine tenths of its size, until the request "
    "itself would not fit. The factor is a float, a little less than 0.9 (2,147,483,648 times "
    "it is 1,932,735,232), and the result is rounded up to 256.",
    cure="",
    upstream="The issue, which is about something else, was closed.",
    inferred=(
        "A request of 1.75 GiB: between the size that is tried last and nine tenths of that.",
        "The host has 1 GiB left.",
    ),
    reproduce=reproduce,
)
