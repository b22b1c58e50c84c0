"""colibri#768: a cache in single precision, and all of it decompressed."""

from bfc_tools.museum.case import Case, Trial

LAYERS, TOKENS = 78, 262_144


def reproduce(trial: Trial) -> None:
    trial.used("context, tokens", "262144", TOKENS)
    pool = trial.tensorflow("128 GiB")
    kept = [pool.allocate(TOKENS * (LAYERS + 1) * (512 + 64) * 4)]
    cache = pool.in_use
    trial.published("cache", "47.7 GB", cache)
    kept.append(pool.allocate(TOKENS * 64 * (192 + 256) * 4))
    trial.published("decompressed keys and values", "30.1 GB", pool.in_use - cache)
    trial.published("a token", "296704 bytes", pool.in_use / TOKENS)
    kept.clear()
    cure = trial.tensorflow("128 GiB", cure=True)
    kept.append(cure.allocate(TOKENS * (LAYERS + 1) * (512 + 64) * 2))
    trial.cured("cache in half precision, read as it is", "23.9 GB", cure.in_use)
    kept.clear()


CASE = Case(
    title="A cache in single precision, beside it all of a layer decompressed: 77.8 GB",
    source="JustVugg/colibri#768",
    date="2026-08-02",
    library="colibri",
    kind="limits",
    version="as of August 2026",
    observed="At 262,144 tokens the cache takes 47.7 GB and the decompressed keys and values "
    "30.1, three times what another engine takes.",
    why="The cache has four bytes a number, where two would do. The compressed keys and values "
    "are opened for all tokens at once, with 64 heads of 448 numbers.",
    cure="half precision, and attention in the compressed space",
    upstream="Open.",
    inferred=("The context is taken from the two sizes, which agree on it.",),
    reproduce=reproduce,
)
