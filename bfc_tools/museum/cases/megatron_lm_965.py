"""Megatron-LM#965: attention of two layers, step by step."""

import bfc
from bfc_tools.museum.case import Case, Trial

MIB = 2**20
SCORES = 32 * 4096 * 4096 * 2
STEPS = (
    ("after baddbmm", [SCORES]),
    ("after scale_mask_softmax", [SCORES]),
    ("after attention_dropout", [SCORES // 2, SCORES]),
    ("after context computation", [4096 * 3072 * 2]),
)
FIGURES = (
    (
        ("38707.26 MiB", "39294 MiB"),
        ("39731.26 MiB", "40318 MiB"),
        ("41267.26 MiB", "41854 MiB"),
        ("41291.26 MiB", "41854 MiB"),
    ),
    (
        ("41723.33 MiB", "42878 MiB"),
        ("42747.33 MiB", "43902 MiB"),
        ("44283.33 MiB", "44926 MiB"),
    ),
)


def reproduce(trial: Trial) -> None:
    pool = trial.pytorch("80 GiB")
    kept = [pool.empty("36658 MiB"), pool.empty(1.26 * MIB)]
    kept += [pool.empty("30 MiB") for _ in range(18)] + [pool.empty("28 MiB")]
    del kept[2:]  # what is cached at the start lies in small pieces
    kept.append(pool.empty(SCORES))  # the buffer that both layers share
    for layer in FIGURES:
        made: list[bfc.Buffer] = []
        for (what, sizes), (allocated, reserved) in zip(STEPS, layer, strict=False):
            made += [pool.empty(size) for size in sizes]
            trial.published(f"allocated, {what}", allocated, pool.allocated)
            trial.published(f"reserved, {what}", reserved, pool.reserved)
        del made[0]  # the scores; what follows takes pieces of their block
        kept += made + [pool.empty(size) for size in (128 * MIB, 64 * MIB, 240.07 * MIB)]


CASE = Case(
    title="What the attention of one layer frees is split before the next layer asks for it",
    source="NVIDIA/Megatron-LM#965",
    date="2024-08-05",
    library="PyTorch",
    kind="fragmentation",
    version="2.4",
    observed="In the first layer of 32 heads over 4,096 tokens 4,632 MB are allocated step by step,"
    " and reserved memory grows with them. In the second it grows by 3,072 MB more, although 1,155"
    " MB are cached.",
    why="Scores, their softmax, a mask and the dropout's result have a place each. The scores' "
    "block is freed after the layer and split by smaller tensors, so that the next layer's scores "
    "do not fit, and only its mask does.",
    cure="",
    upstream="Closed without a change; flash attention keeps no such matrices.",
    inferred=(
        (
            "The 587 MB that are cached at the start lie in pieces of at most 30 MB, too small "
            "for the mask."
        ),
        (
            "432.07 MiB are allocated between the two layers, from the figures at their ends, in "
            "three blocks."
        ),
        "Batch 1 with 32 heads, from the steps of 1,024 MB.",
        "The version, from the date.",
    ),
    reproduce=reproduce,
)
