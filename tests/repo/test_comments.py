"""How much compiled code says why, and which windows of a lock have a reason beside them."""

from __future__ import annotations

import re

from sources import COMPILED, FILES, OF_C, file_name

#: Percent of the lines of code that are comments on a line of their own: in Cython, and in C++.
#: Raise it with what is said; a comment that tells what the next line does is no reason.
LEAST = {"Cython": 1.1, "C++": 8.1}
#: How often a lock is taken without a reason on the line, on the one above, or in the docstring.
MOST_WINDOWS = 261

LONG_TEXT = re.compile(r'(?s)r?""".*?"""')
TAKES = re.compile(r"\bacquire_lock\(|\.acquire\(\)")
FUNCTION = re.compile(r"^ *(?:def|cp?def)\b.*\(")


def share_of_comments(texts: list[str], mark: str) -> float:
    lines = [line.strip() for text in texts for line in text.splitlines()]
    lines = [line for line in lines if line]
    comments = sum(line.startswith(mark) for line in lines)
    return 100 * comments / (len(lines) - comments)


def windows_without_reason(text: str) -> list[int]:
    """The lines that take a lock and have no reason beside them."""
    found = []
    before, documented = "", False
    for number, line in enumerate(text.splitlines(), 1):
        if FUNCTION.match(line):
            documented = False
        documented = documented or ('"""' in line and "lock" in line)
        takes = TAKES.search(line.partition("#")[0]) and not FUNCTION.match(line)
        if takes and not (documented or "#" in line or before.strip().startswith("#")):
            found.append(number)
        before = line
    return found


def test_compiled_code_says_why() -> None:
    cython = [LONG_TEXT.sub('""', path.read_text()) for path in COMPILED if path.suffix != ".pyi"]
    native = [path.read_text() for path in FILES if path.suffix in OF_C]
    shares = {"Cython": share_of_comments(cython, "#"), "C++": share_of_comments(native, "//")}
    print(", ".join(f"{name}: {share:.2f} %" for name, share in shares.items()))
    assert all(shares[name] >= least for name, least in LEAST.items())


def test_windows_of_a_lock_have_their_reason() -> None:
    found = [
        f"{file_name(path)}:{number}"
        for path in COMPILED
        if path.suffix == ".pyx"
        for number in windows_without_reason(path.read_text())
    ]
    print(*found, sep="\n")
    assert len(found) <= MOST_WINDOWS
