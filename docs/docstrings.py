"""What the site makes of docstrings: signatures from the stubs, and links where names stand.

Cython writes a signature of its own into the first line of a docstring (`embedsignature`). It has
C's types and misplaces the star of keyword-only arguments, so it is taken out here, and the stub's
stands in its place.
"""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst.states import Inliner
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

PACKAGE = Path(__file__).resolve().parent.parent / "bfc"


@cache
def stub_of(module: str) -> dict[str, ast.FunctionDef]:
    """The functions of a module's stub by qualified name; empty where there is no stub."""
    path = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".pyi")
    found: dict[str, ast.FunctionDef] = {}
    if not module.startswith("bfc.") or not path.exists():
        return found
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            members = (item for item in node.body if isinstance(item, ast.FunctionDef))
            found |= {f"{node.name}.{item.name}": item for item in members}
    return found


def stub_function(what: str, thing: Any) -> ast.FunctionDef | None:
    """What a stub says of a function, or of how a class is made."""
    if what != "class":
        return stub_of(getattr(thing, "__module__", None) or home_of(thing)).get(
            getattr(thing, "__qualname__", "")
        )
    for kind in thing.__mro__:
        if "__init__" in vars(kind) or "__new__" in vars(kind):
            return stub_of(kind.__module__).get(f"{kind.__qualname__}.__init__")
        if made := stub_of(kind.__module__).get(f"{kind.__qualname__}.__init__"):
            return made
    return None


def home_of(thing: Any) -> str:
    """The module of a method that does not say."""
    owner = getattr(thing, "__objclass__", None)
    return getattr(owner, "__module__", "") or ""


def written(node: ast.FunctionDef, *, bound: bool) -> tuple[str, str | None]:
    """(the parameters in brackets, what is returned)."""
    arguments = node.args
    if bound and arguments.args:
        arguments = ast.arguments(
            posonlyargs=arguments.posonlyargs,
            args=arguments.args[1:],
            vararg=arguments.vararg,
            kwonlyargs=arguments.kwonlyargs,
            kw_defaults=arguments.kw_defaults,
            kwarg=arguments.kwarg,
            defaults=arguments.defaults,
        )
    result = None if node.returns is None else ast.unparse(node.returns)
    return f"({ast.unparse(arguments)})", result


def process_signature(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, given: str, returns: str
) -> tuple[str, str | None] | None:
    """Sphinx takes the first answer that is not None, and else what it has found itself."""
    node = stub_function(what, thing) if callable(thing) else None
    if node is None:
        return None
    is_static = any(ast.unparse(line) == "staticmethod" for line in node.decorator_list)
    parameters, result = written(node, bound=what in ("method", "class") and not is_static)
    return parameters, None if what == "class" else result


def process_docstring(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Takes out the line that Cython has put first."""
    last = name.rpartition(".")[2]
    if lines and inspect.isroutine(thing) | inspect.isclass(thing):
        head = lines[0].partition("(")[0]
        if "(" in lines[0] and head.rpartition(".")[2] == last and " " not in head:
            del lines[0]
            while lines and not lines[0].strip():
                del lines[0]


NAME = re.compile(r"[A-Za-z_][\w.]*(\(\))?")


def name_role(
    role: str, rawtext: str, text: str, line: int, inliner: Inliner, *given: object
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """`name` in a docstring: code, and a link where just that name is documented, in the class that
    the docstring is of or anywhere. Sphinx's own role looks for names that end so, too."""
    code = nodes.literal(rawtext, text, classes=["xref", "py"])
    if not NAME.fullmatch(text):
        return [code], []
    context = inliner.document.settings.env.ref_context
    link = pending_xref(
        rawtext,
        code,
        refdomain="py",
        reftype="obj",
        reftarget=text.removesuffix("()"),
        refexplicit=True,
        refwarn=False,
    )
    link["py:module"] = "bfc"
    link["py:class"] = context.get("py:class")
    return [link], []


def setup(app: Sphinx) -> dict[str, bool]:
    # Before numpydoc, which would take the docstring's own signature.
    app.connect("autodoc-process-signature", process_signature, priority=400)
    app.connect("autodoc-process-docstring", process_docstring, priority=400)
    app.config.autodoc_docstring_signature = False
    app.add_role("name", name_role)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
