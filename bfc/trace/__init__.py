"""Allocation histories: files of numbers that replay against any allocator. In order:

tables.py             frames, owners and stacks
rmm_log.py            RMM's log in CSV
anonymous.py          what of a recording names nobody
timeline.py           the figures of a replay over time
trace.py
"""

from bfc.trace.tables import FrameTable
from bfc.trace.timeline import Timeline
from bfc.trace.trace import Replay, Trace

__all__ = ["FrameTable", "Replay", "Timeline", "Trace"]
