"""Scripts with PyTorch on OpenCL, each in a process of its own, which is forked from one that has
imported PyTorch."""

from __future__ import annotations

import atexit
import functools
import os
import textwrap

import own_interpreter
from torch_forks import Forks

START = """
import faulthandler
faulthandler.enable()
sys.path.insert(0, "tests/helpers")
import pocl
pocl.start()
import torch
from bfc.integrations import torch_opencl

def refusal(kind, function, *arguments, **named):
    try:
        function(*arguments, **named)
    except kind as error:
        return str(error)
    raise AssertionError("it is not refused")
"""


@functools.cache
def forks() -> Forks:
    begun = Forks(os.environ | {"PYTHONPATH": str(own_interpreter.ROOT)}, own_interpreter.ROOT)
    atexit.register(begun.close)
    return begun


def run(code: str, *, before: str = "") -> None:
    script = own_interpreter.script(textwrap.dedent(before) + START + textwrap.dedent(code))
    own_interpreter.came_to_its_end(forks().run(script, (), own_interpreter.SECONDS))
