"""What a rule of an operator is given, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bfc_tools.predicting.devices import GPU
from bfc_tools.predicting.releases import TorchRelease

if TYPE_CHECKING:
    from bfc_tools.predicting.even_choices import EvenChoices


@dataclass(frozen=True)
class Doubt:
    """Between which sizes a workspace lies that is not known, and why it is not."""

    least: int
    most: int | None  # None: nobody knows
    why: str  # a sentence, but for its capital and its full stop
    at_worst: int | None = None  # with an FFT, if that takes more than the most of all others


@dataclass(eq=False)
class Workspace:
    """An allocation that is no result of the operator."""

    nbytes: int  # nothing is allocated for 0
    #: None if it is freed when the operator returns, the last one first. Else it is allocated once
    #: for this key, and kept until the program ends.
    kept: Hashable | None = None
    what: str = "workspace"  # what it is, for the report
    doubt: Doubt | None = None  # unless the size is known


@dataclass(eq=False)
class Release:
    """A `Workspace` that was yielded before, and is freed before the operator returns."""

    workspace: Workspace


@dataclass(eq=False)
class Result:
    """One of the operator's results, which its kernel allocates now."""

    place: int


@dataclass(eq=False, slots=True)
class Call:
    """An operator that runs on the GPU."""

    func: Any
    args: tuple[Any, ...]  # the tensors among them are fake
    kwargs: dict[str, Any]
    result: Any  # what it returned; None before it has run
    gpu: GPU
    release: TorchRelease  # of PyTorch
    thread: int  # each has its own handles of cuBLAS
    stream: int  # 0 for the default one
    #: Called with (what, value), and perhaps the place of an element, it notes an assumption with
    #: the line of the program.
    assume: Callable[..., None]
    #: Called with a tensor, it returns the number that fills it, or None.
    value_of: Callable[[Any], object] = lambda tensor: None
    #: Called with a tensor, it returns how many elements are not zero, at most.
    most_of: Callable[[Any], int] = lambda tensor: int(tensor.numel())
    #: How the numbers of tensors were drawn, or chosen.
    choices: EvenChoices | None = None
    #: Operators that an answer calls inside of it count, as those of the program.
    recording: AbstractContextManager[object] = field(default_factory=nullcontext)
    deterministic: bool = False  # whether `torch.use_deterministic_algorithms` was called
    cudnn: bool = True  # `torch.backends.cudnn.enabled`
    #: Called with a tensor, it returns its numbers as a list, or None.
    numbers_of: Callable[[Any], list[Any] | None] = lambda tensor: None
    #: What a condition is taken for that is not known.
    condition: Callable[[], bool] = lambda: False

    def named(self) -> dict[str, Any]:
        """The arguments by the names in the operator's schema; defaults are not there."""
        names = (argument.name for argument in self.func._schema.arguments)
        return dict(zip(names, self.args, strict=False)) | self.kwargs


def on_cuda(value: object) -> bool:
    """Whether a value is a fake tensor on the GPU, or stands for one where a graph is made."""
    place = "device" if type(value).__name__ == "FunctionalTensor" else "fake_device"
    return getattr(getattr(value, place, None), "type", "") == "cuda"
