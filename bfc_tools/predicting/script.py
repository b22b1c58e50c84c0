"""A script, run as `python` would run it, until it has made enough steps."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bfc_tools.predicting import evaluations, waiting
from bfc_tools.predicting.endings import Left, ended_in_order
from bfc_tools.predicting.places import is_machinery
from bfc_tools.predicting.prediction import Prediction
from bfc_tools.predicting.session import predict
from bfc_tools.predicting.stopping import Limits, Stopped, Stopping


@dataclass
class Ran:
    """A program that ran."""

    prediction: Prediction  # what it needed until it ended
    stopping: Stopping  # what would stop it
    error: BaseException | None = None  # what it raised
    signal: int = 0  # the signal that ended it

    @property
    def steps(self) -> int:
        """How many steps its optimizers made."""
        return self.stopping.steps

    @property
    def stopped(self) -> str:
        """After what it was stopped, as "2 steps of the optimizer"; empty if it was not."""
        return self.stopping.stopped


def run(
    script: str,
    arguments: Sequence[str],
    *,
    module: bool = False,
    files: str | None = None,
    limits: Limits | None = None,
    progress: Callable[[Ran], object] | None = None,
    **device: Any,
) -> Ran:
    """Runs a script, or a module, under `predict`, which gets the other arguments.

    Its standard output goes to standard error. It is stopped at the `limits`. `files` is the folder
    of its own files, where that is not the script's, or, of a module, the working folder.
    """
    if not module:
        _refuse_what_is_no_script(script)
    folder = os.getcwd() if module else os.path.dirname(os.path.abspath(script))

    def program() -> None:
        with _as_main(script, arguments, folder):
            if module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")

    return follow(program, files or folder, limits=limits, progress=progress, **device)


def follow(
    program: Callable[[], object],
    folder: str,
    *,
    limits: Limits | None = None,
    progress: Callable[[Ran], object] | None = None,
    **device: Any,
) -> Ran:
    """Calls a program under `predict`, which gets the other arguments. Its own files are those in
    `folder`. It is stopped at the `limits`."""
    ran: Ran | None = None
    process = os.getpid()
    stopping = Stopping(limits or Limits(), folder, lambda: bool(ran and ran.prediction.snapshots))

    def tell(found: Prediction) -> None:
        stopping.look_at_the_clock()
        if progress is not None and ran is not None:
            progress(ran)

    with predict(
        after_step=stopping.after_step,
        after_forward=stopping.after_forward,
        progress=tell,
        **device,
    ) as found:
        ran = Ran(found, stopping)
        with (
            _threads_count(ran),
            ended_in_order(ran),
            waiting.told(lambda: stopping.steps, lambda: found.operators),
            _shortened(found, stopping.limits),
        ):
            try:
                with stopping.clock():
                    program()
            except Stopped:
                pass
            except Left as error:
                if error.code:
                    ran.error = SystemExit(error.code)
            except SystemExit as error:
                if error.code not in (None, 0):
                    ran.error = error
            except BaseException as error:
                ran.error = error
                found.ended_by(error)
                _show(error)
                _let_go(error)
    if os.getpid() != process:  # a child that the script has forked: it has nothing to say
        sys.stderr.flush()
        os._exit(0 if ran.error is None else 1)
    return ran


def _shortened(found: Prediction, limits: Limits) -> contextlib.AbstractContextManager[None]:
    """Leaves out passes of evaluations that are alike, and tokens, unless passes count, or the
    whole run."""
    if limits.forwards is not None or limits.seconds is not None or limits.is_whole:
        from bfc_tools.predicting import generation  # which needs torch

        return generation.whole()
    recorder = found._recorder

    def is_followed() -> bool:
        return not (
            recorder.compiling.tracing or recorder.memory.places.modules.get(threading.get_ident())
        )

    return evaluations.shortened(found._memory, is_followed)


def _refuse_what_is_no_script(path: str) -> None:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no such script: {path}")
    if path.endswith(".ipynb"):
        raise ValueError(
            f"{path} is a notebook: `jupyter nbconvert --to script {path}` makes a script of it"
        )


@contextlib.contextmanager
def _threads_count(ran: Ran) -> Iterator[None]:
    """What a thread of the program raises is a failure of the program."""
    tell = threading.excepthook

    def failed(args: Any) -> None:
        if isinstance(args.exc_value, Stopped):
            return
        if ran.error is None:
            ran.error = args.exc_value
        tell(args)
        _let_go(args.exc_value)

    threading.excepthook = failed
    try:
        yield
    finally:
        threading.excepthook = tell


@contextlib.contextmanager
def _as_main(script: str, arguments: Sequence[str], folder: str) -> Iterator[None]:
    """`sys.argv` and `sys.path` as the script expects them."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    sys.path.insert(0, folder)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv = argv
        sys.path[:] = path


def _show(error: BaseException) -> None:
    """Prints the traceback as `python` would, but for what is ours, or of fake tensors: frames, and
    errors behind the error that have no others."""
    told = traceback.TracebackException.from_exception(error)
    causes = [] if _is_a_fault(error, told) else [told]
    for one in causes:  # which grows meanwhile
        kept = [frame for frame in one.stack if not is_machinery(frame.filename)]
        one.stack = traceback.StackSummary.from_list(kept)
        for name in ("__cause__", "__context__"):
            cause = getattr(one, name)
            files = [] if cause is None else [frame.filename for frame in cause.stack]
            if files and all(map(is_machinery, files)):  # one that was never raised has none
                setattr(one, name, None)
            elif cause is not None:
                causes.append(cause)
    sys.stderr.write("".join(told.format()))


def _is_a_fault(error: BaseException, told: traceback.TracebackException) -> bool:
    """Whether it looks like a mistake of ours, whose place must be told."""
    of_mistakes = (AssertionError, AttributeError, LookupError, TypeError)
    return isinstance(error, of_mistakes) and is_machinery(told.stack[-1].filename)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what caused it, and so on: each once, since an error can be its own cause."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _let_go(error: BaseException | None) -> None:
    """Drops the frames, which hold the program's tensors."""
    for one in causes(error):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
