"""What a prediction has found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bfc.policies._caching import CachingAllocator
from bfc.predicting.devices import GPU
from bfc.predicting.memory import Memory
from bfc.suballocators.simulated import SimulatedSubAllocator
from bfc.trace import Trace
from bfc.units import parse_bytes

if TYPE_CHECKING:
    from bfc.predicting.recorder import Recorder
    from bfc.study.advice import Advice


class Prediction:
    """The memory that a program needs. `bfc.predict` makes it.

    Parameters
    ----------
    gpu : GPU
        The GPU that was assumed.
    memory : Memory
        The memory of the device, which the program uses.

    Attributes
    ----------
    gpu : GPU
        As given.
    """

    def __init__(self, gpu: GPU, memory: Memory) -> None:
        self.gpu = gpu
        self._memory = memory
        self._recorder: Recorder | None = None
        self._trace: Trace | None = None

    @property
    def peak_allocated(self) -> int:
        """The most bytes that were allocated, as `torch.cuda.max_memory_allocated()` counts.

        That is in whole blocks of the allocator: `peak_requested` is less.
        """
        self._memory.note_peaks()
        return self._memory.peak_allocated

    @property
    def peak_requested(self) -> int:
        """The most bytes that were asked for and not freed."""
        return self._memory.peak_requested

    @property
    def peak_reserved(self) -> int:
        """The most bytes taken from the device, as `torch.cuda.max_memory_reserved()` counts."""
        self._memory.note_peaks()
        return self._memory.peak_reserved

    @property
    def trace(self) -> Trace:
        """All allocations and frees, with owners (modules) and stacks."""
        if self._trace is None or len(self._trace) != len(self._memory.op):
            self._trace = self._memory.trace(None)
        return self._trace

    def fits(self, device: str | int) -> bool:
        """Whether it fits into so many bytes.

        Parameters
        ----------
        device : str or int
            Such as "24 GiB": what the GPU leaves to PyTorch.

        Returns
        -------
        bool
            Whether PyTorch, under the settings in force, serves every request.
        """
        nbytes = parse_bytes(device)
        if self.peak_reserved <= nbytes:
            return True
        allocator = CachingAllocator(SimulatedSubAllocator(nbytes), settings=self._memory.settings)
        return self.trace.replay(allocator).failed == 0

    def advise(self, device: str | int) -> Advice:
        """Find the settings that make it fit.

        Parameters
        ----------
        device : str or int
            Such as "24 GiB": what the GPU leaves to PyTorch.

        Returns
        -------
        Advice
            What `bfc.advise` says of the trace.
        """
        from bfc.study.advise import advise

        return advise(self.trace, device)

    @property
    def assumptions(self) -> list[dict[str, Any]]:
        """What was assumed: each with `what`, `where`, `value` and `times`."""
        recorder = self._recorder
        if recorder is None:
            return []
        return [
            {"what": what, "where": where, "value": value, "times": times}
            for (what, where), (value, times) in recorder.assumptions.items()
        ]
