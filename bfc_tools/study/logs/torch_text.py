"""PyTorch's error text, of 1.0 to 2.15: one sentence after the other, on one line or wrapped."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bfc_tools.study.logs.sizes import SIZE, Printed, printed, size_in

#: Where such a text begins, and what its last sentences have.
BEGINS = re.compile(
    r"\b(CUDA|HIP|XPU|NPU|MPS backend|MUSA|MTIA) out of memory\b"
    r"|\bAllocation on device(?: \d+)? would exceed allowed memory"
)
_ENDS = re.compile(
    r"reserved by PyTorch but unallocated|reserved in total by PyTorch|cached\)|more than 1EB"
    r"|according to CUDA\)\s*: \S+ \w+"
    r"|preemptively rejected.*Requested size: \S+ \w+|max allowed: .*Tried to allocate \S+ \w+"
)


@dataclass(frozen=True)
class TorchText:
    """What a text of PyTorch's says. A figure is None where it does not say it."""

    backend: str
    gpu: int | None
    asked: Printed | None
    total: Printed | None = None
    free: Printed | None = None
    allocated: Printed | None = None
    reserved: Printed | None = None  # as older texts say it
    unallocated: Printed | None = None  # as newer ones do
    private: Printed | None = None
    allowed: Printed | None = None
    this_process: Printed | None = None
    other: Printed | None = None  # of MPS: other allocations
    processes: tuple[tuple[int, Printed], ...] = ()
    #: The variable whose setting the text proposes, as this version calls it.
    variable: str = ""
    knows_expandable: bool = False
    knows_split: bool = False
    is_preemptive: bool = False
    #: Whether it is of the backend cudaMallocAsync, whose cache the driver keeps.
    is_async: bool = False
    is_whole: bool = False

    @property
    def figures(self) -> int:
        """How many figures it has."""
        return sum(getattr(self, name) is not None for name in ("asked", *_FIGURES))

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the same refusal, which a log often has several times."""
        return self.backend, self.gpu, self.asked, self.free, self.allocated, self.total


def _sized(words: str) -> re.Pattern[str]:
    return re.compile(words.replace("SIZE", SIZE))


_ASKED = _sized(r"(?:Tried to allocate|Requested size:|Requested\s*:) SIZE")
_GPU = re.compile(r"\b(?:GPU|XPU|NPU|device) (\d{1,4})\b")
_FIGURES = {
    "total": _sized(r"total capaci?ty of SIZE|; SIZE total capacity|Device limit\s*: SIZE"),
    "free": _sized(r"of which SIZE is free|; SIZE free;|Free \(according to CUDA\)\s*: SIZE"),
    "allocated": _sized(
        r"; SIZE already allocated|Of the allocated memory SIZE is allocated|MPS allocated: SIZE"
        r"|Currently allocated\s*: SIZE"
    ),
    "reserved": _sized(r"; SIZE reserved in total by"),
    "unallocated": _sized(r"and SIZE is reserved by PyTorch but unallocated|; SIZE cached\)"),
    "private": _sized(r"with SIZE allocated in private pools"),
    "allowed": _sized(r"[.;] SIZE allowed;|max allowed: SIZE|memory fraction\)\s*: SIZE"),
    "this_process": _sized(r"this process has SIZE memory in use"),
    "other": _sized(r"other allocations: SIZE"),
}
_PROCESS = _sized(r"Process (\d{1,10}) has SIZE memory in use")
_VARIABLE = re.compile(r"\b(PYTORCH_(?:\w{1,8}_)?ALLOC_CONF)\b")


def text_of(text: str) -> TorchText | None:
    """What a text says; None if it is not one of PyTorch's.

    >>> found = text_of("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 6 has a total cap")
    >>> found.gpu, found.asked.nbytes, found.is_whole
    (6, 2097152, False)
    """
    begin = BEGINS.search(text)
    if begin is None:
        return None
    text = " ".join(text[begin.start() :].split())
    asked = _ASKED.search(text)
    gpu = _GPU.search(text)
    variable = _VARIABLE.search(text)
    processes = []
    for found in _PROCESS.finditer(text):
        size = printed(found[2], found[3])
        if size is not None:
            processes.append((int(found[1]), size))
    return TorchText(
        (begin[1] or "CUDA").removesuffix(" backend"),
        None if gpu is None else int(gpu[1]),
        None if asked is None else printed(asked[1], asked[2]),
        **{name: _first(pattern, text) for name, pattern in _FIGURES.items()},
        processes=tuple(processes[:64]),
        variable="" if variable is None else variable[1],
        knows_expandable="expandable" in text or "is free." in text,
        knows_split="max_split_size_mb" in text or "is free." in text,
        is_preemptive="preemptively rejected" in text,
        is_async=begin[1] is None,
        is_whole=_ENDS.search(text) is not None,
    )


def _first(pattern: re.Pattern[str], text: str) -> Printed | None:
    found = pattern.search(text)
    return None if found is None else size_in(found[0])
