"""HeavyBall#9: a preconditioner of a kernel that was made flat."""

import math

from bfc_tools.museum.case import Case, Trial

KERNELS = ((32, 3, 4, 4), (64, 32, 4, 4), (128, 64, 4, 4))


def reproduce(trial: Trial) -> None:
    pool = trial.pytorch("24 GiB")
    kept = [pool.empty(math.prod(kernel) ** 2 * 4) for kernel in KERNELS[:-1]]
    asked = math.prod(KERNELS[-1]) ** 2 * 4
    trial.published("to be allocated", "64.00 GiB", asked)
    trial.published("the third kernel", "refused", pool.refuses(asked))
    kept.clear()
    cure = trial.pytorch("24 GiB", cure=True)
    kept = [cure.empty(n * n * 4) for kernel in KERNELS for n in kernel]
    trial.cured("a triangle for each dimension", "108 KiB", cure.peak_allocated)
    kept.clear()


CASE = Case(
    title="An optimizer asks for 64 GiB for a kernel of half a megabyte",
    source="HomebrewML/HeavyBall#9",
    date="2024-11-18",
    library="PyTorch",
    kind="limits",
    version="as of November 2024",
    observed="ForeachPSGDKron with four small convolutions asks for 64 GiB in its first step.",
    why="The dimensions of a kernel are merged to one before its preconditioner is made, and a "
    "dense one has a row and a column for each of 131,072 weights. A triangle for each dimension "
    "by itself needs a few kilobytes.",
    cure="do not merge the dimensions, or make long ones diagonal",
    upstream="Closed.",
    inferred=(
        "The kernels in the order of the model, the third of which asks for 64 GiB.",
        "A GPU of 24 GiB.",
    ),
    reproduce=reproduce,
)
