"""vllm#56410: the weights of a layer of QwQ-32B in 4 bits, pinned one by one."""

from bfc_tools.museum.case import Case, Trial

HIDDEN, BETWEEN, HEADS = 5120, 27_648, 5120 + 2 * 1024
SHAPES = ((HIDDEN, HEADS), (5120, HIDDEN), (HIDDEN, 2 * BETWEEN), (BETWEEN, HIDDEN))


def reproduce(trial: Trial) -> None:
    pool, exact = trial.pinned(), trial.pinned("pinned_max_round_threshold_mb:1")
    kept = []
    for inputs, outputs in SHAPES:  # weights, a scale for 128 of them, and a zero for each scale
        for nbytes in (inputs * outputs / 2, inputs * outputs / 64, inputs * outputs / 256):
            kept += [pool.empty(nbytes), exact.empty(nbytes)]
    asked = sum(buffer.nbytes for buffer in kept) / 2
    trial.published("pinned for each byte asked", "1.86", pool.taken / asked)
    trial.cured("the same, rounded up to 1 MiB at most", "1.00", exact.taken / asked)


CASE = Case(
    title="--cpu-offload-gb takes nearly twice the memory of the host that it names",
    source="vllm-project/vllm#56410",
    date="2026-09-11",
    library="PyTorch",
    kind="pinned memory",
    version="2.13.0, CUDA 13.0",
    observed="Offloading QwQ-32B-AWQ takes 1.87 times the memory of the host that was asked for; "
    "1.86 follow from the shapes alone. The engine reports what was asked for.",
    why="Each weight is pinned by itself, and pinned blocks are rounded up to a power of two. The "
    "largest ones, of 135 and 67.5 MiB, lie just above one.",
    cure="pinned_max_round_threshold_mb:1, or VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY=1",
    upstream="Open when it was read, as is the pull request that mends it (vllm#56413).",
    inferred=(
        (
            "The shapes of a layer, from the model's public configuration: vLLM joins the three "
            "matrices of attention and the two of the gate, and AWQ has groups of 128 weights."
        ),
        "The version, from another thread of its author on the same day.",
    ),
    reproduce=reproduce,
)
