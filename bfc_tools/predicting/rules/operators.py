"""All that is known of PyTorch's operators: one record for each, `OPERATORS`.

The files of rules fill it: each function below registers one thing that is known of some operators,
and says where it was read (`source`) or on what it was measured (`seen`). Without either, or where
the same is known already, it raises ValueError. `bfc predict --about aten::topk` prints a record.

Operators are named as in `aten::max` for all overloads, or as in `aten::max.dim` for one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from bfc_tools.predicting.rules.interface import Call, Release, Result, Workspace

Rule = Callable[[Call], Iterable[Workspace | Release]]
Steps = Callable[[Call], Iterable[Workspace | Release | Result]]
Answer = Callable[[Call, Callable[..., Any]], Any]
Kernel = Callable[[Call], Any]
Around = Callable[[Any], AbstractContextManager[object]]
F = TypeVar("F", bound=Callable[..., Any])
Mark = Literal[
    "composed",
    "whole",
    "passes_sparse",
    "fills_zeros",
    "makes_zeros",
    "adds_gradients",
    "is_view",
    "looks_elsewhere",
    "takes_values",
]


@dataclass(frozen=True)
class Source:
    """A file in which something was read."""

    path: str  # in PyTorch's tree; in another project's, "NVIDIA/cccl: cub/agent/..."
    functions: tuple[str, ...]  # none: all of it
    read: str  # the release of that project whose file was read, such as "2.15.0", or a commit

    def __str__(self) -> str:
        of = f" ({', '.join(self.functions)})" if self.functions else ""
        return f"{self.path}{of}"


#: "2.15", "2.15.0", or a commit.
RELEASE = re.compile(r"\d+\.\d+(\.\d+)?|[0-9a-f]{10,40}")


def file(path: str, *functions: str, read: str) -> Source:
    """A file of PyTorch's, whose folder may be left out before `ATen`. Raises ValueError if the
    release or commit in which it was read is none.

    >>> str(file("ATen/native/cuda/Sort.cpp", "sort_cuda_kernel", read="2.6.0"))
    'aten/src/ATen/native/cuda/Sort.cpp (sort_cuda_kernel)'
    """
    if not RELEASE.fullmatch(read):
        raise ValueError(f"{path}: read={read!r} is no release, such as 2.15.0, nor a commit")
    return Source(f"aten/src/{path}" if path.startswith("ATen/") else path, functions, read)


Sources = Source | tuple[Source, ...]


@dataclass(frozen=True)
class Fact:
    """One thing that is known, and how it is."""

    what: str  # "takes memory after its results"
    sources: tuple[Source, ...]
    seen: str  # on what it was measured, or what it was compared with
    function: Callable[..., Any] | None = None  # that says it

    def __str__(self) -> str:
        return f"{self.what}: {self.told}" if self.told else self.what

    @property
    def told(self) -> str:
        """What the function says of itself, in one line."""
        return " ".join((getattr(self.function, "__doc__", None) or "").split())


@dataclass(eq=False)
class Spec:
    """What is known of an operator."""

    name: str
    facts: list[Fact] = field(default_factory=list)

    #: What it allocates after its results, and before them. The functions are called with a `Call`
    #: once the operator has run, or before: then `call.result` is None.
    after: list[Rule] = field(default_factory=list)
    before: list[Rule] = field(default_factory=list)
    #: What it allocates between its results, with a `Result` where the kernel allocates one.
    between: Steps | None = None
    #: What runs in its place: called with a function that runs it, with other arguments if given.
    answer: Answer | None = None
    #: What runs in place of its kernel. Rules of the operator count.
    kernel: Kernel | None = None
    #: What it does if it is given a sparse tensor, and one of compressed rows or columns;
    #: NotImplemented: bfc does not know. The operators that these call count.
    sparse: Kernel | None = None
    compressed: Kernel | None = None
    #: The places of its results in the order in which its kernel allocates them; others come last.
    order: tuple[int, ...] = ()
    #: What computes it by others, as its kernel for CUDA does.
    composition: Callable[..., Any] | None = None
    #: The functions in whose gradients it changes what these have made before.
    changes_in: tuple[str, ...] = ()
    #: Those of `MARKS` that it has.
    marks: list[Mark] = field(default_factory=list)
    #: How known numbers are followed through it.
    numbers: list[str] = field(default_factory=list)
    #: Why it is not known what it takes, with a rough range.
    unknowable: str = ""


OPERATORS: dict[str, Spec] = {}
#: What is replaced in torch itself: context managers that are entered for the whole prediction,
#: each called with the recorder (`bfc_tools.predicting.recorder.Recorder`), and what is known.
AROUND: dict[Around, Fact] = {}


def spec_of(name: str, overload: str) -> Spec:
    """What is known of an overload of an operator: of all overloads, and of it alone."""
    found = Spec(name)
    for one in (name, f"{name}.{overload or 'default'}"):
        if one in OPERATORS:
            _merge(found, OPERATORS[one])
    return found


def _merge(into: Spec, spec: Spec) -> None:
    for one in fields(Spec)[1:]:
        value = getattr(spec, one.name)
        if isinstance(value, list):
            getattr(into, one.name).extend(value)
        elif value:
            setattr(into, one.name, value)


def fact(what: str, source: Sources, seen: str, function: Any = None) -> Fact:
    """A fact. Raises ValueError if nothing says where it is from."""
    sources = source if isinstance(source, tuple) else (source,)
    if not sources and not seen:
        raise ValueError(
            f"{what}: say where that was read (source=file(...)), or on what it was measured (seen)"
        )
    return Fact(what, sources, seen, function)


def _know(operators: Iterable[str], name: str, value: Any, known: Fact) -> None:
    """Registers one thing. Raises ValueError if it is known already."""
    for operator in operators:
        spec = OPERATORS.setdefault(operator, Spec(operator))
        now = getattr(spec, name)
        if value in now if isinstance(now, list) else now:
            raise ValueError(f"{operator} is registered twice: {known.what}")
        if isinstance(now, list):
            now.append(value)
        else:
            setattr(spec, name, value)
        spec.facts.append(known)


def _registers(
    name: str, what: str, operators: tuple[str, ...], source: Sources, seen: str
) -> Callable[[F], F]:
    def register(function: F) -> F:
        _know(operators, name, function, fact(what, source, seen, function))
        return function

    return register


def rule(*operators: str, source: Sources = (), seen: str = "") -> Callable[[F], F]:
    """Registers what operators allocate after their results."""
    return _registers("after", "takes memory after its results", operators, source, seen)


def before(*operators: str, source: Sources = (), seen: str = "") -> Callable[[F], F]:
    """Registers what operators allocate before their results."""
    return _registers("before", "takes memory before its results", operators, source, seen)


def between(*operators: str, source: Sources = (), seen: str = "") -> Callable[[F], F]:
    """Registers what operators allocate between their results."""
    return _registers("between", "takes memory between its results", operators, source, seen)


def answer(*operators: str, source: Sources = (), seen: str = "") -> Callable[[F], F]:
    """Registers what is done in place of operators, on any device."""
    return _registers("answer", "is answered", operators, source, seen)


def kernel(*operators: str, source: Sources = (), seen: str = "") -> Callable[[F], F]:
    """Registers what operators return, where fake tensors get nothing, or something else."""
    return _registers("kernel", "returns", operators, source, seen)


def sparse(*operators: str, source: Sources = (), seen: str = "") -> Callable[[F], F]:
    """Registers what operators do with sparse tensors."""
    return _registers("sparse", "of sparse tensors", operators, source, seen)


def compressed(*operators: str, source: Sources = (), seen: str = "") -> Callable[[F], F]:
    """Registers the same for tensors of compressed rows or columns."""
    return _registers("compressed", "of compressed tensors", operators, source, seen)


def composition(*operators: str, source: Sources = (), seen: str = "") -> Callable[[F], F]:
    """Registers a function that computes operators by others, as the kernel for CUDA does."""
    return _registers("composition", "is computed by others", operators, source, seen)


def around(*, source: Sources = (), seen: str = "") -> Callable[[F], F]:
    """Registers a context manager that is entered for the whole prediction."""

    def register(function: F) -> F:
        AROUND[function] = fact("stands in for a part of torch", source, seen, function)
        return function

    return register


def order(operators: dict[str, tuple[int, ...]], source: Sources = (), seen: str = "") -> None:
    """Registers the order in which kernels allocate results; those left out come last."""
    for name, places in operators.items():
        told = f"allocates its results in the order {', '.join(map(str, places))}"
        _know([name], "order", places, fact(told, source, seen))


#: What a mark says of an operator.
MARKS: dict[Mark, str] = {
    # Its kernel is CompositeExplicitAutograd. It is taken apart, so that what is made in between is
    # seen.
    "composed": "is computed by others on every device",
    # Both CUDA and CompositeImplicitAutograd in native_functions.yaml.
    "whole": "has a kernel for CUDA, though PyTorch could compose it",
    "passes_sparse": "takes nothing for sparse tensors",  # or is computed by others
    "fills_zeros": "fills zeros in place in gradients",
    "makes_zeros": "makes zeros that gradients fill in place",
    "adds_gradients": "adds up gradients in place",
    "is_view": "has a gradient that is a view",
    # Its schema says that it writes to an argument.
    "looks_elsewhere": "gives a tensor other memory, and writes none",
    "takes_values": "may be given a tensor with values",
}


def mark(name: Mark, *operators: str, source: Sources = (), seen: str = "") -> None:
    """Registers one of `MARKS`."""
    _know(operators, "marks", name, fact(MARKS[name], source, seen))


def changes_in(
    functions: tuple[str, ...], *operators: str, source: Sources = (), seen: str = ""
) -> None:
    """Registers in the gradients of which functions operators work in place."""
    told = f"works in place in {', '.join(functions)}"
    _know(operators, "changes_in", functions, fact(told, source, seen))


def numbers(how: str, *operators: str, source: Sources = (), seen: str = "") -> None:
    """Registers how known numbers are followed through operators."""
    _know(operators, "numbers", how, fact(f"numbers: {how}", source, seen))


#: What is said of the memory of operators that only a GPU knows.
UNKNOWN = "not known"


def unknowable(why: str, *operators: str, source: Sources = (), seen: str = "") -> None:
    """Registers why it is not known what operators take."""
    _know(operators, "unknowable", why, fact(UNKNOWN, source, seen or why))
