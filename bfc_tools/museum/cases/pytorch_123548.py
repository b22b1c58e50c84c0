"""pytorch#123548: the same two settings as in pytorch#193400, without the small block."""

from bfc_tools.museum.case import Case, Trial

SETTINGS = ("max_split_size_mb:128", "expandable_segments:True")


def reproduce(trial: Trial) -> None:
    for settings in ("", *SETTINGS, ",".join(SETTINGS)):
        pool = trial.pytorch("16 GiB", settings, cure="," not in settings)
        kept, reserved = [pool.empty("64 MiB")], []
        for _ in range(121):
            a, b = pool.empty("91 MiB"), pool.empty("45.5 MiB")
            kept.append(pool.empty("2 MiB"))
            reserved.append(pool.reserved)
            del a, b
        if "," in settings:
            trial.published("allocated at the end", "306 MiB", pool.allocated)
            trial.published("growth in a cycle", "138 MiB", (reserved[100] - reserved[0]) / 100)
        else:
            said = "below 500 MiB" if pool.peak_reserved < 500 << 20 else "more"
            what = f"reserved at most, {settings or 'defaults'}"
            trial.published(what, "below 500 MiB", said, cure=True)


CASE = Case(
    title="Each of two settings keeps the memory small, and both together do not",
    source="pytorch/pytorch#123548",
    date="2026-08-13",
    library="PyTorch",
    kind="expandable segments",
    version="2.12.0, ROCm 7.14",
    observed="With max_split_size_mb:128 and expandable_segments:True together, about 138 MiB more "
    "are reserved in each cycle. Either alone, and the defaults, stay below 500 MiB.",
    why="Either setting alone lets the freed blocks be used again: the first keeps them whole, and "
    "the second splits them. Together, blocks above the split size are passed over, and new pages "
    "are mapped behind them.",
    cure="one of the two settings",
    upstream="pytorch#193400 mends it, and was open when it was read.",
    inferred=(
        "The sizes and their order are those of pytorch#193400, which is by the same author.",
    ),
    reproduce=reproduce,
)
