"""TensorRT-LLM#19051: a workspace that a burst has made large."""

from bfc_tools.museum.case import Case, Trial

BURST, BATCH = "102.581 GiB", "48.134 GiB"
GIB = 2**30


def reproduce(trial: Trial) -> None:
    for is_cured in (False, True):
        pool = trial.pytorch("140 GiB", cure=is_cured)
        workspace = [pool.empty("19.5 GiB")]
        burst = pool.empty((102.581 - 19.5) * GIB)
        trial.used("allocated at most, burst", BURST, pool.peak_allocated)
        reserved = pool.reserved
        del burst
        if is_cured:
            workspace.pop()  # short requests come, and it shrinks
            workspace.append(pool.empty("0.844 GiB"))
        batch = pool.empty((48.134 - 19.5) * GIB)
        if is_cured:
            trial.published("allocated, largest batch", "29.478 GiB", pool.allocated, cure=True)
            trial.published("less is reserved", "0 GiB", reserved - pool.reserved, cure=True)
        else:
            trial.used("allocated, largest batch", BATCH, pool.allocated)
        del batch


CASE = Case(
    title="A workspace that was enlarged once stays large, and to shrink it gives nothing back",
    source="NVIDIA/TensorRT-LLM#19051",
    date="2026-09",
    library="PyTorch",
    kind="growth",
    version="as of September 2026",
    observed="512 requests at once enlarge the workspace of the attention to 19.5 GiB. If it "
    "shrinks to 0.844 GiB afterwards, the largest batch takes 29.478 GiB in place of 48.134, and "
    "no less is reserved.",
    why="The workspace is a tensor that only grows, so it counts until the program ends. What it "
    "gives up stays in the allocator's cache, where other tensors find it.",
    cure="make the workspace anew when what is asked of it has become small",
    upstream="Merged.",
    inferred=(
        "Beside the workspace there is one block in the burst and one in the batch.",
        "The GPU has 140 GiB.",
    ),
    reproduce=reproduce,
)
