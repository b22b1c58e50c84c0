"""pytorch#198129: as many expandable segments as a process has addresses for."""

import contextlib

import bfc
from bfc_tools.museum.case import Case, Trial

GPUS = (("80 GiB", "1450"), ("192 GiB", "600"), ("288 GiB", "400"))


def reproduce(trial: Trial) -> None:
    for size, text in GPUS:
        pool = trial.pytorch(size, "expandable_segments:True")
        kept: list[bfc.Buffer] = []
        with contextlib.suppress(bfc.SubAllocatorError):  # no addresses are left
            while True:
                kept.append(pool.empty("2 MiB", stream=len(kept) + 1))
        trial.published(f"segments, GPU of {size}", text, len(kept))
        kept.clear()
    pool = trial.pytorch("80 GiB", cure=True)
    kept = [pool.empty("2 MiB", stream) for stream in range(1, 3001)]
    trial.cured("streams with default segments", "3000", len(kept))


CASE = Case(
    title="Expandable segments run out of addresses while most of the GPU is free",
    source="pytorch/pytorch#198129",
    date="2026-09-22",
    library="PyTorch",
    kind="expandable segments",
    version="as of September 2026",
    observed="Importing one segment after the other fails after some 1,450 on a GPU of 80 GiB, 600 "
    "on one of 192 and 400 on one of 288. 609 segments took 127.5 TiB of addresses while 48 GB "
    "were mapped.",
    why="Each expandable segment reserves addresses for 9/8 of the GPU, however little it maps. A "
    "process has 128 TiB of addresses, so the larger the GPU, the fewer segments fit.",
    cure="default segments",
    upstream="The pull request, which reserves only what is shared, was open when it was read.",
    inferred=(
        (
            "The segments here belong to streams, one each, and not to other processes: they "
            "reserve the same."
        ),
        "The thread rounds its counts, so they may be off by two percent.",
    ),
    reproduce=reproduce,
    within=0.02,
)
