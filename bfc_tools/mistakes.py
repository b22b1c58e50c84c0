"""What is said of an error that ends a command, or a part of one: what a wrong call or file raises
has words of its own, and anything else is a mistake in bfc."""

from __future__ import annotations

#: What a wrong call or file is told with. The text says what is wrong, and what to do.
EXPECTED = (OSError, ValueError, RuntimeError, MemoryError, ImportError)
#: Kinds of these that only a fault in the program raises.
UNEXPECTED = (UnicodeError, RecursionError, NotImplementedError)


def is_mistake(error: Exception) -> bool:
    """Whether only a mistake in bfc raises it."""
    if isinstance(error, MemoryError):
        return False
    return not str(error) or not isinstance(error, EXPECTED) or isinstance(error, UNEXPECTED)


def in_words(error: Exception, to_do: str) -> str:
    """What is said of it, in a line. `to_do` is what to do about a mistake in bfc."""
    text = str(error)
    if text and not is_mistake(error):
        return text
    what = f"{type(error).__name__}: {' '.join(text.split())}".rstrip(": ")
    if isinstance(error, MemoryError):
        return f"{what}: the command needs more memory than this machine has left"
    return f"{what}: bfc did not expect this, so it is a mistake in bfc. {to_do}"
