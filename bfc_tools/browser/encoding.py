"""Arrays of numbers as short texts, for a page to unpack."""

from __future__ import annotations

import base64
import zlib
from typing import Any

from bfc.libraries import NDArray, np

#: The names of the types, as the page has them.
TYPES = {
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "int32": "i32",
    "uint64": "u64",
}


def packed(array: NDArray[Any]) -> dict[str, Any]:
    """An array of uint8, uint16, uint32, int32 or uint64 as a dict that JSON can hold, row by row.

    "type" is "u8", "u16", "u32", "i32" or "u64"; "count", how many numbers there are; "data",
    base64 of a zlib stream, which a page unpacks with `new DecompressionStream("deflate")`. In it
    the lowest bytes of all numbers stand first, then all second bytes, and so on: numbers of one
    size share their high bytes, which then take next to no room.

    >>> import base64, zlib, numpy as np
    >>> made = packed(np.array([1, 258], np.uint16))
    >>> made["type"], made["count"], zlib.decompress(base64.b64decode(made["data"])).hex()
    ('u16', 2, '01020001')
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    low_first = flat.astype(flat.dtype.newbyteorder("<"), copy=False)
    planes = low_first.view(np.uint8).reshape(len(flat), flat.itemsize).T
    data = base64.b64encode(zlib.compress(planes.tobytes(), 6)).decode("ascii")
    return {"type": TYPES[flat.dtype.name], "count": len(flat), "data": data}
