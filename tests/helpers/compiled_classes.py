"""The classes of compiled code: what each defines, and which fields it declares."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sources import code_lines

CLASS = re.compile(r"(?:cdef\s+)?class\s+(\w+)")
METHOD = re.compile(r"    (?:async\s+)?(?:def|cp?def)\b[^=(]*?\b(\w+)\s*\(.*:\s*\S?.*$")
FIELD = re.compile(r"    cdef\s+(?!class\b|enum\b|struct\b)([^(=]+)$")


def compiled_classes(text: str) -> Iterator[tuple[str, set[str], set[str]]]:
    """(name, methods, fields) of each class of a .pyx or a .pxd."""
    name, methods, fields = "", set[str](), set[str]()
    for line in [*code_lines(text), "end"]:
        if line and not line[0].isspace() and not line.startswith(")"):
            if name:
                yield name, methods, fields
            found = CLASS.match(line)
            name, methods, fields = found[1] if found else "", set(), set()
        elif name and (method := METHOD.match(line)):
            methods.add(method[1])
        elif name and (field := FIELD.match(line)):
            fields.update(names_declared(field[1]))


def names_declared(declared: str) -> list[str]:
    """`uint64_t[2] a, b` declares a and b, `cmap[int, int] of` one field."""
    bare = re.sub(r"\[[^\[\]]*\]", "", re.sub(r"\[[^\[\]]*\]", "", declared))
    return [part.split()[-1].strip("*&") for part in bare.split(",")]
