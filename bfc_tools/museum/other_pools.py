"""The pools of CuPy, RMM and PyOpenCL, as small models of what their documentation says."""

from __future__ import annotations

from collections.abc import Callable


class OutOfMemoryError(MemoryError):
    """The pool cannot grow by what is asked for."""


class SplittingPool:
    """Best fit with splitting and joining, from regions that a device gives: CuPy's and RMM's way.

    `grows(pool, nbytes)` says by how much the pool grows for a request; the limit holds for the
    sum of its regions. With `releases` it gives free regions back before it refuses, and without
    `splits` it hands blocks out whole.
    """

    def __init__(
        self,
        limit: int,
        *,
        rounding: int,
        initial: int = 0,
        grows: Callable[[SplittingPool, int], int] = lambda _pool, nbytes: nbytes,
        releases: bool = False,
        splits: bool = True,
    ) -> None:
        self.limit = limit
        self.rounding = rounding
        self.grows = grows
        self.releases = releases
        self.splits = splits
        #: The blocks of each region, in the order of addresses: [nbytes, whether it is free].
        self.regions: list[list[list[int]]] = [[[initial, True]]] if initial else []

    @property
    def total(self) -> int:
        """The bytes of all regions."""
        return sum(nbytes for region in self.regions for nbytes, _ in region)

    @property
    def used(self) -> int:
        return sum(nbytes for region in self.regions for nbytes, is_free in region if not is_free)

    def allocate(self, nbytes: int) -> list[int]:
        """Returns the block, for `free`."""
        size = -(-nbytes // self.rounding) * self.rounding
        found = self._best(size)
        if found is None:
            self._grow(size)
            found = self._best(size)
            assert found is not None
        region, at = found
        block = region[at]
        if self.splits and block[0] > size:
            region.insert(at + 1, [block[0] - size, True])
            block[0] = size
        block[1] = False
        return block

    def refuses(self, nbytes: int) -> str:
        """ "refused" if such a request runs out of memory, else "fits"; it stays allocated."""
        try:
            self.allocate(nbytes)
        except OutOfMemoryError:
            return "refused"
        return "fits"

    def free(self, block: list[int]) -> None:
        block[1] = True
        region = next(it for it in self.regions if any(one is block for one in it))
        at = 0
        while at + 1 < len(region):
            if region[at][1] and region[at + 1][1]:
                region[at][0] += region.pop(at + 1)[0]
            else:
                at += 1

    def release(self) -> None:
        """Gives regions back in which nothing is used."""
        self.regions = [it for it in self.regions if any(not is_free for _, is_free in it)]

    def _best(self, size: int) -> tuple[list[list[int]], int] | None:
        fitting = [
            (block[0], number, at)
            for number, region in enumerate(self.regions)
            for at, block in enumerate(region)
            if block[1] and block[0] >= size
        ]
        if not fitting:
            return None
        _, number, at = min(fitting)
        return self.regions[number], at

    def _grow(self, size: int) -> None:
        if self.releases and self.total + size > self.limit:
            self.release()
        grown = self.grows(self, size)
        if grown < size or self.total + grown > self.limit:
            raise OutOfMemoryError(f"{size} bytes do not fit: {self.total} of {self.limit} taken")
        self.regions.append([[grown, True]])


def rmm_growth(greedy: bool) -> Callable[[SplittingPool, int], int]:
    """RMM's: half of what is left below the limit. A request above that gets what it asks for;
    where the pool is `greedy`, all that is left."""

    def grows(pool: SplittingPool, nbytes: int) -> int:
        left = pool.limit - pool.total
        half = left // 2 // pool.rounding * pool.rounding
        return half if nbytes <= half else left if greedy else nbytes

    return grows


def pyopencl_size(nbytes: int, mantissa_bits: int = 2) -> int:
    """What PyOpenCL's MemoryPool asks the device for: the largest size of the request's bin. A bin
    has the sizes with the same power of two and the same leading bits below it."""
    shift = max(0, nbytes.bit_length() - 1 - mantissa_bits)
    return ((nbytes >> shift) + 1 << shift) - 1
