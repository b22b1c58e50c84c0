from typing import final

class SharedCounter:
    """A counter of frees that several allocators share (TensorFlow's `SharedCounter`).

    `BFCAllocator.set_timing_counter` gives each free its next count. `allocate_raw(freed_before=...)`
    then uses no memory that was freed at a later count, and `BFCAllocator.set_safe_frontier` says which
    count the device has reached.

    Examples
    --------
    >>> import bfc
    >>> counter = bfc.SharedCounter()
    >>> counter.next(), counter.next()
    (1, 2)
    """

    def next(self) -> int:
        """Count up.

        Returns
        -------
        int
            The next count: 1, 2, 3, ...
        """

@final
class Pool:
    """Regions cut into chunks. Every method that takes a handle trusts it; the allocator checks what users pass."""
