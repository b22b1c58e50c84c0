"""AnimaLoraStudio#511: the layers of a diffusion model that are swapped out."""

from bfc_tools.museum.case import Case, Trial

TABLE = (
    (14, "5.66 GiB", "8.31 GiB"),
    (18, "7.28 GiB", "10.69 GiB"),
    (28, "11.32 GiB", "16.63 GiB"),
)
BLOCK = ("96 MiB",) * 3 + ("36 MiB",) * 3 + ("9 MiB",) * 2
PIECES = ("8 GiB", "2 GiB", "1 GiB", "256 MiB", "64 MiB", "8 MiB")


def reproduce(trial: Trial) -> None:
    for blocks, weights, pinned in TABLE:
        pool, exact = trial.pinned(), trial.pinned("pinned_max_round_threshold_mb:1")
        kept = [each.empty(size) for each in (pool, exact) for size in BLOCK * blocks]
        say = trial.used if blocks == 28 else trial.published
        say(f"weights of {blocks} blocks", weights, exact.taken)
        trial.published(f"pinned for {blocks} blocks", pinned, pool.taken)
        trial.cured(f"pinned as they are, {blocks} blocks", weights, exact.taken)
        kept.clear()
    packed = trial.pinned()
    kept = [packed.empty(size) for size in PIECES]
    trial.published("packed into powers of two, 28 blocks", "11.32 GiB", packed.taken, cure=True)
    kept.clear()


CASE = Case(
    title="Weights of 11.3 GiB do not fit into the 16 that Windows lets a program pin",
    source="WalkingMeatAxolotl/AnimaLoraStudio#511",
    date="2026-08-19",
    library="PyTorch",
    kind="pinned memory",
    version="as of August 2026",
    observed="14, 18 and 28 swapped blocks have 5.66, 7.28 and 11.32 GB of weights, and lock 8.31, "
    "10.69 and 16.63 GB. On a host of 32 GB the last of them fails.",
    why="Each weight is pinned for itself and rounded up to a power of two: 96 MiB become 128, 36 "
    "become 64 and 9 become 16.",
    cure="pinned_max_round_threshold_mb:1, or weights packed into a few powers of two",
    upstream="Merged: the weights are packed into blocks of 8, 2 and 1 GiB, 256 and 64 MiB.",
    inferred=(
        (
            "A block has three weights of 96 MiB, three of 36 and two of 9: the thread has the "
            "sizes and the sum, and a block of this kind has three wide matrices."
        ),
        "What the thread calls GB and MB are GiB and MiB.",
    ),
    reproduce=reproduce,
)
