"""How a program that is predicted may end its process, and still leave figures."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from bfc_tools.predicting.outside import SIGNALS
from bfc_tools.predicting.stopping import is_ours

if TYPE_CHECKING:
    from bfc_tools.predicting.script import Ran


#: How soon a signal comes again that has not ended the program, in seconds.
AGAIN = 0.2


class Left(BaseException):
    """Ends the program where it calls `os._exit`."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@contextlib.contextmanager
def ended_in_order(ran: Ran) -> Iterator[None]:
    """A signal ends the program as Ctrl-C or `sys.exit` does, and so does `os._exit`: there are
    figures until then. Signals after the first are the process's outside, if there is one. It does
    not replace itself by another program."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process = os.getpid()
    insists, over = contextlib.ExitStack(), threading.Event()
    insists.callback(over.set)

    def end(number: int, frame: Any) -> None:
        if os.getpid() != process:
            _end_child(number, taken[signal.Signals(number)])
        elif ran.signal:
            if number != ran.signal or number == signal.SIGINT or is_ours(frame):
                return
        elif number != signal.SIGINT and not over.is_set():
            insists.enter_context(_again_and_again(number))
        ran.signal = number
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    def leave(code: int) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        raise Left(code)

    def execute(path: Any, *rest: Any) -> NoReturn:
        raise PermissionError(
            errno.EPERM,
            "the prediction would end here, since the program replaces itself by another",
            path,
        )

    # Loads asyncio, for which each `bfc` would wait.
    from unittest.mock import patch

    def instead(name: str, new: Callable[..., NoReturn]) -> Any:
        real = getattr(os, name)

        @functools.wraps(real)
        def call(*args: Any) -> Any:
            ours = threading.current_thread() is threading.main_thread()
            if ours and os.getpid() == process:
                new(*args)
            return real(*args)

        return patch.object(os, name, call)

    taken = {number: signal.getsignal(number) for number in SIGNALS}
    usual = (signal.SIG_DFL, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        for number, handler in taken.items():
            if handler in usual:
                stack.callback(signal.signal, number, handler)
                signal.signal(number, end)
        stack.enter_context(instead("_exit", leave))
        for name in ("execv", "execve"):
            stack.enter_context(instead(name, execute))
        stack.enter_context(insists)
        yield


def _end_child(number: int, before: Any) -> None:
    """Lets a signal do to a child that was forked what it would without a prediction."""
    signal.signal(number, before)
    os.kill(os.getpid(), number)


@contextlib.contextmanager
def _again_and_again(number: int) -> Iterator[None]:
    """Sends the main thread a signal again until the program has ended. Python loses the exception
    of its handler where a finalizer runs, such as that of a file which nobody closes; and what is
    not lost must not be caught: without a prediction, nothing of the program runs after it."""
    left = threading.Event()
    main = threading.main_thread().ident or 0

    def insist() -> None:
        while not left.wait(AGAIN):
            signal.pthread_kill(main, number)

    thread = threading.Thread(target=insist, daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()
