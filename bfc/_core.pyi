from typing import final

class SharedCounter:
    """A clock of frees, shared by allocators that a device's queue orders (TensorFlow's `SharedCounter`).

    >>> import bfc
    >>> counter = bfc.SharedCounter()
    >>> counter.next(), counter.next()
    (1, 2)
    """

    def next(self) -> int:
        """The next count: 1, 2, 3, ..."""

class Growth:
    """How large the next region is, before the limit has its say: doubling from a first size (spec 2.4)."""

    def __init__(self, first_size: int) -> None: ...
    @property
    def next_region_size(self) -> int: ...

@final
class Pool:
    """Regions cut into chunks. Every method that takes a handle trusts it; the allocator checks what users pass."""
