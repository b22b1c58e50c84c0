"""Standard output and standard error, as a terminal may have them: names come from strangers' files
and must not move its cursor, and what cannot be written says where."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable


def escaped(text: str) -> str:
    """The text, with its control characters and those that turn the direction of writing as
    escapes: a line's end and a tabulator alone stay."""
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(
        it if it.isprintable() or it in "\n\t" else it.encode("unicode_escape").decode()
        for it in text
    )


def tell(text: str) -> None:
    """Prints a line to standard error."""
    print(escaped(text), file=sys.stderr, flush=True)


class Terminal(io.TextIOBase):
    """Standard output for a command: it escapes what it is given. An OSError names it."""

    def __init__(self, below: TextIO) -> None:
        self._below = below

    def write(self, text: str) -> int:
        self._call(self._below.write, escaped(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:  # type: ignore[override]
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._call(self._below.flush)

    def fileno(self) -> int:
        return self._below.fileno()

    def isatty(self) -> bool:
        return self._below.isatty()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._below.encoding

    @staticmethod
    def _call(what: Any, *arguments: str) -> None:
        try:
            what(*arguments)
        except BrokenPipeError:
            raise
        except OSError as error:
            if error.filename is None:
                error.filename = "standard output"
            raise


def standard_output() -> Terminal:
    """Where a command prints. What the encoding of the terminal lacks is escaped, too, in place of
    an error."""
    below = sys.stdout
    if below is None:  # it was closed
        below = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(below, io.TextIOWrapper):
        below.reconfigure(errors="backslashreplace")
    return Terminal(below)
