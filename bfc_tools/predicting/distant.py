"""What a worker of a cluster does for a search: it asks processes that it keeps, each of which has
imported PyTorch once, and forks itself for each try.

The worker itself imports no PyTorch. The program's files are those that the worker finds at the
place where they lie on the machine that asks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from bfc.version import __version__ as ours
from bfc_tools.predicting.asked import Asked
from bfc_tools.predicting.tries import Question, Tried, Tries

#: Seconds for which a process waits for another question.
IDLE = 300.0
#: Variables of the environment that say something of a machine: a worker has its own.
OF_A_MACHINE = ("HOME", "HOSTNAME", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Place:
    """Where a search was begun, and with what. A worker has the same, or says what differs."""

    search: str  # a name of its own
    folder: str
    environment: Mapping[str, str]
    file: str = ""  # of the script
    digest: str = ""
    bfc: str = ours

    @classmethod
    def here(cls, asked: Asked) -> Place:
        """That of this process. A script that cannot be read is said where it is run."""
        folder = os.getcwd()
        file = "" if asked.module else os.path.join(folder, asked.script)
        kept = {name: text for name, text in os.environ.items() if name not in OF_A_MACHINE}
        return cls(f"{socket.gethostname()} {os.urandom(8).hex()}", folder, kept, file, _hash(file))

    def refuse_another(self) -> None:
        """Raises RuntimeError if this machine has not the same bfc, folder and script."""
        where = f"the worker on {socket.gethostname()}"
        if self.bfc != ours:
            raise RuntimeError(f"{where} has bfc {ours}, and this process {self.bfc}")
        if not os.path.isdir(self.folder):
            raise RuntimeError(
                f"{where} has no folder {self.folder}: the workers of a cluster need the program's "
                "files where they lie on this machine"
            )
        if self.file and _hash(self.file) != self.digest:
            raise RuntimeError(f"{where} has another {self.file} than this machine, or none")


def _hash(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""


@dataclass(frozen=True)
class Came:
    """What a try on a worker came to, and which PyTorch it had."""

    where: str
    torch: str
    tried: Tried


def answer(question: Question, place: Place) -> Came:
    """A try. Raises RuntimeError if this worker cannot make it as the machine that asks would."""
    place.refuse_another()
    try:
        torch = version_of("torch")
    except PackageNotFoundError as error:
        where = socket.gethostname()
        raise RuntimeError(
            f"the worker on {where} has no PyTorch, which predictions need"
        ) from error
    tried = None
    while tried is None:  # one that has waited for long may be gone
        tried = _ask(_take(place), question)
    return Came(socket.gethostname(), torch, tried)


def _ask(process: _Process, question: Question) -> Tried | None:
    """What a process answers; None if it had ended before it was asked."""
    try:
        tried = process.ask(question)
    except BaseException:
        process.end()
        raise
    finally:
        with _lock:
            _busy.discard(process)
    with _lock:
        if process.is_alive:
            _idle.setdefault(process.search, []).append(process)
    return tried


def end(search: str) -> None:
    """Ends what this worker keeps for a search, also if it is busy."""
    with _lock:
        for process in [*_idle.pop(search, ()), *(one for one in _busy if one.search == search)]:
            process.end()


class _Process:
    """A process of this worker's, which answers questions of one search."""

    def __init__(self, place: Place) -> None:
        self.search, self._has_answered = place.search, False
        self._connection, theirs = Pipe()
        own = {name: os.environ[name] for name in OF_A_MACHINE if name in os.environ}
        code = f"from {__name__} import serve; serve({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            cwd=place.folder,
            env={**place.environment, **own},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: Question) -> Tried | None:
        """What it answers; None if it has answered before, and is gone."""
        try:
            self._connection.send(question)
            found: Any = self._connection.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            if self._has_answered and not code:
                return None
            return Tried(error=f"the process that makes predictions has ended with {code}")
        if isinstance(found, str):
            raise RuntimeError(f"the worker on {socket.gethostname()}: {found}")
        assert isinstance(found, Tried)
        self._has_answered = True
        return found

    def end(self) -> None:
        """Its tries end with it."""
        self._process.terminate()
        with contextlib.suppress(OSError):
            self._connection.close()


_lock = threading.Lock()
_idle: dict[str, list[_Process]] = {}
_busy: set[_Process] = set()


def _take(place: Place) -> _Process:
    """A process that waits, or a new one."""
    with _lock:
        for process in (waiting := _idle.get(place.search, [])) and waiting[:]:
            waiting.remove(process)
            if process.is_alive:
                break
        else:
            process = _Process(place)
        _busy.add(process)
    return process


def serve(number: int) -> None:
    """What such a process does, until nobody asks any more."""
    with Connection(number) as questions:
        try:
            with Tries(1) as tries:
                while questions.poll(IDLE):
                    ((_, tried),) = tries.outcomes({"": questions.recv()})
                    questions.send(tried)
        except EOFError:
            return
        except (ImportError, RuntimeError) as error:  # it has no PyTorch that is known
            with contextlib.suppress(OSError):
                questions.send(str(error))
