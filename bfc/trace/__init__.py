"""Allocation histories: files of numbers that replay against any allocator. In order:

tables.py             frames, owners and stacks
pools.py              private pools, and what becomes of them
rmm_log.py            RMM's log in CSV
anonymous.py          the parts of a recording that name no person or program
from_snapshot.py      a snapshot of an allocator: its history, or what it holds
beginning.py          what was live when a recording began
_occupancy.pyx        which addresses a trace used at which time
structure.py          the order of births and deaths, and where pieces of it come again
loops.py              the loops of a program, by the lines of its stacks
iterations.py         where the iterations of a run begin
timeline.py           a replay over time: figures, and a map of addresses
trace.py              makes, checks, saves, loads and replays traces
"""

from bfc.trace.beginning import Beginning
from bfc.trace.iterations import Iteration, Iterations
from bfc.trace.tables import FrameTable
from bfc.trace.timeline import Occupancy, Timeline
from bfc.trace.trace import Replay, Trace

__all__ = [
    "Beginning",
    "FrameTable",
    "Iteration",
    "Iterations",
    "Occupancy",
    "Replay",
    "Timeline",
    "Trace",
]
