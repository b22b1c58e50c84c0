"""mlx-vlm#1732: logits of every token of a prompt, in one buffer."""

import bfc
from bfc_tools.museum.case import Case, Trial

VOCABULARY, LARGEST = 262_144, 20_100_448_256


def reproduce(trial: Trial) -> None:
    metal = bfc.SimulatedSubAllocator("32 GiB", max_bytes=LARGEST)
    pool = bfc.CachingAllocator(metal)
    fitting, refused = 0, 24_179
    trial.published("asked for, 24,179 tokens", "25353916928", refused * VOCABULARY * 4)
    while refused - fitting > 1:
        tokens = (fitting + refused) // 2
        if pool.try_allocate(tokens * VOCABULARY * 4) is None:
            refused = tokens
        else:
            fitting = tokens
        pool.empty_cache()
    trial.published("tokens that fit, in thousands", "19", fitting / 1000)
    trial.cured("the last token's logits alone", "1 MiB", VOCABULARY * 4)


CASE = Case(
    title="A prompt of 19,000 tokens is the longest, since each token has logits of 1 MiB",
    source="Blaizzy/mlx-vlm#1732",
    date="2026-07-27",
    library="MLX",
    kind="limits",
    version="0.32.0",
    observed="Metal refuses a buffer of 25,353,916,928 bytes, since none may have more than "
    "20,100,448,256. Prompts of more than about 19,000 tokens fail, although the machine has 32 "
    "GB.",
    why="The last layer runs over the whole prompt, and makes 262,144 numbers of four bytes for "
    "each token in one buffer. One token's are used.",
    cure="compute the logits of the last token alone",
    upstream="Confirmed as a bug.",
    inferred=(
        "Nothing else has memory: the limit of one buffer comes first.",
        "Metal was asked for 0.4 MB more than the logits have.",
    ),
    reproduce=reproduce,
)
