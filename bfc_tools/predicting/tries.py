"""Many predictions of one program, each in a process of its own, on the cores of this machine.

PyTorch is imported once. Each try is a fork of that process, with the files of its program kept
apart as those of a single prediction are.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import io
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO, Any, Generic, NoReturn, Protocol, TypeVar

from bfc.units import format_bytes
from bfc_tools.mistakes import in_words, is_mistake
from bfc_tools.predicting import guard, kernel, outside

Key = TypeVar("Key")
Job = TypeVar("Job")
#: The lines of what a program printed that are told if it failed.
LINES = 25
#: What a table says of `Tried.fits`.
ANSWERS = {True: "yes", False: "no", None: "failed"}
#: What to do about a mistake in bfc.
TO_DO = "Report it, with its traceback"
#: How an answer begins that comes before the end, as after Ctrl-C.
UNFINISHED = "Not finished. Of what was tried: "
#: Seconds between two signals to a try that is to end: the second ends it at once.
APART = outside.ONE + 0.1


class Question(Protocol):
    """What is asked of one process. `Asked` is one."""

    @property
    def real_files(self) -> bool:
        """Whether the program works on the user's files."""

    def answer(self) -> dict[str, Any]:
        """Runs in that process, and returns figures."""


@dataclass(frozen=True)
class Tried:
    """What a try came to."""

    figures: dict[str, Any] = field(default_factory=dict)  # empty if there is no answer
    error: str = ""  # what went wrong, in a line
    output: str = ""  # the end of what the program printed
    is_mistake: bool = False  # bfc failed in it, and not the program

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None if the program failed before that was known."""
        return self.figures.get("fits")

    @property
    def fits_at_most(self) -> bool | None:
        """Whether the steps that ran fit with the most of what is not known, at the predicted
        addresses, and without an FFT of cuDNN's: `fits` goes by what is counted. None if there is
        no upper bound, or the program failed before its end."""
        return self.figures.get("fits_at_most")

    @property
    def is_unsure(self) -> bool:
        """Whether something is not known, so that it may need more than is counted."""
        return bool(self.figures.get("reserved_bounds", {}).get("because"))

    @property
    def needs(self) -> int:
        """The most that is reserved on a device that never refuses, in bytes: at other addresses of
        the driver and after more steps, too. 0 if that is not known."""
        figures = self.figures
        if not figures:
            return 0
        after = figures["peak_reserved_after_repeats"] or 0
        return int(max(figures["peak_reserved"], figures["peak_reserved_range"][1], after))

    @property
    def only_just(self) -> bool:
        """Whether it fits only since PyTorch gives back what it keeps before it refuses a
        request."""
        return bool(self.fits) and self.needs > self.figures["limit"]

    @property
    def live(self) -> int:
        """The most that the program asked for and did not free, in bytes; 0 if it is not known."""
        return int(self.figures.get("peak_requested", 0))

    @property
    def use(self) -> tuple[Any, ...]:
        """What is equal where memory is used alike."""
        names = ("operators", "events", "requested_in_all", "peak_requested")
        return tuple(self.figures.get(name) for name in names)

    @property
    def was_rejected(self) -> bool:
        """Whether the program ended before it used the GPU, as one does that does not know its
        arguments."""
        return not self.figures and not self.is_mistake


class Runs(Protocol):
    """What runs the tries of a search."""

    @property
    def width(self) -> int:
        """How many run at a time."""

    def outcomes(self, questions: Mapping[Key, Question]) -> Iterator[tuple[Key, Tried]]:
        """What each of the questions comes to, by its key, as they end."""


class SideBySide(Generic[Job]):
    """Runs tries, `width` at a time. What a try is while it runs, a subclass knows: `Tries` and the
    clusters."""

    width: int

    def outcomes(self, questions: Mapping[Key, Question]) -> Iterator[tuple[Key, Tried]]:
        """What each of the questions comes to, by its key, as they end."""
        left, running = collections.deque(questions.items()), dict[Job, Key]()
        try:
            while left or running:
                while left and len(running) < self.width:
                    key, question = left.popleft()
                    running[self.begin(question)] = key
                job = self.wait(running)
                yield running.pop(job), self.came(job)
        finally:
            self.drop(list(running))

    @abstractmethod
    def begin(self, question: Question) -> Job:
        """Begins a try."""

    @abstractmethod
    def wait(self, running: Collection[Job]) -> Job:
        """The next of these that ends."""

    @abstractmethod
    def came(self, job: Job) -> Tried:
        """What one that has ended came to."""

    @abstractmethod
    def drop(self, running: Collection[Job]) -> None:
        """Ends tries that nobody waits for any more."""


def held(which: str, reserved: int, only_just: bool) -> str:
    """What is reserved by something that fits, as it goes on behind that."""
    if only_just:
        return f", if only just: with more room {which} would reserve {format_bytes(reserved)}"
    return f": {which} reserves {format_bytes(reserved)}"


def all_of(answers: Iterable[bool | None]) -> bool | None:
    """Whether all are true: False if one is not, else None if one is not known."""
    found = set(answers)
    if False in found:
        return False
    return None if None in found else True


def as_counted(at_most: bool | None, what: str, sure: str = "") -> str:
    """What is said behind an answer that something fits, by whether it does with the most that it
    may need. `sure` says with which other it would, as "5 would"."""
    if at_most:
        return ""
    if at_most is None:
        return f" That is as counted: no upper bound is known of what {what} may need."
    other = f" {sure}." if sure else ""
    return f" That is as counted: with the most that {what} may need it would not fit.{other}"


@dataclass
class _Process:
    number: int
    output: IO[bytes]


class Tries(SideBySide[Connection]):
    """Runs tries in processes of this machine. PyTorch is imported when it is made, so that they
    need not. Use it in a `with` block, which ends what still runs."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._processes: dict[Connection, _Process] = {}
        _import_what_all_need()

    def __enter__(self) -> Tries:
        gc.collect()
        gc.freeze()  # else each try copies what its collections look at
        return self

    def __exit__(self, *error: object) -> None:
        gc.unfreeze()
        self.drop(list(self._processes))

    def drop(self, running: Collection[Connection]) -> None:
        """Ends them politely, so that their folders are removed, then at once."""
        ended = {one: self._processes.pop(one) for one in running if one in self._processes}
        for number in (signal.SIGTERM, signal.SIGTERM):
            for one in ended.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.number, number)
            if ended:
                time.sleep(APART)
        for connection, one in ended.items():
            os.waitpid(one.number, 0)
            connection.close()
            one.output.close()

    def begin(self, question: Question) -> Connection:
        """Forks this process."""
        ours, theirs = Pipe(duplex=False)
        output = tempfile.TemporaryFile()  # noqa: SIM115  (it is closed when it has been read)
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        process = os.fork()
        if not process:
            ours.close()
            _be_a_try(question, theirs, output, parent)
        theirs.close()
        self._processes[ours] = _Process(process, output)
        return ours

    def wait(self, running: Collection[Connection]) -> Connection:
        """The first that answers, or ends without."""
        connection = wait(list(running))[0]
        assert isinstance(connection, Connection)
        return connection

    def came(self, job: Connection) -> Tried:
        """Its figures, and what it printed."""
        try:
            found = json.loads(job.recv_bytes())
        except (EOFError, OSError):
            found = None
        one = self._processes[job]
        os.waitpid(one.number, 0)
        del self._processes[job]
        job.close()
        with one.output:
            printed = _last_lines(one.output)
        if found is None:  # the process outside it has said why
            error = (printed.splitlines() or ["it ended without an answer"])[-1]
            return Tried({}, error.removeprefix("bfc: "), printed)
        return Tried(found["figures"], found["error"], printed, found["is_mistake"])


def _import_what_all_need() -> None:
    """PyTorch, and all of it that a prediction imports. Raises RuntimeError where no fork can make
    a prediction."""
    guard.supported_torch()
    from bfc_tools.predicting import cuda_module, fake_torch, hooks, nvml, recorder, rules

    del cuda_module, hooks, nvml, recorder, rules
    if fake_torch.engine_runs:
        raise RuntimeError(
            "this process has made a prediction, and in a fork PyTorch makes no backward pass "
            "then: search in another process, or before the prediction"
        )
    guard.load()
    fake_torch.Mode()  # which imports torch._dynamo


def _be_a_try(question: Question, answers: Connection, output: IO[bytes], parent: int) -> NoReturn:
    """What a forked process does: it becomes the process outside of another one, which runs the
    program, and ends when that does."""
    code = 1
    try:
        os.setsid()  # Ctrl-C is for the process that waits
        kernel.die_with_parent(signal.SIGTERM)
        if os.getppid() == parent:
            _redirect(output)
            outside.begin(question.real_files)
            _answer(question, answers)
            code = 0
    except SystemExit as end:  # the process outside
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        print(f"bfc: {error}", file=sys.stderr)
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)


def _redirect(output: IO[bytes]) -> None:
    """What the process prints goes to a file, and there is nothing to read. Signals are as in a new
    process."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    text = io.TextIOWrapper(open(2, "wb", 0, closefd=False), write_through=True)  # noqa: SIM115
    text.reconfigure(errors="backslashreplace")
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stderr = text


def _answer(question: Question, answers: Connection) -> None:
    """Runs the program in this process, and sends what was found."""
    figures: dict[str, Any] = {}
    failed_itself = False
    try:
        figures = question.answer()
        error = figures["error"] or ""
    except Exception as problem:
        error, failed_itself = in_words(problem, TO_DO), is_mistake(problem)
        if failed_itself:
            traceback.print_exc()
    found = {"figures": figures, "error": error, "is_mistake": failed_itself}
    answers.send_bytes(json.dumps(found, default=str).encode())
    if outside.link is not None:
        outside.link.answered(0)


def _last_lines(file: IO[bytes]) -> str:
    file.seek(0)
    lines = collections.deque(file, LINES)
    return b"".join(lines).decode(errors="backslashreplace").rstrip()
