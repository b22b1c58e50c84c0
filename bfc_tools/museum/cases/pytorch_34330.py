"""pytorch#34330: two convolutions under no_grad."""

from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    pool, image = trial.pytorch("16 GiB"), 256 * 256 * 4
    kept = [pool.empty(size) for size in (200 * 100 * 9 * 4, 800, 200 * 200 * 9 * 4, 800)]
    kept.append(pool.empty(2 * 100 * image))
    trial.published("cached, before", "75.497472 MB", pool.reserved)
    z = pool.empty(2 * 200 * image)
    trial.published("cached, after the first layer", "180.355072 MB", pool.reserved)
    z = pool.empty(2 * 200 * image)
    trial.published("cached, after the second layer", "285.212672 MB", pool.reserved)
    pool.empty_cache()
    z = pool.empty(2 * 200 * image)
    trial.published("cached, after empty_cache and the third", "285.212672 MB", pool.reserved)
    del kept, z


CASE = Case(
    title="Under no_grad there are two copies of an intermediate result, not one",
    source="pytorch/pytorch#34330",
    date="2020-03-06",
    library="PyTorch",
    kind="leaks",
    version="1.4",
    observed="Three layers without gradients, z = layer(z), leave 285 MB cached for an input of 52 "
    "MB and one z of 105 MB.",
    why="While a layer runs, the variable still refers to its input, so input and output live side "
    "by side. The cache keeps what the first of them leaves, and the third layer takes it again.",
    cure="",
    upstream="It was explained in the thread, and no fault was seen.",
    inferred=(
        "The convolutions took no workspace.",
        "The version, from the date.",
    ),
    reproduce=reproduce,
)
