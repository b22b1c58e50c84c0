"""What the engine needs from a stream of any vendor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from bfc.copying.layout import Rows
    from bfc.copying.view import View


class CopyStream(Protocol):
    """The stream of a device that a copy is queued on: what the engine needs from both CUDA and
    OpenCL. What only one of them needs is in its own class (`CUDACopyStream`,
    `OpenCLCopyStream`)."""

    def wait_for_users(self, *views: View) -> None:
        """Makes all work queued here later wait for the work that uses the views' memory now."""

    def temporary(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> View:
        """Packed memory on the device. Raises OutOfMemoryError."""

    def release(self, view: View) -> None:
        """Frees a temporary once all that is queued here now has finished."""

    def move(self, to: View, source: View) -> None:
        """Queues a copy of bytes: both sides are contiguous, and one is on this device."""

    def move_rows(self, to: View, source: View, rows: Rows) -> bool:
        """Queues a copy of rows. False if the driver has no copy for such rows."""

    def launch(self, to: View, source: View, change: int) -> None:
        """Queues the kernel. It must be able to reach the memory of both sides."""

    def prepare(self, to: np.dtype[Any], source: np.dtype[Any]) -> bool:
        """Compiles the kernel for a cast. False if there is none, so that the host has to cast."""

    def refuse_capture(self) -> None:
        """Raises an error if a graph is being captured. Called before the host takes part in a
        copy."""

    def synchronize(self) -> None:
        """Waits for what is queued here."""

    def wait_for(self, other: Any) -> None:
        """Makes all work queued here later wait for the work queued on another stream now."""

    def keep(self, host: View) -> None:
        """Keeps the host's memory until all that is queued here now has finished."""
