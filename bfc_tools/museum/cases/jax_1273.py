"""jax#1273: ten convolutions in one compiled function."""

from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    array = 2**19 * 32 * 32 * 4
    trial.used("an array", "2 GiB", array)
    pool = trial.tensorflow("16 GiB", memory_limit="14.4 GiB")
    kept = [pool.allocate(array) for _ in range(4)]  # input, two that take turns, and the result
    trial.published("at most, compiled", "8 GiB", pool.peak_in_use)
    kept.clear()
    kept = [pool.allocate(2 * array) for _ in range(3)]
    trial.published("the last of arrays of 4 GiB", "refused", pool.refuses(2 * array))
    steps = trial.tensorflow("16 GiB", memory_limit="14.4 GiB", cure=True)
    x = steps.allocate(array)
    for _ in range(10):
        x = steps.allocate(array)
    del x
    trial.published("at most, step by step", "4 GiB", steps.peak_in_use, cure=True)


CASE = Case(
    title="A compiled chain of ten convolutions holds four of its arrays at once",
    source="jax-ml/jax#1273",
    date="2019-08-30",
    library="JAX",
    kind="prediction",
    version="0.1",
    observed="Ten convolutions of an array of 2 GB in one compiled function take 8 GB at most, "
    "and of an array of 4 GB they run out of memory. Step by step they take 4 GB.",
    why="A compiled function gets room for all of its temporaries at the start: two that take "
    "turns, and the result, beside the input, which the caller keeps. Step by step the input of "
    "each step is freed when its result is there.",
    cure="step by step, or donate the input to a function that can use its memory",
    upstream="donate_argnums came; here it finds no output of the same layout.",
    inferred=(
        "The compiled function has two temporaries, its result, and the caller's input.",
        "A GPU of 16 GiB, of which JAX takes nine tenths.",
    ),
    reproduce=reproduce,
)
