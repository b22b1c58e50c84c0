"""openvino#37501: logits of every token of a prompt on an Arc."""

import bfc
from bfc_tools.museum.case import Case, Trial
from bfc_tools.museum.pools import refuses

VOCABULARY, TOKENS, LARGEST = 202_048, 39_658, 25_055_051_776


def reproduce(trial: Trial) -> None:
    arc = bfc.SimulatedSubAllocator("24 GiB", max_bytes=LARGEST)
    pool = bfc.CachingAllocator(arc)
    for what, text, tokens in ("all tokens", "refused", TOKENS), ("the last token", "fits", 1):
        answer = refuses(pool, tokens * VOCABULARY * 4)
        if tokens == 1:
            trial.published(f"logits of {what}", "808 KB", VOCABULARY * 4, cure=True)
            trial.cured(f"logits of {what}", text, answer)
        else:
            trial.published("asked for", "32095728896", tokens * VOCABULARY * 4)
            trial.published(f"logits of {what}", text, answer)
    trial.published("keys and values", "1.97 GiB", TOKENS * 52 * 2 * 2 * 128 * 2)


CASE = Case(
    title="A prompt asks for sixteen times as much as its keys and values have, and is refused",
    source="openvinotoolkit/openvino#37501",
    date="2026-08-25",
    library="OpenVINO",
    kind="limits",
    version="2026.4, nightly",
    observed="A prompt of 39,658 tokens asks for 32,095,728,896 bytes at once, and the GPU's "
    "limit for one buffer is 25,055,051,776. The last token's logits have 808 KB, and all keys "
    "and values 1.97 GB.",
    why="The first call makes logits of four bytes for each of 202,048 words and each token of "
    "the prompt. Only the last token's are read.",
    cure="compute the logits of the last token alone",
    upstream="Open when it was read.",
    inferred=(
        "The chat's own 55 tokens are left out, which is 0.14 % of what is asked for.",
        "What the thread calls 1.97 GB are GiB: 52 layers, two heads of 128, two bytes.",
    ),
    reproduce=reproduce,
)
