"""sglang#36562: a cache of routed experts in host memory, one for each GPU of a node."""

from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    pools = [trial.pinned() for _ in range(4)]
    exact = trial.pinned("pinned_max_round_threshold_mb:1024")
    kept = [pool.empty("20.4 GiB") for pool in (*pools, exact)]
    unused = sum(pool.taken for pool in pools) - sum(buffer.nbytes for buffer in kept[:4])
    trial.published("asked of the driver", str(2**35), pools[0].taken)
    trial.published("unused on a node of four GPUs", "46 GiB", unused)
    trial.published("pinned as it is", "20.4 GiB", exact.taken, cure=True)


CASE = Case(
    title="A cache of 20.4 GiB for each of four GPUs leaves 46 GiB of the host unused",
    source="sgl-project/sglang#36562",
    date="2026-08-26",
    library="PyTorch",
    kind="pinned memory",
    version="as of August 2026",
    observed="A host cache of 20.4 GiB a rank pins 32 GiB, which is exactly 2^35 bytes at the "
    "driver: 46 GB a node that nothing uses.",
    why="Pinned blocks are rounded up to a power of two. The cache grows with the tokens of the "
    "pool, and just passed 16 GiB.",
    cure="pinned_max_round_threshold_mb:1024, or memory that is registered after it was allocated",
    upstream="Merged, and ported to the main branch: the cache is mapped and registered.",
    inferred=("The 46 that the thread calls GB are GiB.",),
    reproduce=reproduce,
)
