"""What is known of an operator, as `bfc predict --about aten::mm` prints it."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from bfc.libraries import torch
from bfc_tools.predicting import rules
from bfc_tools.predicting.releases import NEWEST, OLDEST
from bfc_tools.predicting.rules.operators import OPERATORS, UNKNOWN, Fact

#: Where an operator is looked for whose name has no namespace.
SPACES = ("aten", "c10d", "torchvision", "higher_order")
WIDTH = 96


def about(name: str) -> str:
    """What is known of an operator, how, and what is not.

    Parameters
    ----------
    name : str
        With its namespace and overload or without: "aten::max.dim", "aten::max" or "max".

    Returns
    -------
    str
        Lines of text.

    Raises
    ------
    ValueError
        If neither bfc nor PyTorch has an operator of that name; it names those that are like it.
    """
    with contextlib.suppress(ImportError):
        from bfc_tools.predicting import known_values  # noqa: F401  # which registers numbers
    whole = _found(name)
    records = [
        spec for key, spec in OPERATORS.items() if key == whole or key.startswith(f"{whole}.")
    ]
    if "." in whole and whole.partition(".")[0] in OPERATORS:  # what holds for all overloads
        records.insert(0, OPERATORS[whole.partition(".")[0]])
    lines = []
    for spec in records:
        lines.append(spec.name)
        for fact in sorted(spec.facts, key=lambda one: one.what.startswith("of ")):
            if fact.what != UNKNOWN:  # that is said at the end
                lines += _told(fact)
    return "\n".join([*(lines or [whole]), *_unknown(whole, records)])


def _found(name: str) -> str:
    """The name with its namespace."""
    wanted = [name] if "::" in name else [f"{space}::{name}" for space in SPACES]
    for one in wanted:
        plain = one.partition(".")[0]
        if any(key == one or key.partition(".")[0] == plain for key in OPERATORS) or _exists(one):
            return one
    names = {one.partition("::")[2]: one for one in _names()}
    near = get_close_matches(wanted[0].partition("::")[2], list(names), n=4, cutoff=0.6)
    like = f"; like it are {', '.join(names[one] for one in near)}" if near else ""
    raise ValueError(f"no operator {name} is known{like}. Write it as in aten::mm or aten::max.dim")


def _names() -> list[str]:
    """The names that can be asked for: bfc's records, and PyTorch's operators if it is there."""
    known = {*OPERATORS}
    with contextlib.suppress(ImportError):
        known |= {one.partition(".")[0] for one in torch._C._dispatch_get_all_op_names()}
    return sorted(known)


def _exists(name: str) -> bool:
    """Whether PyTorch has it; False without PyTorch."""
    space, _, rest = name.partition("::")
    with contextlib.suppress(ImportError, AttributeError):
        packet: Any = getattr(getattr(torch.ops, space), rest.partition(".")[0])
        overload = rest.partition(".")[2]
        return not overload or overload in packet.overloads()
    return False


def _told(fact: Fact) -> Iterator[str]:
    yield from _wrapped(str(fact), "  ")
    for source in fact.sources:
        yield from _wrapped(f"read in {source}, as of {source.read}", "    ")
    if fact.seen and fact.seen not in str(fact):
        yield from _wrapped(f"seen: {fact.seen}", "    ")
    if fact.function is not None:
        module = fact.function.__module__.replace(".", "/")
        yield from _wrapped(f"stands in {module}.py, {fact.function.__name__}", "    ")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False
    )


def _unknown(name: str, records: list[Any]) -> Iterator[str]:
    """What is not known of an operator."""
    yield "not known:"
    takes = any(spec.after or spec.before or spec.between for spec in records)
    stood_in_for = any(spec.answer or spec.composition for spec in records)
    why = rules.unknowable.unknowable(name.partition(".")[0])
    if why:
        yield from _wrapped(why, "  ")
    elif not takes and not stood_in_for:
        yield from _wrapped(
            "whether its kernel for CUDA takes memory beside its results: none is counted", "  "
        )
    yield from _wrapped(
        f"other releases than {OLDEST.name} to {NEWEST.name}; in what these differ stands in "
        "bfc_tools/predicting/releases.py",
        "  ",
    )
