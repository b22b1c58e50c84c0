"""openvino#36386: twenty-two pages in one prompt."""

import bfc
from bfc_tools.museum.case import Case, Trial
from bfc_tools.museum.pools import refuses

PAGES, LARGEST, HEADS = 22, 4_294_959_104, 32


def reproduce(trial: Trial) -> None:
    pool = bfc.CachingAllocator(bfc.SimulatedSubAllocator("32 GiB", max_bytes=LARGEST))
    tokens = PAGES * round(840 / 32) * round(1176 / 32)
    for rows in (tokens, 2048):
        asked = HEADS * rows * tokens * 2
        answer = refuses(pool, asked)
        if rows == tokens:
            trial.published("asked for", "28666553344", asked)
            trial.published("22 pages at once", "refused", answer)
        else:
            trial.cured("22 pages, 2,048 tokens at a time", "fits", answer)


CASE = Case(
    title="Twenty-two pages ask for 26.7 GiB at once, where a buffer may have 4",
    source="openvinotoolkit/openvino#36386",
    date="2026-06-12",
    library="OpenVINO",
    kind="limits",
    version="as of June 2026",
    observed="22 pages of 840 x 1,176 pixels in a prompt ask for 28,666,553,344 bytes in one "
    "buffer, and the GPU gives at most 4,294,959,104.",
    why="A page has 26 x 37 tokens of 32 x 32 pixels each, and the scores of all 21,164 against "
    "all have two bytes for each of 32 heads. The square of the tokens is asked for in one piece.",
    cure="some tokens at a time",
    upstream="Closed.",
    inferred=(
        "The buffer holds attention scores of 32 heads in half precision, as the thread suspects.",
    ),
    reproduce=reproduce,
)
