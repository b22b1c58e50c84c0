"""What an H100 takes instead of what cuDNN plans without it, told by the order of the engines.

A GPU has engines of cuDNN that one which is only described has not: those that call cublasLt for
single pixels, Winograd's algorithm, and FFTs. The heuristics name engines from the one that is
thought fastest on. Convolutions are alike to them in groups: where they name the engines in the
same order, they name the missing ones at the same place, too. So an order that was seen on a GPU
tells what is first there, and `orders.json` has those in which it is not what is mostly first.

The orders are those of cuDNN 9.19 on an H100, in 20,602 convolutions of single pixels as networks
have them and 5,659 of all kinds. Those of the latter that have single pixels were left out first:
1,183 of 1,899 passes had an order that was known then, and of these 99 % were told rightly; of the
others 82 %, since they mostly run in cublasLt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from zlib import crc32

#: What `orders.json` says of an order; of one that is not there a plan is kept, or cublasLt taken.
PLANNED, WITHOUT, WINOGRAD, FOURIER = (
    *("planned", "cublasLt without workspace", "Winograd", "Fourier"),
)
#: Engines that some kernels of one group have, and others have not; and how many of the rest tell.
NOT_IN_ALL, FIRST = (0, 1, 67), 8


def of_pixels(gradient: str, half: bool, last: bool, order: Sequence[int]) -> str | None:
    """What is first for single pixels, if it is not cublasLt with a workspace: PLANNED or
    WITHOUT."""
    kind = f"{gradient}, {16 if half else 32} bits, {'pixels' if last else 'planes'}"
    return _known(kind).get(_digest(order))


def of_kernels(order: Sequence[int]) -> str | None:
    """What is first for the gradient of a larger weight in 32 bits, if it is not what is planned:
    WINOGRAD or FOURIER."""
    return _known("kernels").get(_digest([one for one in order if one not in NOT_IN_ALL][:FIRST]))


def _digest(order: Sequence[int]) -> str:
    return f"{crc32(bytes(order)) >> 8:06x}"


@cache
def _known(kind: str) -> dict[str, str]:
    """What is first, by the digest of the order."""
    text = Path(__file__).with_suffix(".json").read_text("utf-8")
    found: dict[str, str] = json.loads(text)[kind]
    return {digest: what for what, digests in found.items() for digest in digests.split()}
