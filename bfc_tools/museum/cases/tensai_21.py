"""tensai#21: attention scores in a buffer of WebGPU."""

import bfc
from bfc_tools.museum.case import Case, Trial
from bfc_tools.museum.pools import refuses

BATCH, HEADS, TOKENS = 8, 8, 1024


def reproduce(trial: Trial) -> None:
    pool = bfc.CachingAllocator(bfc.SimulatedSubAllocator("8 GiB", max_bytes="128 MiB"))
    for sequences in (BATCH, 1):
        scores = sequences * HEADS * TOKENS * TOKENS * 4
        answer = refuses(pool, scores)
        if sequences == BATCH:
            trial.published("scores of 8 sequences", "256 MiB", scores)
            trial.published("8 sequences at once", "refused", answer)
        else:
            trial.cured("scores of one sequence", "32 MiB", scores)
            trial.cured("one sequence at a time", "fits", answer)


CASE = Case(
    title="Attention of eight short sequences is too large for one buffer of a software GPU",
    source="mattn/tensai#21",
    date="2026-08-22",
    library="WebGPU",
    kind="limits",
    version="dzn and lavapipe, as of August 2026",
    observed="For 8 sequences of 1,024 tokens with 8 heads the scores have 256 MiB, and two "
    "drivers give no storage buffer of more than 128.",
    why="The scores of all heads and sequences are one buffer, and its size grows with the square "
    "of the tokens. What counts is the limit of a buffer, not how much memory is free.",
    cure="one sequence at a time, or a kernel that keeps no scores",
    upstream="Merged: a kernel with running sums keeps no scores.",
    inferred=("Scores in single precision, as the published 256 MiB show.", "8 GiB of memory."),
    reproduce=reproduce,
)
