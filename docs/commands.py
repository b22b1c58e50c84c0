"""`{command-help} NAME`: what `bfc NAME --help` prints, as a section of a page."""

from __future__ import annotations

import os

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from bfc_tools.cli import commands


def help_of(name: str) -> str:
    """The text for a terminal of 100 columns."""
    os.environ["COLUMNS"] = "100"
    return commands()[1][name].format_help()


class CommandHelp(Directive):  # type: ignore[misc]
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        section = nodes.section(ids=[f"bfc-{name}"])
        section += nodes.title("", "", nodes.literal("", f"bfc {name}"))
        section += nodes.literal_block("", help_of(name), language="text")
        return [section]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
