"""What an H100 takes instead of what cuDNN plans without it, told by the order of the engines.

A GPU has engines of cuDNN that one which is only described has not: those that call cublasLt for
single pixels, Winograd's algorithm, and FFTs. The heuristics name engines from the one that is
thought fastest on. Convolutions are alike to them in groups: where they name the engines in the
same order, they name the missing ones at the same place, too. So the orders that were seen on a GPU
tell what is first there. Of an order that nobody has seen, the longest known beginning tells:
`orders.json` has those beginnings that tell something else than a shorter one.

The orders are those of cuDNN 9.19 on an H100, in 20,602 convolutions of single pixels as networks
have them, 5,659 of all kinds, and 1,115 passes of programs. With every second of the first in the
table, of the 30,900 passes of the others 97.1 % were told rightly.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from zlib import crc32

#: What `orders.json` says of an order.
PLANNED, WITHOUT, CUBLAS, WINOGRAD, FOURIER = (
    *("planned", "cublasLt without workspace", "cublasLt", "Winograd", "Fourier"),
)
#: So many engines are the beginning of an order of single pixels, and all of them.
BEGINNINGS = (24, 20, 17, 14, 12, 10, 8, 6, 5, 4)
#: Engines that some kernels of one group have, and others have not; and how many of the rest tell.
NOT_IN_ALL, FIRST = (0, 1, 67), 8


def of_pixels(gradient: str, half: bool, last: bool, order: Sequence[int]) -> str:
    """What is first for single pixels: PLANNED, WITHOUT or CUBLAS."""
    known = _known()[f"{gradient}, {16 if half else 32} bits, {'pixels' if last else 'planes'}"]
    lengths = (len(order), *(length for length in BEGINNINGS if length < len(order)))
    told = (known.get(_digest(order[:length])) for length in lengths)
    return next((one for one in told if one is not None), CUBLAS)


def of_kernels(order: Sequence[int]) -> str | None:
    """What is first for the gradient of a larger weight in 32 bits, if it is not what is planned:
    WINOGRAD or FOURIER."""
    return _known()["kernels"].get(_digest([one for one in order if one not in NOT_IN_ALL][:FIRST]))


def _digest(order: Sequence[int]) -> str:
    """Engines whose numbers are no bytes are alike: no order that is known has one."""
    return f"{crc32(bytes(min(one, 255) for one in order)) >> 8:06x}"


@cache
def _known() -> dict[str, dict[str, str]]:
    """What is first of each kind, by the digest of the order."""
    table = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
    return {
        kind: {digest: what for what, digests in found.items() for digest in digests.split()}
        for kind, found in table.items()
    }
