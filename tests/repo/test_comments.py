"""How much compiled code says why, and which windows of a lock have a reason beside them."""

from __future__ import annotations

import re

from sources import COMPILED, FILES, OF_C, assert_none, file_name

#: Percent of the lines of code that are comments on a line of their own: in Cython, and in C++.
#: Raise it with what is said; a comment that tells what the next line does is no reason.
LEAST = {"Cython": 4.0, "C++": 8.1}

LONG_TEXT = re.compile(r'(?s)r?""".*?"""')
TAKES = re.compile(r"\bacquire_lock\(|\.acquire\(\)")
RELEASES = re.compile(r"\.release\(\)")
FUNCTION = re.compile(r"^ *(?:def|cp?def)\b[^=]*\(")


def share_of_comments(texts: list[str], mark: str) -> float:
    lines = [line.strip() for text in texts for line in text.splitlines()]
    lines = [line for line in lines if line]
    comments = sum(line.startswith(mark) for line in lines)
    return 100 * comments / (len(lines) - comments)


def windows_without_reason(text: str) -> list[int]:
    """The lines that take a lock, where no comment stands until it is released, nor above, and the
    function's docstring does not speak of the lock."""
    found = []
    lines = text.splitlines()
    documented = False
    for number, line in enumerate(lines):
        documented = (documented and not FUNCTION.match(line)) or ('"""' in line and "lock" in line)
        if documented or FUNCTION.match(line) or not TAKES.search(line.partition("#")[0]):
            continue
        window = [lines[number - 1].strip() if lines[number - 1].strip().startswith("#") else ""]
        for inside in lines[number:]:
            window.append(inside)
            if RELEASES.search(inside) or FUNCTION.match(inside):
                break
        if not any("#" in inside for inside in window):
            found.append(number + 1)
    return found


def test_compiled_code_says_why() -> None:
    cython = [LONG_TEXT.sub('""', path.read_text()) for path in COMPILED if path.suffix != ".pyi"]
    native = [path.read_text() for path in FILES if path.suffix in OF_C]
    shares = {"Cython": share_of_comments(cython, "#"), "C++": share_of_comments(native, "//")}
    print(", ".join(f"{name}: {share:.2f} %" for name, share in shares.items()))
    assert all(shares[name] >= least for name, least in LEAST.items())


def test_windows_of_a_lock_have_their_reason() -> None:
    """A comment from the line above until the release, or in the docstring."""
    assert_none(
        f"{file_name(path)}:{number}"
        for path in COMPILED
        if path.suffix == ".pyx"
        for number in windows_without_reason(path.read_text())
    )


def test_a_reason_of_a_window_is_seen() -> None:
    text = """
cdef f(self):
    acquire_lock(self.lock[0])
    x = 1
    self.lock.release()
    # why
    self.acquire()
    self.lock.release()
    acquire_lock(self.lock[0])
    self.lock.release()     # others may change it now
"""
    assert windows_without_reason(text) == [3]
    assert (
        windows_without_reason(text.replace("(self):", '(self):\n    """Needs no lock."""')) == []
    )
