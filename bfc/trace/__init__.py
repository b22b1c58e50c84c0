"""Allocation histories: files of numbers that replay against any allocator. In order:

trace.py
"""

from bfc.trace.trace import Replay, Trace

__all__ = ["Replay", "Trace"]
