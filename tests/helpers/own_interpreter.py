"""Scripts that could crash or hang: each runs in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from torch_forks import Ended

import bfc

SECONDS = 90
ROOT = Path(bfc.__file__).parent.parent

SETUP = """
import contextlib, gc, os, signal, sys, threading, time
import bfc

def long_trace(rounds, live=50_000, leave=0):
    '''Rounds of allocations of many sizes, freed in random order, but for the last `leave`.'''
    import numpy as np
    dice = np.random.default_rng(1)
    op = np.tile(np.repeat(np.array([0, 1], np.uint8), live), rounds)
    ids = np.tile(np.r_[np.arange(live), dice.permutation(live)].astype(np.uint32), rounds)
    size = np.r_[dice.integers(1, 10_000, live), np.zeros(live, np.int64)].astype(np.uint64)
    size = np.tile(size, rounds)
    end = len(op) - leave
    return bfc.Trace(op[:end], ids[:end], size[:end])

def assert_usable(allocator):
    allocator.check()
    allocator.deallocate_raw(allocator.allocate_raw(1000))
    allocator.check()

def in_child(work):
    '''Forks a child that does the work. Returns a function that waits for it.'''
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)     # what hangs is killed
        try:
            work()
            os._exit(0)
        except BaseException as fault:
            print("in the child:", repr(fault), file=sys.stderr, flush=True)
        finally:
            os._exit(1)

    def wait():
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == 0, "the child hangs" if status == -signal.SIGALRM else "the child fails"

    return wait
"""


def run(code: str) -> None:
    """Runs a script, which must come to its end in time."""
    try:
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-W", "ignore", "-c", script(code)],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            cwd=ROOT,
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"it hangs: not at its end after {SECONDS} s")
    came_to_its_end(done)


def script(code: str) -> str:
    """The code with what it may call, and a line that it prints when it comes to its end."""
    return SETUP + textwrap.dedent(code) + "\nprint('at the end')\n"


def came_to_its_end(done: subprocess.CompletedProcess[str] | Ended) -> None:
    said = done.stdout[-1000:] + done.stderr[-3000:]
    assert done.returncode == 0, f"exit status {done.returncode}: {said}"
    assert done.stdout.endswith("at the end\n"), said
