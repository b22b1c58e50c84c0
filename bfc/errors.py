"""Every error that bfc raises on purpose."""

from __future__ import annotations

import functools

from bfc.units import format_bytes


class OutOfMemoryError(MemoryError):
    """No chunk is large enough, and no region could be added.

    Carries the figures (bytes): `requested`, `in_use`, `reserved` (what the sub-allocator has
    given), `limit`, `largest_free`, and `fragmentation` (0 to 1; NaN where nothing is free). Its
    text is one screen long.
    """

    def __init__(
        self,
        requested: int,
        in_use: int = 0,
        reserved: int = 0,
        limit: int = 0,
        largest_free: int = 0,
        fragmentation: float = float("nan"),
        *,
        refused: str = "",
        advice: tuple[str, ...] = (),
    ) -> None:
        self.requested = requested
        self.in_use = in_use
        self.reserved = reserved
        self.limit = limit
        self.largest_free = largest_free
        self.fragmentation = fragmentation
        self.refused = refused
        self.advice = advice
        super().__init__(self._text())

    def __reduce__(self) -> tuple[object, ...]:
        figures = (
            self.requested,
            self.in_use,
            self.reserved,
            self.limit,
            self.largest_free,
            self.fragmentation,
        )
        return functools.partial(type(self), refused=self.refused, advice=self.advice), figures

    def _text(self) -> str:
        free = self.reserved - self.in_use
        limit, largest = format_bytes(self.limit), format_bytes(self.largest_free)
        lines = [
            f"out of memory: asked for {format_bytes(self.requested)} ({self.requested} bytes)",
            f"  in use        {format_bytes(self.in_use)}",
            f"  reserved      {format_bytes(self.reserved)} of a limit of {limit}",
            f"  free inside   {format_bytes(free)}, the largest block {largest}",
        ]
        if free:
            lines.append(
                f"  fragmentation {self.fragmentation:.1%} of what is free lies outside the "
                "largest block"
            )
        if self.refused:
            lines.append(f"  refused by    {self.refused}")
        lines += [f"  try: {line}" for line in self.advice]
        return "\n".join(lines)


class InvalidPointerError(ValueError):
    """An address that is no allocation of this allocator: foreign, inside a block, or freed
    already."""


class SubAllocatorError(RuntimeError):
    """A sub-allocator failed in another way than "out of memory", or broke its contract."""


class DeviceUnavailableError(RuntimeError):
    """No driver, no device, or a package is missing; the text says what to install."""


class ClosedError(RuntimeError):
    """The allocator was closed, and its memory given back."""


class InvariantError(AssertionError):
    """The bookkeeping contradicts itself: a bug in bfc. Raised by `check()` and by debug builds."""


class TraceError(ValueError):
    """A trace that cannot be read or replayed; the text names the file and the fault in one
    line."""
