"""tensorflow#11915: arrays of 4 GB in pinned memory of 64 GiB."""

from collections import Counter

from bfc_tools.museum.case import Case, Trial

ARRAY = 4_000_000_000
LOG = {
    4_000_000_000: "11",
    4_294_967_296: "2",
    4_589_934_592: "1",
    5_179_869_184: "1",
    6_359_738_368: "1",
}


def reproduce(trial: Trial) -> None:
    for fraction in (1.0, 0.0):
        options = {"memory_limit": "64 GiB", "allow_growth": True}
        cure = not fraction
        pool = trial.tensorflow("1 TiB", fragmentation_fraction=fraction, cure=cure, **options)
        kept = []
        while pool.refuses(ARRAY) == "fits":
            kept.append(pool.allocate(ARRAY))
        if cure:
            trial.cured("arrays that fit, with the rests split off", "17", len(kept))
        else:
            sizes = Counter(pool.pool.allocated_size(each.ptr) for each in kept)
            for size, text in LOG.items():
                trial.published(f"chunks of {size:,} bytes", text, sizes[size])
            trial.published("InUse", "68719476736", pool.in_use)
            trial.published("MaxAllocSize", "6359738368", pool.pool.stats().largest_alloc_size)
        kept.clear()


CASE = Case(
    title="Sixteen arrays of 4 GB fill 64 GiB, where seventeen would fit",
    source="tensorflow/tensorflow#11915",
    date="2017-07-31",
    library="TensorFlow",
    kind="growth",
    version="1.x",
    observed="The log of the pinned memory has 11 chunks of 4,000,000,000 bytes, 2 of 4,294,967,296"
    " and one each of 4,589,934,592, 5,179,869,184 and 6,359,738,368: all of its 64 GiB.",
    why="Regions double from 4 to 32 GiB, and the last one is what the limit leaves. A chunk was "
    "split only if it was twice the request, so the last array of each region got all of the rest.",
    cure="the rests split off, as TensorFlow does since: from 128 MiB on",
    upstream="Open when it was read.",
    inferred=("The arrays have 4,000,000,000 bytes, and nothing else was there.",),
    reproduce=reproduce,
)
