"""pytorch#189504: a request fails once and succeeds at once when it is repeated."""

from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    for cure in (False, True):
        pool = trial.pytorch("20 MiB", strict=not cure, cure=cure)
        block, rest = pool.empty("8 MiB"), pool.empty("12 MiB")
        pool.device.hold(7)
        pool.pool.record_stream(block, 7)
        del block
        first = pool.refuses("8 MiB")
        if cure:
            trial.cured("the first request, searching again", "fits", first)
        else:
            trial.published("the first request", "refused", first)
            trial.published("the same, repeated", "fits", pool.refuses("8 MiB"))
        del rest


CASE = Case(
    title="A request fails although its block is about to be free, and fits when it is repeated",
    source="pytorch/pytorch#189504",
    date="2026-07-10",
    library="PyTorch",
    kind="streams",
    version="2.12.0",
    observed="A block whose free waits for another stream would fit a request on a full device. The"
    " request runs out of memory, and the same request succeeds right after that.",
    why="Before it gives up the allocator waits for the other stream, which brings the block back. "
    "It then asks the driver once more, and does not look at what came back.",
    cure="bfc.CachingAllocator, which searches again (search_again)",
    upstream="pytorch#191302 searches the pool again, and was open when it was read.",
    inferred=("The sizes: 8 of 20 MiB wait, and 12 are live.",),
    reproduce=reproduce,
)
