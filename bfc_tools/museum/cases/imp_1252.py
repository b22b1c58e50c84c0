"""imp#1252: two parts of a program that reserve different amounts."""

from bfc_tools.museum.case import Case, Trial

MIB = 2**20


def reproduce(trial: Trial) -> None:
    trial.used("4096 blocks", "2560 MiB", 4096 * 640 * 1024)
    block, headroom = 640 * 1024, 32_607 * MIB * 5 // 100
    trial.published("headroom of the allocator", "1630 MiB", headroom)
    left = 1264 * MIB
    pool = trial.pytorch(left)
    room = 0 if pool.refuses(headroom) == "refused" else left - headroom
    trial.published("left for keys and values", "0 MiB", room)
    trial.published("tokens", "512", max(room // block, 16) * 32)
    cure = trial.pytorch(headroom + 1241 * block, cure=True)
    trial.published("1241 blocks", "775.62 MiB", 1241 * block, cure=True)
    trial.published("tokens of 1241 blocks", "39712", 1241 * 32, cure=True)
    trial.cured("the headroom, in what is left", "fits", cure.refuses(headroom))


CASE = Case(
    title="A cache of experts leaves less than the headroom, and the context has 512 tokens",
    source="kekzl/imp#1252",
    date="2026-08-05",
    library="imp",
    kind="limits",
    version="as of August 2026",
    observed="A model loads, and every answer ends after about 476 tokens: its cache has 16 "
    "blocks, where the plan granted 4,096. With the fix it has 1,241 blocks for 39,712 tokens.",
    why="The cache of experts leaves 1,264 MiB for keys and values, from which the allocator's "
    "headroom of 1,630 is then taken. Nothing is left, and the least number of blocks is used "
    "without a word.",
    cure="reserve at least the headroom where room for keys and values is set aside",
    upstream="Merged, and the smallest cache is reported since.",
    inferred=(
        "The card has 32,607 MiB, of which the headroom is a twentieth.",
        "What is left after the fix is taken from the published 1,241 blocks.",
    ),
    reproduce=reproduce,
)
