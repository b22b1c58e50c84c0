"""peft#1469: the weights of BERT, moved to the GPU."""

from bfc_tools.museum.case import Case, Trial

WIDTH, INNER = 768, 3_072


def reproduce(trial: Trial) -> None:
    block = [WIDTH * WIDTH, WIDTH] * 4 + [WIDTH, WIDTH]
    block += [INNER * WIDTH, INNER, WIDTH * INNER, WIDTH, WIDTH, WIDTH]
    values = [30_522 * WIDTH, 512 * WIDTH, 2 * WIDTH, WIDTH, WIDTH]
    values += block * 12 + [WIDTH * WIDTH, WIDTH]
    for settings in ("", "expandable_segments:True"):
        pool = trial.pytorch("16 GiB", settings, cure=bool(settings))
        kept = [pool.empty(4 * count) for count in values]
        kept += [pool.empty(512 * 8) for _ in range(2)]
        if settings:
            trial.cured("reserved, expandable segments", "0.4121 GiB", pool.reserved)
        else:
            trial.published("allocated, bert-base-uncased", "0.408915520 GiB", pool.allocated)
            trial.published("reserved, bert-base-uncased", "0.460937500 GiB", pool.reserved)
        del kept


CASE = Case(
    title="To load BERT reserves 13 % more than its weights have",
    source="huggingface/peft#1469",
    date="2024",
    library="PyTorch",
    kind="fragmentation",
    version="2.1",
    observed="Moving bert-base-uncased to the GPU allocates 0.408915520 GB and reserves 0.460937500"
    " GB.",
    why="Requests of 1 to 10 MiB share segments of 20 MiB, and weights of 9 and 2.25 MiB do not "
    "fill them. The end of the largest segment, below 1 MiB, is not split off and counts as "
    "allocated.",
    cure="expandable_segments:True",
    upstream="The issue is about another question and was closed.",
    inferred=(
        "Twelve layers of width 768 and the order of their weights: BERT's own.",
        "Two buffers of 512 numbers of eight bytes: positions and types.",
        "The year, from the number of the thread, and the version from the year.",
        "What the thread calls GB are GiB.",
    ),
    reproduce=reproduce,
)
