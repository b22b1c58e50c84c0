"""Which lines of the allocator and of both policies ask what backs memory.

A request's way through a miss is the same whatever it is: what differs belongs to a backing, in
`bfc/backings/`, or to a part.
"""

from __future__ import annotations

import re

from sources import PACKAGE, code_lines, file_name

FILES = [
    *sorted((PACKAGE / "allocators").glob("*.pyx")),
    PACKAGE / "policies" / "_bfc.pyx",
    PACKAGE / "policies" / "_caching.pyx",
]
KIND = r"(?:self|allocator)\.(?:expands\b|stitching is (?:not )?None)"
ASKS = re.compile(rf"\b(?:if|elif|while|not|and|or)\b.*{KIND}|{KIND} (?:and|or|if)\b")
BEGINS = re.compile(r"    (?:cdef|def|@)\b|\S")
MAKES = re.compile(r"    (?:def __c?init__|cdef int set_up\w*)\(")

#: How many there are now. It was 49 when pages and ranges were branches of both policies. Lower it
#: with each line that goes; no line that needs a higher one belongs here.
MOST = 8


def lines_that_ask() -> list[str]:
    """Each such line outside of what makes an allocator."""
    found = []
    for path in FILES:
        makes = False
        for line in code_lines(path.read_text()):
            makes = bool(MAKES.match(line)) if BEGINS.match(line) else makes
            if not makes and ASKS.search(line):
                found.append(f"{file_name(path)}: {line.strip()}")
    return found


def test_few_lines_ask_what_backs_memory() -> None:
    found = lines_that_ask()
    print(*found, sep="\n")
    assert len(found) == MOST
