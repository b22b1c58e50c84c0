"""pytorch#193400: max_split_size_mb and expandable segments together."""

from bfc_tools.museum.case import Case, Trial

BOTH = "max_split_size_mb:128,expandable_segments:True"
STEPS = ("0", "20", "40", "60", "80", "100")
ALLOCATED = ("66", "106", "146", "186", "226", "266")
RESERVED = ("220", "2,980", "5,760", "8,520", "11,300", "14,060")


def reproduce(trial: Trial) -> None:
    pools = [trial.pytorch("16 GiB", BOTH), trial.pytorch("16 GiB", stitch=True, cure=True)]
    for pool in pools:
        kept = [pool.empty("64 MiB")]
        for cycle in range(101):
            a, b = pool.empty("91 MiB"), pool.empty("45.5 MiB")
            kept.append(pool.empty("2 MiB"))
            del a, b
            if pool is pools[0] and str(cycle) in STEPS:
                at = STEPS.index(str(cycle))
                say = trial.used if cycle == 0 else trial.published
                say(f"allocated, cycle {cycle}", f"{ALLOCATED[at]} MiB", pool.allocated)
                trial.published(f"reserved, cycle {cycle}", f"{RESERVED[at]} MiB", pool.reserved)
    trial.cured("reserved after cycle 100 with stitch=True", "404 MiB", pools[1].reserved)


CASE = Case(
    title="Two settings against fragmentation, together, map new memory in every cycle",
    source="pytorch/pytorch#193400",
    date="2026-08-13",
    library="PyTorch",
    kind="fragmentation",
    version="2.12, ROCm 7.14",
    observed="With both settings the reserved memory grows by 138 MiB a cycle, to 14,060 MiB for "
    "266 MiB of tensors. Either setting alone stays below 500 MiB.",
    why="Free blocks above max_split_size are kept for large requests, and one that lies inside an "
    "expandable segment is passed over like any other. Such a block is never given back, so each "
    "cycle maps new pages behind it.",
    cure="stitch=True, or one of the two settings alone",
    upstream="The pull request that mends it was open when it was read.",
    inferred=(
        (
            "A first tensor of 64 MiB lives throughout: 66 MiB are allocated after cycle 0, of "
            "which 2 MiB are the small block."
        ),
    ),
    reproduce=reproduce,
)
