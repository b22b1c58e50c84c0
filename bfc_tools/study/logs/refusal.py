"""One refusal that a log tells of: what was missing, why, and what to change."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bfc.units import format_bytes, printable
from bfc_tools.study.ran_out import CAPACITY, ELSEWHERE, LIMIT, PIECES, REQUEST

#: Causes that only a log has: another program, or another library of this one, holds the memory;
#: and that the text does not say enough.
OTHERS, UNKNOWN = "others", "unknown"
CAUSES = (PIECES, ELSEWHERE, LIMIT, REQUEST, CAPACITY, OTHERS, UNKNOWN)
#: The longest name of a program's that is shown.
LONGEST = 120


@dataclass(frozen=True)
class LoggedRanOut:
    """How a program ran out of memory, as its log tells. `print` shows it as one sentence.

    It has the names of `RanOut`, which says the same of a recording. Sizes are in bytes, and None
    where the log does not say them.

    Attributes
    ----------
    who : str
        The rank, worker or pod that the log names, or the device; empty if it names none.
    program : str
        "PyTorch", "TensorFlow" or "JAX".
    line : int
        The line of the log.
    nbytes : int or None
        What was refused. PyTorch names the segment that it wanted, which may be larger than what
        the program asked for.
    refusals : int
        How many different refusals the log has of this process.
    live : int or None
        What was in use.
    reserved : int or None
        What the allocator had taken from the device.
    free_in_segments : int or None
        What was free in that.
    largest_free : int or None
        The largest piece of it.
    free_on_device : int or None
        What the device had left, or what the allocator might still have taken.
    total : int or None
        What the device has.
    limit : int or None
        The most that the allocator may take.
    others : int or None
        What other processes, or other libraries of this one, held on the device.
    private : int or None
        What private pools of PyTorch's held, such as those of captured graphs.
    missing : int or None
        What would have been missing even in one piece; 0 if nothing.
    cause : str
        "pieces", "elsewhere", "limit", "request" and "capacity" as of `RanOut`; "others": another
        process or library held what was missing; "unknown": the text does not say enough.
    why : str
        The cause, in words.
    to_try : str
        What to change.
    to_record : str
        What to record, or to print, where the text does not suffice; empty if it does.
    most_line : str
        The name that held most, where the log has names.
    most_bytes : int
        What it held.
    is_whole : bool
        Whether the text was whole.
    remarks : tuple of str
        What is not whole, or must be known.
    """

    who: str
    program: str
    line: int
    nbytes: int | None
    refusals: int = 1
    live: int | None = None
    reserved: int | None = None
    free_in_segments: int | None = None
    largest_free: int | None = None
    free_on_device: int | None = None
    total: int | None = None
    limit: int | None = None
    others: int | None = None
    private: int | None = None
    missing: int | None = None
    cause: str = UNKNOWN
    why: str = ""
    to_try: str = ""
    to_record: str = ""
    most_line: str = ""
    most_bytes: int = 0
    is_whole: bool = True
    remarks: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """All of it that answers."""
        refused = "a request was" if self.nbytes is None else f"{format_bytes(self.nbytes)} were"
        who = f" to {printable(self.who)[:LONGEST]}" if self.who else ""
        text = f"It ran out of memory: {refused} refused{who} ({self.program}, line {self.line})"
        if self.live is not None:
            text += f", where {format_bytes(self.live)} were live"
        if self._free():
            text += f"; {self._free()}"
        text += f": {self.why}" if self.why else ""
        text += f"; try {self.to_try}" if self.to_try else ""
        return f"{text}."

    def __str__(self) -> str:
        return self.sentence

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it.

        Returns
        -------
        dict
            The attributes, and "sentence".
        """
        return {**asdict(self), "sentence": self.sentence}

    def _free(self) -> str:
        """What was free, and where."""
        parts = []
        if self.free_in_segments is not None:
            of = "" if self.reserved is None else f"of the {format_bytes(self.reserved)} reserved "
            text = f"{of}{format_bytes(self.free_in_segments)} were free"
            if self.largest_free is not None and self.free_in_segments:
                text += f", in pieces of at most {format_bytes(self.largest_free)}"
            parts.append(text)
        if self.free_on_device is not None and self.total is not None:
            parts.append(
                f"{format_bytes(self.free_on_device)} of the device's {format_bytes(self.total)}"
            )
        elif self.free_on_device is not None:
            parts.append(f"{format_bytes(self.free_on_device)} were left to take")
        return ", and ".join(parts)
