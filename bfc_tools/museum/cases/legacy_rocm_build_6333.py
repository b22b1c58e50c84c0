"""legacy-rocm-build#6333: large buffers of another size in each micro-batch."""

from bfc_tools.museum.case import Case, Trial

TOKENS = (14_000, 17_000, 19_000, 20_480, 14_000, 14_500)
RESERVED = {1: "16.312 GiB", 2: "21.691 GiB", 3: "27.488 GiB"}


def reproduce(trial: Trial) -> None:
    pool = trial.pytorch("192 GiB")
    other = trial.pytorch("192 GiB", "expandable_segments:True", cure=True)
    for micro, tokens in enumerate(TOKENS):
        for each in (other, pool):
            live = [each.empty(tokens * 151_936 * 2)]
            reserved, cached = each.reserved, each.cached
            live += [each.empty("4 GiB", stream=1), each.empty("3602 MiB", stream=2)]
            live += [each.empty("9 MiB", stream=2) for _ in range(2)]
            split = each.stat("inactive_split_bytes.large_pool.current")
            del live
        if micro in RESERVED:
            trial.published(f"reserved, micro-batch {micro}", RESERVED[micro], reserved)
        if micro == 1:
            trial.published("cached, micro-batch 1", "11.501 GiB", cached)
    trial.published("inactive splits, micro-batch 5", "0.711 GiB", split)
    trial.used("allocated at most", "13.332 GiB", pool.peak_allocated)
    trial.cured("reserved at most, expandable segments", "13.340 GiB", other.peak_reserved)


CASE = Case(
    title="Buffers that change their size in each step leave one segment behind for each size",
    source="ROCm/legacy-rocm-build#6333",
    date="2026",
    library="PyTorch",
    kind="fragmentation",
    version="ROCm",
    observed="27.488 GiB are reserved for at most 13.332 GiB of tensors, and stay so when all of "
    "them are freed.",
    why="A request that is larger than every cached block takes a segment of its own, and the "
    "cached ones stay. Three micro-batches that each need more logits than the last leave three "
    "segments behind, and only memory pressure or empty_cache() gives them back.",
    cure="expandable_segments:True",
    upstream="Open when it was read.",
    inferred=(
        "The logits have 151,936 columns of two bytes: 4.811 GiB for 17,000 tokens.",
        (
            "The buffers on the other two streams have 7,716 MiB in segments of 7,718: the peak "
            "less the logits, and what the first micro-batch leaves reserved. How they divide is "
            "assumed."
        ),
        "The year: the text that was read has no date.",
        "The first and the fifth micro-batch have 14,000 tokens, and six are enough.",
    ),
    reproduce=reproduce,
)
