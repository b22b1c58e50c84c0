"""Headers that other packages compile with. In order:

bfc_allocator.h            an allocator as a table of C functions
bfc_embed.hpp              the same for a program that is not Python's
bfc_mapping.h              a sub-allocator's calls that map memory, as C functions
bfc_torch_allocator.hpp    a c10::DeviceAllocator over it, for any back end of PyTorch
"""

from __future__ import annotations

from pathlib import Path


def get_include() -> str:
    """The folder of the headers that other packages compile with.

    Returns
    -------
    str
        A path, for `-I` and for `include_dirs`.

    Examples
    --------
    >>> import os, bfc
    >>> sorted(name for name in os.listdir(bfc.get_include()) if "torch" in name)
    ['bfc_torch_allocator.hpp']
    """
    return str(Path(__file__).parent)
