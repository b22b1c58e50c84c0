from typing import Any, TypeVar

T = TypeVar("T")

def copy(
    dst: T,
    src: Any,
    *,
    non_blocking: bool = False,
    stream: Any = None,
    conj: bool = False,
    neg: bool = False,
) -> T: ...
