"""llama.cpp#12728: keys in eight bits, and a buffer of more than 2 GiB."""

import bfc
from bfc_tools.museum.case import Case, Trial
from bfc_tools.museum.pools import refuses

NUMBERS = 4096 * 60 * 128  # tokens, layers, heads
COMPUTE = {"f16": 1174 << 20, "q8_0": 2_166_360_064}


def reproduce(trial: Trial) -> None:
    pool = bfc.CachingAllocator(bfc.SimulatedSubAllocator("32 GiB", max_bytes="2 GiB"))
    keys = {"f16": NUMBERS * 192 * 2, "q8_0": NUMBERS * 192 * 34 // 32}
    values = NUMBERS * 128 * 2
    trial.published("values, f16", "7680 MiB", values)
    for kind, each, text in ("q8_0", "6120 MiB", "13800 MiB"), ("f16", "11520 MiB", "19200 MiB"):
        is_cured = kind == "f16"
        trial.published(f"keys, {kind}", each, keys[kind], cure=is_cured)
        trial.published(f"keys and values, {kind}", text, keys[kind] + values, cure=is_cured)
        answer = refuses(pool, COMPUTE[kind])
        expected = "fits" if is_cured else "refused"
        trial.published(f"what is computed in, {kind}", expected, answer, cure=is_cured)


CASE = Case(
    title="A cache of smaller numbers needs a buffer that the driver refuses",
    source="ggml-org/llama.cpp#12728",
    date="2025-04-03",
    library="llama.cpp",
    kind="limits",
    version="Vulkan, as of April 2025",
    observed="With keys in q8_0 the cache has 13,800 MiB in place of 19,200, and a buffer of "
    "2,166,360,064 bytes to compute in is refused. With keys in f16 that buffer has 1,174 MiB, "
    "and all fits.",
    why="Quantised keys are widened into the buffer in which a step is computed, which grows "
    "beyond 2 GiB. Many Vulkan drivers give no larger buffer, whatever is free.",
    cure="keys in f16",
    upstream="Closed.",
    inferred=(
        "128 heads with keys of 192 numbers and values of 128: DeepSeek-V2's, with 60 layers.",
        "32 numbers of q8_0 have 34 bytes.",
        "The limit of 2 GiB, which lies between the two buffers; 32 GiB of memory.",
    ),
    reproduce=reproduce,
)
