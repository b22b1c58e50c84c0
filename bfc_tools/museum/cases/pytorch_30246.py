"""pytorch#30246: all values of a matrix but those of its diagonal."""

from bfc_tools.museum.case import Case, Trial

SIDE = 20_000
PARTS = 20


def reproduce(trial: Trial) -> None:
    pool, other = trial.pytorch("12 GiB"), trial.pytorch("12 GiB", cure=True)
    matrix = [each.empty(4 * SIDE * SIDE) for each in (pool, other)]
    trial.published("the matrix", "1600126976", pool.allocated)
    diagonal = [each.empty(SIDE * SIDE) for each in (pool, other)]
    mask = [each.empty(SIDE * SIDE) for each in (pool, other)]
    del diagonal
    trial.published("at most, with the mask", "2401239040", pool.peak_allocated)
    places, result = pool.empty(16 * (SIDE * SIDE - SIDE)), pool.empty(4 * (SIDE * SIDE - SIDE))
    trial.published("at most, after x[mask]", "10001317888", pool.peak_allocated)
    for _ in range(PARTS):
        part = other.empty(16 * (SIDE * SIDE - SIDE) // PARTS)
        matrix.append(other.empty(4 * (SIDE * SIDE - SIDE) // PARTS))
        del part
    trial.cured("the same in 20 parts", "3,740 MiB", other.peak_allocated)
    del matrix, mask, places, result


CASE = Case(
    title="x[mask] takes five times the memory of what it selects",
    source="pytorch/pytorch#30246",
    date="2019-11-21",
    library="PyTorch",
    kind="rounding",
    version="1.4 nightly",
    observed="A matrix of 20,000 by 20,000 values has 1,600,126,976 bytes, with a mask it is "
    "2,401,239,040, and to select all but the diagonal takes 10,001,317,888 at most.",
    why="The mask becomes two indices of eight bytes for each selected value, four times what is "
    "selected. Each tensor has a segment of its own that is rounded up to 2 MiB, and since a rest "
    "below 1 MiB is not split off, all of it counts as allocated.",
    cure="select in parts",
    upstream="Open when it was read.",
    inferred=("What x[mask] allocates: the two indices and the result, and nothing before them.",),
    reproduce=reproduce,
)
