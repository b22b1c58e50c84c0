"""Every error that bfc raises on purpose."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from bfc.units import format_bytes


class PagesInUse(NamedTuple):
    """How many of its pages an allocator with `virtual_memory` uses when it refuses a request.

    Attributes
    ----------
    page_size : int
        The bytes of a page.
    pages : int
        The number of all pages.
    in_use : int
        The number of pages in which something is in use.
    sparse : int
        The number of pages of which something, but less than a tenth, is in use.
    """

    page_size: int
    pages: int
    in_use: int
    sparse: int


class OutOfMemoryError(MemoryError):
    """No chunk is large enough, and no region could be added.

    The text fits on one screen. After `bfc.set_oom_report("full")` it also shows the memory.

    Parameters
    ----------
    requested : int
        The bytes that were asked for.
    in_use : int, optional
        The bytes that are allocated.
    reserved : int, optional
        The bytes that the sub-allocator has handed out to the allocator.
    limit : int, optional
        The allocator's memory limit in bytes.
    largest_free : int, optional
        The bytes of the largest free chunk.
    fragmentation : float, optional
        The fraction of the free bytes outside the largest free chunk; NaN if nothing is free.
    refused : str, optional
        Who refused the request, in words.
    advice : tuple of str, optional
        What to try.
    pages : PagesInUse, optional
        Of an allocator with `virtual_memory`: `page_size` in bytes, and how many `pages` there are,
        how many are `in_use`, and how many are `sparse`, with less than a tenth in use.
    by_owner : dict of str to int, optional
        The bytes in use of each owner, as in `Stats.by_owner`.
    report : str, optional
        What is in the memory, as tables (`bfc.set_oom_report`); "" unless that was asked for.
    report_remark : str, optional
        Where there is more than the error shows, or why there is not.
    report_file : str, optional
        The path of a file with the whole report.

    Notes
    -----
    Each parameter is an attribute of the same name.
    """

    def __init__(
        self,
        requested: int,
        in_use: int = 0,
        reserved: int = 0,
        limit: int = 0,
        largest_free: int = 0,
        fragmentation: float = float("nan"),
        *,
        refused: str = "",
        advice: tuple[str, ...] = (),
        pages: PagesInUse | None = None,
        by_owner: dict[str, int] | None = None,
        report: str = "",
        report_remark: str = "",
        report_file: str | None = None,
    ) -> None:
        self.requested = requested
        self.in_use = in_use
        self.reserved = reserved
        self.limit = limit
        self.largest_free = largest_free
        self.fragmentation = fragmentation
        self.refused = refused
        self.advice = advice
        self.pages = pages
        self.by_owner = {} if by_owner is None else by_owner
        self.report = report
        self.report_remark = report_remark
        self.report_file = report_file
        super().__init__(self._text())

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(type(self), **_arguments(self, OutOfMemoryError)), ()

    def reported(self, report: str, remark: str = "", file: str | None = None) -> OutOfMemoryError:
        """The same error, which also shows the memory.

        Parameters
        ----------
        report : str
            What is in the memory.
        remark : str, optional
            Where there is more.
        file : str, optional
            The path of a file with the whole report.

        Returns
        -------
        OutOfMemoryError
            A new one.
        """
        facts = {"report": report, "report_remark": remark, "report_file": file}
        return type(self)(**_arguments(self, OutOfMemoryError) | facts)

    def _text(self) -> str:
        free = self.reserved - self.in_use
        limit, largest = format_bytes(self.limit), format_bytes(self.largest_free)
        lines = [
            f"out of memory: asked for {format_bytes(self.requested)} ({self.requested} bytes)",
            f"  in use        {format_bytes(self.in_use)}",
            f"  reserved      {format_bytes(self.reserved)} of a limit of {limit}",
            f"  free inside   {format_bytes(free)}, the largest block {largest}",
        ]
        if free and not math.isnan(self.fragmentation):
            lines.append(
                f"  fragmentation {self.fragmentation:.1%} of what is free lies outside the "
                "largest block"
            )
        if self.pages is not None:
            size, pages, in_use, sparse = self.pages
            lines.append(f"  pages         {pages} of {format_bytes(size)}, {in_use} in use")
            if sparse:
                lines.append(
                    f"  pinned        {format_bytes(sparse * size)}, in pages of which less than a "
                    "tenth is in use"
                )
        if any(self.by_owner):  # by name
            lines.append(f"  owners        {_largest_owners(self.by_owner)}")
        if self.refused:
            lines.append(f"  refused by    {self.refused}")
        lines += [f"  try: {line}" for line in self.advice]
        if self.report_remark:
            lines.append(f"  report        {self.report_remark}")
        if self.report:
            lines += ["", self.report]
        return "\n".join(lines)


def _arguments(error: Exception, kind: type[Exception]) -> dict[str, Any]:
    """What an error of a kind, or derived from it, was made with: its attributes have the names of
    the kind's parameters."""
    names = kind.__init__.__annotations__
    return {name: getattr(error, name) for name in names if name != "return"}


def _largest_owners(by_owner: dict[str, int]) -> str:
    """The three owners with the most bytes in use."""
    ordered = sorted(by_owner.items(), key=lambda item: -item[1])
    shown = [
        f"{' '.join(name.split())[:40] or 'nobody'} {format_bytes(nbytes)}"
        for name, nbytes in ordered[:3]
    ]
    if ordered[3:]:
        rest = format_bytes(sum(nbytes for _name, nbytes in ordered[3:]))
        shown.append(f"{len(ordered) - 3} more {rest}")
    return ", ".join(shown)


class InvalidPointerError(ValueError):
    """There is no such allocation: the address is foreign, inside a block, or freed already."""


class SubAllocatorError(RuntimeError):
    """A sub-allocator failed for a reason other than "out of memory", or broke its contract.

    Attributes
    ----------
    lost : tuple of (int, int)
        Addresses and bytes that a failed `map` has left mapped, because undoing it failed too. The
        text names them. `unmap` may be called for them again. Usually empty.
    """

    lost: tuple[tuple[int, int], ...] = ()


class DriverError(SubAllocatorError):
    """A driver call failed with something other than "out of memory".

    Parameters
    ----------
    call : str
        The function of the driver.
    code : int
        The driver's number for the failure, such as 700.
    name : str
        The driver's name for it, such as "CUDA_ERROR_ILLEGAL_ADDRESS".
    text : str, optional
        What the driver says about it.
    hint : str, optional
        What to try.

    Notes
    -----
    Each parameter is an attribute of the same name.
    """

    def __init__(self, call: str, code: int, name: str, text: str = "", hint: str = "") -> None:
        self.call = call
        self.code = code
        self.name = name
        self.text = text
        self.hint = hint
        said = f" ({text})" if text else ""
        super().__init__(f"{call}: {name}{said}" + (f"\n  try: {hint}" if hint else ""))

    def __reduce__(self) -> tuple[object, ...]:
        again = functools.partial(type(self), **_arguments(self, DriverError))
        return again, (), {"lost": self.lost}


class DeviceUnavailableError(RuntimeError):
    """There is no driver or no device, or a package is missing; the text says what to install."""


class ClosedError(RuntimeError):
    """The allocator was closed, and its memory given back."""


class AsleepError(RuntimeError):
    """The memory sleeps: its addresses have no memory until `wake()`. Nothing was changed."""


class InvariantError(AssertionError):
    """The bookkeeping contradicts itself: a bug in bfc. Raised by `check()` and by debug builds."""


class PolicyError(RuntimeError):
    """A policy written in Python broke a rule, or raised an error. The text names the event.

    Parameters
    ----------
    fault : str
        What the policy did, and which rule that breaks.
    event : int, optional
        The index of the event of the trace; -1 outside a replay.

    Attributes
    ----------
    event : int
        As given. `trace[: error.event + 1]` is the shortest trace that shows the fault.
    """

    def __init__(self, fault: str = "", event: int = -1) -> None:
        self.event = event
        super().__init__(fault)


class PlanError(ValueError):
    """A plan cannot be made, read or used; the text says why, and names the file where it can."""


class TraceError(ValueError):
    """A trace cannot be read or replayed; the text names the file and the fault in one line.

    Parameters
    ----------
    fault : str
        The file, and what is wrong.
    devices : tuple of int, optional
        The devices whose histories a snapshot holds, if the caller must choose one of them.

    Attributes
    ----------
    devices : tuple of int
        As given, else empty.
    """

    def __init__(self, fault: str = "", *, devices: tuple[int, ...] = ()) -> None:
        self.devices = devices
        super().__init__(fault)


class SettingsError(ValueError):
    """A setting is not possible. Nothing was changed.

    Parameters
    ----------
    fault : str
        What is wrong.
    key : str, optional
        The name of the setting.
    given : str, optional
        What was written.
    allowed : str, optional
        What may be written there.
    hint : str, optional
        What to try.
    where : str, optional
        Where it was written, such as the name of an environment variable.

    Notes
    -----
    Each parameter is an attribute of the same name, "" if it is not known.
    """

    def __init__(
        self,
        fault: str,
        *,
        key: str = "",
        given: str = "",
        allowed: str = "",
        hint: str = "",
        where: str = "",
    ) -> None:
        self.fault = fault
        self.key = key
        self.given = given
        self.allowed = allowed
        self.hint = hint
        self.where = where
        lines = [": ".join(part for part in (where, key, fault) if part)]
        lines += [f"  allowed: {allowed}"] if allowed else []
        lines += [f"  try: {hint}"] if hint else []
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(type(self), **_arguments(self, SettingsError)), ()

    def found_in(self, where: str) -> SettingsError:
        """The same error, which also says where the setting was written.

        Parameters
        ----------
        where : str
            Such as the name of an environment variable.

        Returns
        -------
        SettingsError
            A new one.
        """
        return SettingsError(**_arguments(self, SettingsError) | {"where": where})


def never_set_up() -> ClosedError:
    """The error for an allocator whose `__init__` did not finish."""
    return ClosedError("this allocator was never set up: its __init__ did not run, or failed")


def out_of_host_memory() -> MemoryError:
    """The error for a change that was not made: no host memory for the bookkeeping."""
    return MemoryError(
        "the host is out of memory for the allocator's bookkeeping; nothing has changed: try again"
    )
