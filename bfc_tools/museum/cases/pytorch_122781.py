"""pytorch#122781: an embedding of batches of any length."""

from bfc_tools.museum.case import Case, Trial

BATCH, WIDTH, VOCABULARY = 1024, 256, 1000
LOG = (
    (484, "506 MiB"),
    (691, "1198 MiB"),
    (805, "2004 MiB"),
    (869, "2874 MiB"),
    (832, "3706 MiB"),
    (896, "4602 MiB"),
    (925, "5528 MiB"),
    (1004, "6532 MiB"),
    (1008, "7542 MiB"),
    (1017, "8560 MiB"),
    (1020, "9580 MiB"),
    (1022, "10602 MiB"),
    (1023, "11626 MiB"),
)


def reproduce(trial: Trial) -> None:
    settings = "expandable_segments:True"
    pools = [trial.pytorch("24 GiB"), trial.pytorch("24 GiB", settings, cure=True)]
    for pool in pools:
        kept = [pool.empty(VOCABULARY * WIDTH * 4), pool.empty(512), pool.empty(512)]
        for length, text in LOG:
            if length == 1008:  # the iteration at which 2 MiB came: more small tensors
                kept.append(pool.empty(2**20))
            kept[1] = pool.empty(BATCH * length * 8)  # the last one lives until this is there
            kept[2] = pool.empty(BATCH * length * WIDTH * 4)
            if pool is pools[0]:
                say = trial.used if length in (832, 1008) else trial.published
                say(f"reserved, length {length}", text, pool.reserved)
        kept.clear()
    trial.cured("reserved, expandable segments", "2,962 MiB", pools[1].peak_reserved)


CASE = Case(
    title="Batches of at most 1,023 tokens reserve 11.6 GB for results of 1 GB each",
    source="pytorch/pytorch#122781",
    date="2024-03-27",
    library="PyTorch",
    kind="fragmentation",
    version="as of March 2024",
    observed="An embedding of batches of random length reserves 506 MB at first, and more with "
    "almost every new longest batch: 11,626 MB after 365 of them. With a fixed length it does not.",
    why="A batch that is a little longer than all before fits into none of the cached blocks, and "
    "takes a segment of its own. The shorter ones stay, and none of them will ever be used again "
    "for the longest.",
    cure="expandable_segments:True",
    upstream="The issue was closed: it is expected.",
    inferred=(
        "A batch takes a MiB for each token of its length, and the one before it is still there.",
        "The eleventh batch had 832 tokens: it grew by 832 MiB, with the longest block in use.",
        "Shorter batches between the published ones change nothing, and are left out.",
        "What the thread calls MB are MiB. 2 MiB of small blocks come at the 52nd batch.",
    ),
    reproduce=reproduce,
)
