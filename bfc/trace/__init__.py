"""Allocation histories: files of numbers that replay against any allocator."""

from bfc.trace.trace import Replay, Trace

__all__ = ["Replay", "Trace"]
