"""What a rule is given, and what it returns. A rule belongs to an operator of ATen:

- `rule`: what is allocated after the results. The function is called with a `Call` once the
  operator has run, and yields a `Workspace` for each allocation, in their order.
- `before`: the same, called before the results are allocated. `call.result` is None there.
- `between`: the same with a `Result` for each result, where the kernel allocates it.
- `answer`: the function runs in place of the operator, is called with the `Call` and with a
  function that runs the operator (with other arguments, if it is given any), and returns the
  result.
- `kernel`: the function stands in for the operator's kernel: it is called with the `Call`, and
  returns the result. Rules of the operator count.
- `sparse`: the function returns what the operator does if it is given a sparse tensor. The
  operators that it calls count.
- `compressed`: the same for tensors of compressed rows or columns.
- `amend`: the function is called with what the operator returned for fake tensors, and returns what
  it returns on a GPU, before any of it counts as allocated.
- `order`: the places of an operator's results in the order in which its kernel allocates them.
- `composed`: operators that PyTorch computes by others, on every device. They are taken apart, so
  that what they make in between is seen.
- `whole`: operators that PyTorch could compose of others, and which CUDA has a kernel for.
- `composition`: a function that computes an operator by others, as its kernel for CUDA does.
- `around`: a context manager that is entered for the whole prediction, for what is replaced in
  torch itself. It is called with the recorder, `bfc_tools.predicting.recorder.Recorder`.

Operators are named as in `aten::max` for all overloads, or as in `aten::max.dim` for one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from bfc_tools.predicting.devices import GPU
from bfc_tools.predicting.releases import TorchRelease

if TYPE_CHECKING:
    from bfc_tools.predicting.even_choices import EvenChoices


@dataclass(eq=False)
class Workspace:
    """An allocation that is no result of the operator."""

    nbytes: int  # nothing is allocated for 0
    #: None if it is freed when the operator returns, the last one first. Else it is allocated once
    #: for this key, and kept until the program ends.
    kept: Hashable | None = None
    what: str = "workspace"  # what it is, for the report


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
    #: Called with (what, value), it notes an assumption with the line of the program.
    assume: Callable[[str, object], None]
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

    def named(self) -> dict[str, Any]:
        """The arguments by the names in the operator's schema; defaults are not there."""
        names = (argument.name for argument in self.func._schema.arguments)
        return dict(zip(names, self.args, strict=False)) | self.kwargs


Rule = Callable[[Call], Iterable[Workspace | Release]]
Steps = Callable[[Call], Iterable[Workspace | Release | Result]]
Answer = Callable[[Call, Callable[..., Any]], Any]
Around = Callable[[Any], AbstractContextManager[object]]
F = TypeVar("F", bound=Callable[..., Any])

RULES: dict[str, list[Rule]] = {}
BEFORE: dict[str, list[Rule]] = {}
BETWEEN: dict[str, Steps] = {}
ANSWERS: dict[str, Answer] = {}
KERNELS: dict[str, Callable[[Call], Any]] = {}
SPARSE: dict[str, Callable[[Call], Any]] = {}
COMPRESSED: dict[str, Callable[[Call], Any]] = {}
AMENDMENTS: dict[str, Callable[[Any], Any]] = {}
ORDERS: dict[str, tuple[int, ...]] = {}
COMPOSED: set[str] = set()
WHOLE: set[str] = set()
COMPOSITIONS: dict[str, Callable[..., Any]] = {}
AROUND: list[Around] = []


def rule(*operators: str) -> Callable[[F], F]:
    """Registers what operators allocate after their results."""

    def register(function: F) -> F:
        for name in operators:
            RULES.setdefault(name, []).append(function)
        return function

    return register


def before(*operators: str) -> Callable[[F], F]:
    """Registers what operators allocate before their results."""

    def register(function: F) -> F:
        for name in operators:
            BEFORE.setdefault(name, []).append(function)
        return function

    return register


def between(*operators: str) -> Callable[[F], F]:
    """Registers what operators allocate between their results."""

    def register(function: F) -> F:
        BETWEEN.update(dict.fromkeys(operators, function))
        return function

    return register


def answer(*operators: str) -> Callable[[F], F]:
    """Registers what is done in place of operators, on any device."""

    def register(function: F) -> F:
        ANSWERS.update(dict.fromkeys(operators, function))
        return function

    return register


def kernel(*operators: str) -> Callable[[F], F]:
    """Registers what operators return, where PyTorch says nothing for fake tensors."""

    def register(function: F) -> F:
        KERNELS.update(dict.fromkeys(operators, function))
        return function

    return register


def sparse(*operators: str) -> Callable[[F], F]:
    """Registers what operators do with sparse tensors; NotImplemented: bfc does not know."""

    def register(function: F) -> F:
        SPARSE.update(dict.fromkeys(operators, function))
        return function

    return register


def compressed(*operators: str) -> Callable[[F], F]:
    """The same for tensors of compressed rows or columns, if there is one among the arguments."""

    def register(function: F) -> F:
        COMPRESSED.update(dict.fromkeys(operators, function))
        return function

    return register


def amend(*operators: str) -> Callable[[F], F]:
    """Registers how results differ on a GPU from those of fake tensors."""

    def register(function: F) -> F:
        AMENDMENTS.update(dict.fromkeys(operators, function))
        return function

    return register


def order(operators: dict[str, tuple[int, ...]]) -> None:
    """Registers the order in which kernels allocate results; those left out come last."""
    ORDERS.update(operators)


def composed(*operators: str) -> None:
    """Registers operators that are taken apart, whose kernel is CompositeExplicitAutograd."""
    COMPOSED.update(operators)


def whole(*operators: str) -> None:
    """Registers operators that are not taken apart: they have a kernel for CUDA, though PyTorch
    could compose them (both CUDA and CompositeImplicitAutograd in native_functions.yaml)."""
    WHOLE.update(operators)


def composition(operator: str) -> Callable[[F], F]:
    """Registers a function that computes an operator by others, as its kernel for CUDA does."""

    def register(function: F) -> F:
        COMPOSITIONS[operator] = function
        return function

    return register


def around(function: F) -> F:
    """Registers a context manager that is entered for the whole prediction."""
    AROUND.append(function)
    return function


def on_cuda(value: object) -> bool:
    """Whether a value is a fake tensor on the GPU."""
    return getattr(getattr(value, "fake_device", None), "type", "") == "cuda"
