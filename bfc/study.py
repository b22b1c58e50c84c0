"""Experiments with recorded runs: what one run needs under several policies. `bfc replay` prints
such figures, and a program that looks for the best settings compares them. `read_log` reads the log
of a program that ran out of memory.

Its sources are in a package of their own, `bfc_tools`.
"""

from bfc_tools.study.experiment import Comparison, Policy, Row, compare
from bfc_tools.study.figure import plot
from bfc_tools.study.iterations import Steady
from bfc_tools.study.logs.log import Log, read_log
from bfc_tools.study.logs.refusal import LoggedRanOut
from bfc_tools.study.logs.side_by_side import Logs
from bfc_tools.study.python_policy import PythonPolicy
from bfc_tools.study.ran_out import RanOut, ran_out
from bfc_tools.study.recorded_settings import Recorded

__all__ = [
    "Comparison",
    "Log",
    "LoggedRanOut",
    "Logs",
    "Policy",
    "PythonPolicy",
    "RanOut",
    "Recorded",
    "Row",
    "Steady",
    "compare",
    "plot",
    "ran_out",
    "read_log",
]
