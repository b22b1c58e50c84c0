"""The sizes of PyTorch's caching policy, in bytes, for all Python code.

`native/torch_sizes.hpp` repeats those that an allocation needs; a test compares the two.
"""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30
#: Every block is a positive multiple of this.
MIN_BLOCK = 512
#: Blocks up to this lie in small segments.
MOST_SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LEAST_LARGE_SEGMENT = 11 * MIB
#: Blocks from this on get a segment of their own, a multiple of the step.
OWN_SEGMENT = 10 * MIB
SEGMENT_STEP = 2 * MIB
#: Entry i of the divisions is for sizes from 2**(20 + i) bytes on. The first entry is also for
#: smaller sizes, and the last one for larger sizes.
ENTRIES = 16

#: PyTorch's numbers are unsigned words of 64 bits, and wrap.
WORD = 1 << 64


def round_up(size: int, step: int) -> int:
    """The next multiple of a step."""
    return (size + step - 1) // step * step


def division_entry(mib: int) -> int:
    """The index of the divisions for a size in MiB."""
    return min(max(mib.bit_length() - 1, 0), ENTRIES - 1)
