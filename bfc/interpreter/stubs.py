"""Reads signatures of compiled classes from their stubs: Cython keeps none that Python can read."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
EMPTY = inspect.Parameter.empty


class SignatureOfStub:
    """A class attribute `__signature__`, for `inspect.signature`, help() and editors: the
    parameters of the constructor, as the class's stub has them. The stub is read when first needed.
    """

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        for kind in owner.__mro__:
            if not kind.__module__.startswith(f"{PACKAGE.name}."):
                if "__init__" in vars(kind) or "__new__" in vars(kind):
                    break
            elif "__init__" in vars(kind):
                return signature_of(kind)
        if kind is object:
            return inspect.Signature()
        raise AttributeError("__signature__")  # a user's subclass: Python reads its signature


@cache
def signature_of(kind: type) -> inspect.Signature:
    """Raises AttributeError if there is no stub, or if it has no constructor of the class."""
    names = kind.__module__.split(".")[1:]
    try:
        text = PACKAGE.joinpath(*names).with_suffix(".pyi").read_text("utf-8")
    except OSError as error:
        raise AttributeError(f"no stub: {error}") from None
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                    return _signature(member.args)
    raise AttributeError(f"the stub has no constructor of {kind.__name__}")


def _signature(given: ast.arguments) -> inspect.Signature:
    names = [*given.posonlyargs, *given.args]
    defaults = [*[None] * (len(names) - len(given.defaults)), *given.defaults]
    found = [
        _parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default)
        for name, default in zip(names, defaults, strict=True)
    ]
    found += [
        _parameter(name, inspect.Parameter.KEYWORD_ONLY, default)
        for name, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return inspect.Signature(found[1:])  # without self


def _parameter(
    name: ast.arg, kind: inspect._ParameterKind, default: ast.expr | None
) -> inspect.Parameter:
    return inspect.Parameter(
        name.arg,
        kind,
        default=EMPTY if default is None else ast.literal_eval(default),
        annotation=EMPTY if name.annotation is None else ast.unparse(name.annotation),
    )
