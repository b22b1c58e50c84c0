"""Owners as ranges in NVIDIA's profilers: what `with bfc.owner(name):` encloses."""

from __future__ import annotations

from bfc.buffers._scopes import set_ranges
from bfc.integrations._shared import client


def enable(domain: str = "bfc") -> None:
    """Mark the scopes of owners as NVTX ranges, which Nsight Systems draws on its timeline.

    Parameters
    ----------
    domain : str, optional
        The NVTX domain of the ranges.

    Raises
    ------
    DeviceUnavailableError
        If the package nvtx is not installed.

    Notes
    -----
    From now on each `with bfc.owner(name):` is a range of that name, in every thread. Ranges are
    started and ended by number, so those of asyncio tasks may overlap. Outside of a profiler a
    range costs about 1 us.

    Examples
    --------
    >>> import bfc.integrations.nvtx
    >>> bfc.integrations.nvtx.enable()  # doctest: +SKIP
    """
    nvtx = client("nvtx", "nvtx")

    def begin(name: str) -> object:
        return nvtx.start_range(name, domain=domain)

    set_ranges(begin, nvtx.end_range)


def disable() -> None:
    """Mark no more scopes. Ranges that have begun still end."""
    set_ranges(None, None)
