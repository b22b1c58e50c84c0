"""Scripts with PyTorch on OpenCL, each in a process of its own."""

from __future__ import annotations

import textwrap

import own_interpreter

START = """
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


def run(code: str, *, before: str = "") -> None:
    own_interpreter.run(textwrap.dedent(before) + START + textwrap.dedent(code))
