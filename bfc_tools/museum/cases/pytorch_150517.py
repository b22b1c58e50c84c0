"""pytorch#150517: pinning the weights of a model, one by one."""

from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    sizes = {"129.5 MiB": 18_944 * 3_584 * 2, "112 MiB": 14_336 * 4_096 * 2}
    for text, size in sizes.items():
        trial.used("the weight", text, size)
    pools = [trial.pinned(), trial.pinned(), trial.pinned("pinned_max_round_threshold_mb:64")]
    kept = [pool.empty(sizes["129.5 MiB"]) for pool in pools[::2]]
    kept.append(pools[1].empty(sizes["112 MiB"]))
    trial.published("pinned for 129.5 MiB", "256 MiB", pools[0].taken)
    trial.cured("pinned for 112 MiB, as it is", "128 MiB", pools[1].taken)
    trial.cured("pinned for 129.5 MiB, rounded up to 64 MiB only", "129.5 MiB", pools[2].taken)
    del kept


CASE = Case(
    title="A weight just above 128 MiB takes 256 when it is pinned",
    source="pytorch/pytorch#150517",
    date="2025-04-02",
    library="PyTorch",
    kind="pinned memory",
    version="2.6",
    observed="A weight of 18,944 by 3,584 halves takes nearly twice its 129.5 MiB. One of 112 MiB "
    "takes much less.",
    why="Pinned blocks are rounded up to a power of two, and 129.5 MiB lies just above one. 112 MiB"
    " lie just below, and become 128.",
    cure="pinned_max_round_threshold_mb:64",
    upstream="Open when it was read. Thresholds for the rounding came with pytorch#171662.",
    inferred=("The version, from the date: the text that was read does not name it.",),
    reproduce=reproduce,
)
