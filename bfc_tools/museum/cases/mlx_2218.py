"""mlx#2218: a transposed convolution of a stride of 32."""

import bfc
from bfc_tools.museum.case import Case, Trial
from bfc_tools.museum.pools import refuses

IMAGES, PIXELS, CLASSES = 32, 320 * 480, 21
KERNEL, STRIDE = 64, 32


def reproduce(trial: Trial) -> None:
    limit = 77_309_411_328
    trial.used("largest buffer", "77309411328 bytes", limit)
    pool = bfc.CachingAllocator(bfc.SimulatedSubAllocator("96 GiB", max_bytes=limit))
    for taps in (KERNEL, KERNEL // STRIDE):
        is_cured = taps < KERNEL
        unfolded = IMAGES * PIXELS * taps * taps * CLASSES * 4
        answer = refuses(pool, unfolded)
        if is_cured:
            trial.cured("only the taps that meet an input", "1.65 GB", unfolded)
            trial.cured("as a buffer", "fits", answer)
        else:
            trial.published("to be allocated", "1691143372800 bytes", unfolded)
            trial.published("as a buffer", "refused", answer)


CASE = Case(
    title="A transposed convolution unfolds its input with the zeros between its pixels",
    source="ml-explore/mlx#2218",
    date="2025-05-22",
    library="MLX",
    kind="limits",
    version="as of May 2025",
    observed="Training a network that labels pixels asks for 1,691,143,372,800 bytes, where a "
    "buffer may have 77,309,411,328.",
    why="A transposed convolution of stride 32 is a convolution over an input with 31 zeros "
    "between its pixels, and each place is unfolded to all 64 by 64 taps of its kernel. Only two "
    "by two of them meet an input.",
    cure="unfold only the taps that meet an input",
    upstream="Closed.",
    inferred=(
        "32 images of 320 by 480 pixels, and 21 classes in single precision.",
        "A kernel of 64 with a stride of 32, as such networks have it.",
        "96 GiB of memory.",
    ),
    reproduce=reproduce,
)
