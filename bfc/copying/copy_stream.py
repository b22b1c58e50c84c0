"""What the engine asks of a stream, whichever vendor's it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from bfc.copying.layout import Rows
    from bfc.copying.view import View


class CopyStream(Protocol):
    """A device, and the stream of it that a copy is queued on: all that the engine asks of either
    vendor's. What it asks of one vendor's alone, on that vendor's way, is in the class of that name
    (`CUDACopyStream`, `OpenCLCopyStream`)."""

    def wait_for_users(self, *views: View) -> None:
        """Lets what is queued here from now on wait for what uses the views' memory now."""

    def temporary(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> View:
        """Packed memory on the device. Raises OutOfMemoryError."""

    def release(self, view: View) -> None:
        """Frees a temporary after what is queued here now."""

    def move(self, to: View, source: View) -> None:
        """Queues a copy of bytes: both sides are contiguous, and one is on this device."""

    def move_rows(self, to: View, source: View, rows: Rows) -> bool:
        """Queues a copy of rows, or answers that the driver has none for these."""

    def launch(self, to: View, source: View, change: int) -> None:
        """Queues the kernel. Both sides are memory that it can reach."""

    def prepare(self, to: np.dtype[Any], source: np.dtype[Any]) -> bool:
        """Compiles the kernel for a cast. False: there is none, and the host has to cast."""

    def refuse_capture(self) -> None:
        """Raises if a graph is captured: called before the host has a part in the copy."""

    def synchronize(self) -> None:
        """Waits for what is queued here."""

    def wait_for(self, other: Any) -> None:
        """Lets what is queued here from now on wait for what is queued on another stream now."""

    def keep(self, host: View) -> None:
        """Keeps the host's memory until what is queued here now is done."""
