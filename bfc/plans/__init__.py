"""Plans: places for the blocks of a run that repeats, found from a recording. In order:

_planning.pyx    places, the exact search, the sweep that checks both, and the matcher
lives.py         when blocks live
lengths.py       iterations whose lengths vary: all sizes follow from few of them
layout.py        places for blocks whose lives are known
parts.py         a recording, cut into a head and iterations
consensus.py     several recorded iterations become one
serving.py       what an allocator needs of a plan
trying.py        what a policy reserves for a recording, with and without a plan
plan.py          a plan: made from a trace, saved, loaded, checked
recording.py     a plan that a program learns while it runs
watching.py      whether a plan in use still pays, and what comes after it
"""

from bfc.plans.layout import Layout, lay_out
from bfc.plans.parts import Part
from bfc.plans.plan import Plan
from bfc.plans.recording import Recording
from bfc.plans.watching import Watch

__all__ = ["Layout", "Part", "Plan", "Recording", "Watch", "lay_out"]
