"""Random copies, and what NumPy makes of them."""

from __future__ import annotations

import functools
import inspect
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bfc.copying import kernels

DTYPES = [np.dtype("bool") if code == "b1" else np.dtype(code) for code in kernels.CODES]
PAIRS = list(itertools.product(DTYPES, DTYPES))
CHANGES = [(False, False), (True, False), (False, True), (True, True)]


def seeds(count: int, first: int = 0) -> Callable[[Callable], Callable]:
    """Runs a test for each seed. One that fails says which: `seeds(1, first=...)` repeats it."""

    def wrap(test: Callable) -> Callable:
        @functools.wraps(test)
        def run(*args: object, **names: object) -> None:
            for seed in range(first, first + count):
                try:
                    test(*args, seed=seed, **names)
                except BaseException as error:
                    error.add_note(f"repeat it with @seeds(1, first={seed})")
                    raise

        kept = inspect.signature(test)
        run.__signature__ = kept.replace(
            parameters=[p for name, p in kept.parameters.items() if name != "seed"]
        )
        return run

    return wrap


@dataclass
class Side:
    """Items somewhere in a block of bytes."""

    block: np.ndarray
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def array(self) -> np.ndarray:
        return np.ndarray(self.shape, self.dtype, self.block, self.offset, self.strides)

    def twin(self) -> Side:
        return Side(self.block.copy(), self.dtype, self.shape, self.strides, self.offset)


@dataclass
class Case:
    """One copy. `seed` makes it again."""

    seed: str
    to: Side
    source: Side
    conj: bool
    neg: bool

    @property
    def expected(self) -> np.ndarray:
        """The destination's whole block afterwards."""
        wanted = self.to.twin()
        put(wanted.array, self.source.array, self.conj, self.neg)
        return wanted.block

    def check(self, block: np.ndarray, label: object = "") -> None:
        assert same(self.to, block, self.expected), (
            f"case({self.seed!r}) {label}: {self.source.dtype} {self.source.shape} "
            f"{self.source.strides} to {self.to.dtype} {self.to.shape} {self.to.strides}, "
            f"conj={self.conj}, neg={self.neg}"
        )


def put(to: np.ndarray, source: np.ndarray, conj: bool, neg: bool) -> None:
    """What a copy is, in NumPy's words."""
    with np.errstate(all="ignore"):
        source = np.conjugate(source) if conj and source.dtype.kind == "c" else source
        source = np.negative(source) if neg else source
        source = source.real if source.dtype.kind == "c" and to.dtype.kind in "iuf" else source
        np.copyto(to, source, casting="unsafe")


def same(side: Side, block: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether two blocks are the same bytes, but that any NaN is as good as another."""
    if block.tobytes() == wanted.tobytes():
        return True
    if side.dtype.kind not in "fc":
        return False
    views = []
    for bytes_ in (block, wanted):
        kept = bytes_.copy()
        array = np.ndarray(side.shape, side.dtype, kept, side.offset, side.strides)
        for part in (array.real, array.imag) if side.dtype.kind == "c" else (array,):
            part[np.isnan(part)] = 0
        views.append(kept.tobytes())
    return views[0] == views[1]


def values(
    dtype: np.dtype, to: np.dtype, count: int, dice: np.random.Generator, neg: bool = False
) -> np.ndarray:
    """Items of any bits, but none that C would leave undefined: a float that the destination's
    integers cannot hold."""
    raw = dice.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    if dtype.kind == "b":
        return (raw & 1).view(bool)
    if dtype.kind in "iu" or to.kind not in "iu":
        array = raw.view(dtype)
        if dtype.kind in "fc" and count:
            edges = [0.0, -0.0, 1.5, 65504, 65520, 2**-24, 2**-25, 3 * 2**-25, np.inf, np.nan]
            some = dice.integers(0, count, max(count // 4, 1))
            with np.errstate(all="ignore"):
                array[some] = dice.choice(edges, len(some)).astype(dtype)
        return array
    info = np.iinfo(to)
    low, high = max(info.min, -1000), min(info.max, 1000)
    real = dice.uniform(low, high, count).astype(np.float32)
    real = np.clip(real if dtype.itemsize > 2 else real.astype(dtype), low, high)
    real = -real if neg else real
    if dtype.kind == "c":
        return (real + 1j * dice.uniform(-9, 9, count)).astype(dtype)
    return real.astype(dtype)


def place(
    shape: tuple[int, ...], dtype: np.dtype, rng: random.Random, aligned: bool = True
) -> tuple[tuple[int, ...], int, int]:
    """(strides, offset, bytes in all) of a random place for a shape: axes in any order, gaps,
    backwards; now and then row by row."""
    order = list(range(len(shape)))
    plain = rng.random() < 0.3
    if not plain:
        rng.shuffle(order)
    unit = dtype.itemsize if aligned else 1
    strides, step = [0] * len(shape), dtype.itemsize
    for axis in reversed(order):
        if not plain and rng.random() < 0.4:
            step += unit * rng.randrange(1, 4)
        strides[axis] = step
        step *= max(shape[axis], 1)
    offset = unit * rng.randrange(0, 3)
    for axis, count in enumerate(shape):
        if not plain and rng.random() < 0.3:
            offset += (count - 1) * strides[axis] if count else 0
            strides[axis] = -strides[axis]
    return tuple(strides), offset, step + offset + 16


def case(seed: str, source: np.dtype | None = None, to: np.dtype | None = None,
         change: tuple[bool, bool] | None = None, aligned: bool = True) -> Case:  # fmt: skip
    """The copy that a seed stands for."""
    rng, dice = random.Random(seed), np.random.default_rng(list(seed.encode()))
    source = source or rng.choice(DTYPES)
    to = to or (source if rng.random() < 0.4 else rng.choice(DTYPES))
    conj, neg = change or rng.choice(CHANGES)
    neg = neg and source.kind != "b"
    shape = tuple(rng.choice((1, 2, 3, 5, 8)) for _ in range(rng.randrange(0, 6)))
    given = tuple(1 if rng.random() < 0.15 else count for count in shape)
    given = given[rng.randrange(0, len(shape) + 1) if rng.random() < 0.15 else 0 :]
    sides = []
    for dtype, extent in ((source, given), (to, shape)):
        strides, offset, nbytes = place(extent, dtype, rng, aligned)
        nbytes = -(-nbytes // 16) * 16 + 64
        if dtype is source and len(sides) == 0:
            count = nbytes // dtype.itemsize + 1
            block = values(dtype, to, count, dice, neg).view(np.uint8)[:nbytes].copy()
            side = Side(block, dtype, extent, strides, offset)
            if not aligned:  # the bits between items may be any, those of items may not
                side.array[...] = values(dtype, to, side.array.size, dice, neg).reshape(extent)
        else:
            block = dice.integers(0, 256, nbytes, dtype=np.uint8)
            side = Side(block, dtype, extent, strides, offset)
        sides.append(side)
    return Case(seed, sides[1], sides[0], conj, neg)


def switched(to: str) -> str:
    """One kernel with every conversion to a dtype, which compiles faster than one for each."""
    cases = "".join(
        f"case {number}: {{\n{kernels.conversion(source, to)}\nbreak; }}\n"
        for number, source in enumerate(kernels.CODES)
    )
    return kernels.BODY.substitute(name=f"to_{to}", convert=f"switch (change >> 8) {{\n{cases}}}")
