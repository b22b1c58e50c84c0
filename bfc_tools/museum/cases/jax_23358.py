"""jax#23358: one element set, for each of 100,000 indices at once."""

from bfc_tools.museum.case import Case, Trial

NUMBERS = 100_000


def reproduce(trial: Trial) -> None:
    pool = trial.tensorflow("40 GiB", memory_limit="30 GiB")
    kept = [pool.allocate(NUMBERS * 4) for _ in range(2)]  # the array, and the indices
    trial.published("to be allocated", "40000000000 bytes", NUMBERS * NUMBERS * 4)
    trial.published("with an index that is mapped", "refused", pool.refuses(NUMBERS * NUMBERS * 4))
    kept.clear()
    steps = trial.tensorflow("40 GiB", memory_limit="30 GiB", cure=True)
    kept = [steps.allocate(NUMBERS * 4) for _ in range(3)]  # and the results
    for _ in range(3):
        kept[3:] = [steps.allocate(NUMBERS * 4)]
    trial.cured("at most, one by one", "2 MB", steps.peak_in_use)
    kept.clear()


CASE = Case(
    title="To set one element under vmap makes a copy of the array for every index",
    source="jax-ml/jax#23358",
    date="2024-08-31",
    library="JAX",
    kind="limits",
    version="0.4.31",
    observed="An array of 100,000 numbers, of which one is set under vmap over all indices, asks "
    "for 40,000,000,000 bytes. With a constant index it works.",
    why="Each of the 100,000 results is an array of its own, and the scatter writes to all of "
    "them, so they cannot be folded into the sum. Only an update that does not depend on what is "
    "mapped stays a single array.",
    cure="jax.lax.map, which takes one index after the other",
    upstream="Open.",
    inferred=("Single precision.", "A GPU of 40 GiB, of which JAX takes three quarters."),
    reproduce=reproduce,
)
