"""Calls during which the host has no memory for one allocation of Python's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def call_without_memory(n: int, call: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
    """Makes a call whose allocation number `n`, counted from 0, fails. Returns whether the call
    went through all the same, and its answer.

    A collection of garbage would shift the count: let the test use the fixture `quiet_collector`.
    """
    hooks = pytest.importorskip("_testcapi")
    done, answer = True, None
    hooks.set_nomemory(n, n + 1)
    try:
        answer = call(*arguments)
    except MemoryError:
        done = False
    finally:
        hooks.remove_mem_hooks()
    return done, answer
