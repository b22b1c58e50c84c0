"""Whole logs: what ran out of memory in them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bfc.errors import TraceError
from bfc.files import open_regular
from bfc.snapshots.snapshot import Snapshot
from bfc_tools.study.logs.dump import Dump
from bfc_tools.study.logs.refusal import LoggedRanOut

if TYPE_CHECKING:
    from bfc_tools.study.logs.lines import Line
    from bfc_tools.study.logs.source import Source

#: The most processes of one log that are told apart.
MOST_SOURCES = 1024

#: Words of other failures, and what to say of a log that has nothing else.
_OTHER_WORDS = (
    (
        re.compile(r"CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"),
        "the driver's own error stands there, which has no figures: look at nvidia-smi beside it",
    ),
    (
        re.compile(r"oom-kill|Out of memory: Killed|OOMKilled|Killed process"),
        "the system ended a process because the host's memory was full, not a GPU's",
    ),
    (
        re.compile(r"std::bad_alloc|DefaultCPUAllocator|MemoryError|Cannot allocate memory"),
        "it is the host's memory that was refused, not a GPU's",
    ),
    (
        re.compile(r"Out of memory allocating [\d,]+ bytes \(allocated so far|rmm::out_of_memory"),
        "CuPy's or RMM's error stands there, which does not say what was free: a pool of bfc does",
    ),
)


_NO_DUMPS: tuple[Dump | None, ...] = ()


@dataclass(frozen=True)
class Log:
    """What the log of one or several processes says about running out of memory.

    Attributes
    ----------
    name : str
        The name of the file.
    refusals : tuple of LoggedRanOut
        One for each process that ran out of memory: the last one, since the program ended with it.
    may_fail : int
        How many requests were refused for which the program had another way, such as the workspace
        of a faster algorithm.
    hint : str
        What the log tells of, if it has no refusal.
    """

    name: str
    refusals: tuple[LoggedRanOut, ...]
    may_fail: int = 0
    hint: str = ""
    _dumps = _NO_DUMPS  # of each refusal: it is set once, and is no part of the value

    def snapshots(self) -> list[tuple[LoggedRanOut, Snapshot]]:
        """The chunks of each process that has listed them.

        Returns
        -------
        list of tuple
            What was refused, and what the memory held then. What was asked for in a chunk is not
            in a log: it is taken to be the chunk's size.
        """
        return [
            (refusal, dump.snapshot())
            for refusal, dump in zip(self.refusals, self._dumps, strict=False)
            if dump is not None and dump.regions
        ]


def read_log(path: str | os.PathLike[str], name: str | None = None) -> Log:
    """Read what a log says about running out of memory.

    Parameters
    ----------
    path : str or os.PathLike
        A text that a program has printed: the dump of TensorFlow's or JAX's allocator, XLA's
        errors, or PyTorch's error text. It may have all that loggers, terminals and containers put
        around it, and lines of several processes between each other.
    name : str, optional
        How it is called in what is shown; the default is the name of the file.

    Returns
    -------
    Log
        Its `refusals` are empty if nothing ran out of memory.

    Raises
    ------
    TraceError
        If it is not a regular file, or no text.
    OSError
        If it cannot be read.

    Notes
    -----
    It is read line by line, and bounded memory is used, whatever it holds.

    Cost: about 30 microseconds for a line of a dump.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> text = "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 8.00 GiB total capacity; "
    >>> text += "6.90 GiB already allocated; 0 bytes free; 6.98 GiB reserved in total by PyTorch)"
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "train.log")
    ...     _ = path.write_text(text)
    ...     log = read_log(path)
    >>> log.refusals[0].cause, log.refusals[0].missing >> 20
    ('capacity', 1966)
    """
    # every command imports this module, and only logs need the patterns of these two
    from bfc_tools.study.logs.lines import lines_of, owned
    from bfc_tools.study.logs.source import Source

    shown = os.path.basename(path) if name is None else name
    sources: dict[str, Source] = {}
    hints: Counter[int] = Counter()
    with open_regular(path) as file:
        if b"\0\0\0\0" in file.read(4096):
            raise TraceError(f"{os.fspath(path)}: it is neither a recorded run nor a text")
        file.seek(0)
        before: Line | None = None
        for line in lines_of(file):
            if " of size" not in line.text:
                for number, (sign, _) in enumerate(_OTHER_WORDS):
                    hints[number] += sign.search(line.text) is not None
            line = owned(line, before)
            before = line
            who = line.whose if line.whose in sources or len(sources) < MOST_SOURCES else ""
            sources.setdefault(who, Source(who)).take(line)
    for source in sources.values():
        source.finish()
    hint = next((_OTHER_WORDS[number][1] for number in sorted(hints) if hints[number]), "")
    return _log_of(shown, list(sources.values()), hint)


def _log_of(name: str, sources: Sequence[Source], hint: str) -> Log:
    refusals: list[LoggedRanOut] = []
    dumps: list[Dump | None] = []
    for source in sources:
        if source.is_empty:
            continue
        for refusal in source.refusals():
            dump = source.dump_of(refusal)
            is_torch = refusal.program == "PyTorch"
            older = source.last_dump() if dump is None and not is_torch else None
            if older is not None:
                remark = f"the dump from line {older.line} on is of an earlier refusal"
                remarks = (*refusal.remarks, "; ".join([remark, *older.faults()]))
                is_whole = refusal.is_whole and older.is_whole
                refusal = replace(refusal, remarks=remarks, is_whole=is_whole)
            refusals.append(refusal)
            dumps.append(dump or older)
    may_fail = sum(source.may_fail for source in sources)
    if not refusals and may_fail:
        hint = (
            f"{may_fail} requests were refused for which the program had another way, such as the "
            "workspace of a faster algorithm: none that it needed"
        )
    log = Log(name, tuple(refusals), may_fail, hint if not refusals else "")
    object.__setattr__(log, "_dumps", tuple(dumps))
    return log
