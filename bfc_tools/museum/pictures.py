"""A map of what lay where in a pool, from its history: events to the right, addresses upward."""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import dataclass

from bfc import Trace
from bfc.libraries import np
from bfc_tools.museum.pools import BFCPool, TorchPool

COLUMNS, ROWS = 160, 64
#: The colour of memory in use, between the page's light and its dark background.
COLOUR = (0x4C, 0x8B, 0xD9)
SHADES = 16


@dataclass(frozen=True)
class Map:
    """A picture, and how many bytes of addresses it shows."""

    png: bytes
    nbytes: int

    @property
    def url(self) -> str:
        return "data:image/png;base64," + base64.b64encode(self.png).decode()


def map_of(pool: TorchPool | BFCPool | None) -> Map | None:
    """The map of a pool that recorded its history; None if nothing was allocated."""
    if pool is None:
        return None
    trace = Trace.from_snapshot(pool.pool.snapshot())
    addresses = trace.meta["torch"]["addresses"] if len(trace) else []
    if not any(addresses):
        return None
    found = trace.occupancy(addresses, columns=COLUMNS, rows=ROWS)
    shades = np.rint(found.cells.T[::-1] * (SHADES - 1)).astype(np.uint8)
    shades[(shades == 0) & (found.cells.T[::-1] > 0)] = 1
    return Map(_png(shades), sum(size for _, size in found.ranges))


def _png(shades: np.ndarray) -> bytes:
    """A picture of one colour, whose opacity is the shade."""
    height, width = shades.shape
    alphas = bytes(round(255 * shade / (SHADES - 1)) for shade in range(SHADES))
    rows = b"".join(b"\0" + row.tobytes() for row in shades)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in (
            (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
            (b"PLTE", bytes(COLOUR) * SHADES),
            (b"tRNS", alphas),
            (b"IDAT", zlib.compress(rows, 9)),
            (b"IEND", b""),
        )
    )
