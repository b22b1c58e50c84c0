"""Allocation histories: files of numbers that replay against any allocator. In order:

tables.py             frames, owners and stacks
rmm_log.py            RMM's log in CSV
anonymous.py          what of a recording names nobody
_occupancy.pyx        which addresses a trace used when
timeline.py           a replay over time: figures, and a map of addresses
trace.py
"""

from bfc.trace.tables import FrameTable
from bfc.trace.timeline import Occupancy, Timeline
from bfc.trace.trace import Replay, Trace

__all__ = ["FrameTable", "Occupancy", "Replay", "Timeline", "Trace"]
