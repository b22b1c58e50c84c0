"""Pictures of pages with 256 colours, which take a third of the room."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def with_palette(picture: bytes) -> bytes:
    """A PNG of true colours as one with a palette: for each pixel the nearest colour of it."""
    pixels = read(picture)[:, :, :3]
    height, width, _ = pixels.shape
    colours, numbers = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True)
    palette = chosen(colours, np.bincount(numbers.reshape(-1))).astype(np.int32)
    nearest = np.concatenate(
        [
            ((part[:, None, :].astype(np.int32) - palette[None]) ** 2).sum(2).argmin(1)
            for part in np.array_split(colours, max(1, len(colours) // 4096))
        ]
    )
    rows = nearest[numbers.reshape(height, width)].astype(np.uint8)
    lines = np.zeros((height, width + 1), np.uint8)  # each begins with its filter: none
    lines[:, 1:] = rows
    return b"".join(
        [
            SIGNATURE,
            chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
            chunk(b"PLTE", palette.astype(np.uint8).tobytes()),
            chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)),
            chunk(b"IEND", b""),
        ]
    )


def chosen(colours: NDArray[np.uint8], counts: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The 96 most frequent colours; then of the most frequent kinds of others one each, so that a
    colour that stands in few places is not lost."""
    order = np.argsort(-counts, kind="stable")
    kinds = (colours[order] >> 4).astype(np.int32) @ [256, 16, 1]
    kinds[:96] = -1 - np.arange(len(kinds[:96]))
    _, first, inverse = np.unique(kinds, return_index=True, return_inverse=True)
    weight = np.bincount(inverse.reshape(-1), weights=counts[order])
    weight[first < 96] = np.inf
    return colours[order[first[np.argsort(-weight, kind="stable")[:256]]]]


def read_palette(picture: bytes) -> NDArray[np.uint8]:
    """The colours of a picture that `with_palette` has made."""
    at = picture.index(b"PLTE")
    (length,) = struct.unpack(">I", picture[at - 4 : at])
    return np.frombuffer(picture[at + 4 : at + 4 + length], np.uint8).reshape(-1, 3)


def chunk(kind: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def read(picture: bytes) -> NDArray[np.uint8]:
    """The pixels of a PNG of 8 bits a channel: rows of columns of channels."""
    assert picture.startswith(SIGNATURE)
    at, data = len(SIGNATURE), b""
    width = height = channels = 0
    while at < len(picture):
        length, kind = struct.unpack(">I4s", picture[at : at + 8])
        content = picture[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colours = struct.unpack(">IIBB", content[:10])
            channels = {2: 3, 6: 4}[colours]
            assert depth == 8
        elif kind == b"IDAT":
            data += content
        at += length + 12
    lines = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + width * channels)
    found = np.zeros((height + 1, width + 1, channels), np.uint8)
    for row, line in enumerate(lines, 1):
        unfilter(line[0], line[1:].reshape(width, channels), found[row], found[row - 1])
    return found[1:, 1:]


def unfilter(
    kind: int, line: NDArray[np.uint8], row: NDArray[np.uint8], above: NDArray[np.uint8]
) -> None:
    """Puts the pixels of a line into `row`, behind one pixel of nothing."""
    if kind == 0:
        row[1:] = line
    elif kind == 1:
        row[1:] = np.cumsum(line, axis=0, dtype=np.uint8)
    elif kind == 2:
        row[1:] = line + above[1:]
    else:
        left = [0] * line.shape[1]
        before = list(left)
        for x, (values, over) in enumerate(zip(line.tolist(), above[1:].tolist(), strict=True), 1):
            guess = average if kind == 3 else paeth
            left = [
                (value + guess(*around)) & 255
                for value, around in zip(values, zip(left, over, before, strict=True), strict=True)
            ]
            before = over
            row[x] = left


def average(left: int, up: int, _: int) -> int:
    return (left + up) // 2


def paeth(left: int, up: int, before: int) -> int:
    return min((left, up, before), key=lambda value: abs(left + up - before - value))
