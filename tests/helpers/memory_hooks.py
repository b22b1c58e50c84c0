"""Calls during which the host has no memory for one allocation of Python's."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

#: Held by the thread of a worker that hears what pytest-xdist's controller says, while it does not
#: wait for that: without memory it ends, and with it the worker.
_hearing = threading.Lock()


def hear_in_turns(config: pytest.Config) -> None:
    """Lets `unheard` hold that thread back, where this process is a worker."""
    for plugin in config.pluginmanager.get_plugins():
        channel = getattr(plugin, "channel", None)
        if channel is not None:
            channel.gateway._io._read = _in_turns(channel.gateway._io._read)


def _in_turns(read: Callable[[int], bytes]) -> Callable[[int], bytes]:
    has_heard = False  # the first message is waited for already

    def read_in_turns(nbytes: int) -> bytes:
        nonlocal has_heard
        if has_heard:
            _hearing.release()
        found = read(nbytes)
        has_heard = bool(found) and _hearing.acquire()  # nothing is the end
        return found

    return read_in_turns


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """That thread waits: it takes no memory, and is no reason why a call fails."""
    with _hearing:
        time.sleep(0.001)  # it may have been about to
        yield


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
