"""The process that stays outside, while a child of it runs a stranger's script apart.

It keeps the folder that the script's files lie in, writes what is to be kept (`--save`, snapshots),
hands signals on, and cleans up, however the child ends. It never imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import select
import shutil
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from bfc.files import replacing
from bfc.units import format_bytes
from bfc_tools.predicting import kernel
from bfc_tools.predicting.file_layer import (
    FREE,
    Changes,
    Layer,
    files_below,
    free,
    lay_over,
    summed_up,
    write,
)
from bfc_tools.scratch import scratch

PREFIX = "bfc-predict-"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Seconds between two looks at the disk, and at whether a child has ended that is about to.
EVERY, AT_THE_END = 0.1, 0.002
#: Two signals within that time are one.
ONE = 0.5
NO_ANSWER = 2
NEITHER = (
    "this system offers bfc no way to keep your files as they are while the script runs: no mount "
    "namespace ({}), and no Landlock ({}). Run it in a copy of its folder, with --real-files"
)


class Outside:
    """What the child sees of the process outside. `apart` says how its files are kept apart:
    "namespace", "landlock", or "" if they are not."""

    def __init__(self, connection: Connection, apart: str):
        self.apart = apart
        self.layer: Layer | None = None
        self._last: Changes | None = None
        self._connection, self._process = connection, os.getpid()
        self._lock = threading.Lock()

    def _ask(self, what: str, *more: Any, data: bytes | None = None) -> Any:
        if os.getpid() != self._process:  # a child of the script's
            return None
        with self._lock:
            self._connection.send_bytes(json.dumps([what, *more]).encode())
            if data is not None:
                self._connection.send_bytes(data)
            answer = json.loads(self._connection.recv_bytes())
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]), answer["filename"])
        return answer["found"]

    def write(self, path: str, data: bytes, folder: str = "") -> None:
        """Writes a real file, after making `folder`. A relative path is one of the folder in which
        the command began."""
        self._ask("write", path, folder, data=data)

    def changes(self) -> Changes:
        """What the script has done to files."""
        if self._last is not None:
            return self._last
        if self.layer is not None:
            return self.layer.changes()
        return Changes(*(self._ask("changes") or ([], [], 0)))

    def end(self) -> None:
        """What it has done is what it has done up to now."""
        self._last = self.changes()

    def answered(self, code: int) -> None:
        """The prediction is told. The process outside is to end with this code."""
        self._ask("answered", code)


#: Stands behind what a snapshot of a prediction holds; pickles end before it.
MARK = b"\npredicted by bfc\n"


def keep(files: Layer | Outside, path: Any, data: bytes) -> str:
    """Writes a snapshot, for the program and for real. Returns its name."""
    name = _free_name(path)
    with replacing(name) as file:
        file.write(data + MARK)
    target = os.path.realpath(name)
    files.write(target, data + MARK, os.path.dirname(target))
    return name


def _free_name(path: Any) -> str:
    """What a snapshot is called, so that it replaces none but those of predictions."""
    name = os.fsdecode(path)
    try:
        with open(name, "rb") as file:
            file.seek(-len(MARK), os.SEEK_END)
            predicted = file.read() == MARK
    except FileNotFoundError:
        predicted = True
    except OSError:  # too short, or no file
        predicted = not os.path.isfile(name)
    stem, end = os.path.splitext(name)
    return name if predicted else f"{stem}.predicted{end}"


#: In a child that runs a script: what is outside.
link: Outside | None = None


def begin(real_files: bool) -> None:
    """Returns in a child, in which files are kept apart, with `link` set. In this process it never
    returns, and raises SystemExit with the code that the child has given, once that has ended.

    Raises OSError or RuntimeError where nothing can be kept apart here; nothing has run then.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError("the working folder is gone: cd to one that is there") from None
    with scratch(PREFIX) as folder:
        for name in ("over", "tmp"):
            os.mkdir(f"{folder}/{name}")
        reasons = []
        for apart in ("",) if real_files else ("namespace", "landlock"):
            keeper = _Keeper(folder, apart)
            if not keeper.fork():
                return
            reason = keeper.ready()
            if reason is None:
                raise SystemExit(keeper.stay())
            reasons.append(reason)
        raise RuntimeError(NEITHER.format(*reasons))


class _Keeper:
    """The process outside."""

    def __init__(self, folder: str, apart: str) -> None:
        self._folder, self._apart = folder, apart
        self._child = 0
        self._code: int | None = None
        self._signals: list[float] = []
        self._full = False

    # -- the child ------------------------------------------------------------------------------

    def fork(self) -> bool:
        """Whether this is the process outside. The child tells whether its files are kept apart."""
        global link
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._connection, theirs = Pipe()
        if self._apart:
            kernel.adopt()
        before = {number: signal.getsignal(number) for number in SIGNALS}
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        parent = os.getpid()
        self._child = os.fork()
        if self._child:
            for number in SIGNALS:
                if before[number] is not signal.SIG_IGN:
                    signal.signal(number, self._hand_on)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            theirs.close()
            return True
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        self._connection.close()
        kernel.die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(NO_ANSWER)
        try:
            if self._apart == "namespace":
                kernel.lay_over(f"{self._folder}/over", self._folder)
                for name in ("rename", "replace"):
                    setattr(os, name, _across(getattr(os, name)))
            elif self._apart == "landlock":
                kernel.keep_below(self._folder)
        except OSError as error:
            theirs.send_bytes(json.dumps(["refused", str(error)]).encode())
            os._exit(NO_ANSWER)
        theirs.send_bytes(b'["ready"]')
        link = Outside(theirs, self._apart)
        if self._apart == "landlock":
            link.layer = lay_over(self._folder)
        return False

    def ready(self) -> str | None:
        """Waits until the child's files are kept apart; else returns why they are not."""
        try:
            what, *reason = json.loads(self._connection.recv_bytes())
        except EOFError:
            what, reason = "refused", ["its process ended"]
        if what == "ready":
            return None
        os.waitpid(self._child, 0)
        return str(reason[0])

    # -- while it runs --------------------------------------------------------------------------

    def _hand_on(self, number: int, frame: object) -> None:
        """The first signal is the child's, which tells what it has found; a second ends it. One
        that a terminal sends to both comes to it twice."""
        now = time.monotonic()
        self._signals.append(now)
        os.kill(self._child, signal.SIGKILL if now - self._signals[0] > ONE else number)
        if now - self._signals[0] > ONE and self._code is None:
            self._code = 128 + number

    def stay(self) -> int:
        """Serves the child until it has ended, and cleans up. Returns the exit code."""
        least = min(FREE, free(self._folder) // 2)
        connection: list[Connection] = [self._connection]
        status = None
        while status is None:
            if select.select(connection, [], [], EVERY if connection else AT_THE_END)[0]:
                try:
                    self._serve()
                except (EOFError, OSError):  # it ends
                    connection = []
                    self._connection.close()
            ended, found = os.waitpid(self._child, os.WNOHANG)
            status = found if ended else None
            if not self._full and free(self._folder) < least:
                self._full = True
                os.kill(self._child, signal.SIGKILL)
        with contextlib.suppress(EOFError, OSError):
            while self._connection.poll():
                self._serve()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if self._apart:
            _end_what_is_left()
        return self._told(os.waitstatus_to_exitcode(status))

    def _serve(self) -> None:
        what, *more = json.loads(self._connection.recv_bytes())
        found: Any = None
        try:
            if what == "write":
                write(more[0], self._connection.recv_bytes(), more[1])
            elif what == "changes":
                found = summed_up(_laid_over(self._folder))
            elif what == "answered":
                self._code = more[0]
            answer = {"found": found}
        except OSError as error:
            answer = {"errno": error.errno, "filename": error.filename}
        self._connection.send_bytes(json.dumps(answer).encode())

    def _told(self, code: int) -> int:
        """The code to end with: it says why, if the child did not."""
        if self._code is not None:
            return self._code
        if self._full:
            what = (
                f"the script wrote {format_bytes(_size(self._folder))}, and the disk "
                f"of {os.path.dirname(self._folder)} is nearly full. TMPDIR names another folder "
                "for what a script writes; --real-files lets it write into its own"
            )
        elif code >= 0:
            what = (
                f"the script ended its process itself (code {code}), before bfc could tell what it "
                "needs. Leave out os._exit, and what ends a process in C"
            )
        else:
            name = signal.Signals(-code).name
            hint = ": this machine may have run out of memory" if -code == signal.SIGKILL else ""
            what = f"the script's process was ended by {name}{hint}; there is no answer"
        with contextlib.suppress(OSError):
            print(f"bfc: {what}", file=sys.stderr, flush=True)
        return NO_ANSWER if code >= 0 or self._full else 128 - code


def _across(real: Callable[..., None]) -> Callable[..., None]:
    """`os.rename` between folders that each have something laid over them, and of one that lies
    below: there the system says that they are on two disks, where without it they may be on one."""

    @functools.wraps(real)
    def call(src: Any, dst: Any, **options: Any) -> None:
        try:
            real(src, dst, **options)
        except OSError as error:
            if error.errno == errno.ESTALE and os.lstat(src).st_nlink > 1:
                return  # two names of one file: without overlays it does nothing then
            if error.errno != errno.EXDEV or options:
                raise
            if os.path.isdir(src) and not os.path.islink(src):
                if os.path.lexists(dst):
                    os.rmdir(dst)
                shutil.copytree(src, dst, symlinks=True)
                shutil.rmtree(src)
            else:
                new = os.fsdecode(dst) + ".renamed"
                shutil.copy2(src, new, follow_symlinks=False)
                real(new, dst)
                os.unlink(src)

    return call


# -- the folder -----------------------------------------------------------------------------------


def _laid_over(folder: str) -> Iterator[tuple[str, int | None]]:
    """The files that lie over others, by the names that the script knows, with their bytes."""
    with open(f"{folder}/over/names", "rb") as file:
        names = [os.fsdecode(name) for name in file.read().split(b"\0")]
    for number, name in enumerate(names):
        upper = f"{folder}/over/{number}"
        for path, found in files_below(upper):
            if stat.S_ISREG(found.st_mode):
                yield name.rstrip("/") + path[len(upper) :], found.st_blocks * 512
            elif stat.S_ISCHR(found.st_mode) and found.st_rdev == 0:
                yield name.rstrip("/") + path[len(upper) :], None


def _size(folder: str) -> int:
    """The bytes on the disk that the files of a folder take."""
    return sum(found.st_blocks * 512 for _, found in files_below(folder))


def _end_what_is_left() -> None:
    """Ends what the script has started and left: its files are gone."""
    me = os.getpid()
    while True:
        with open(f"/proc/{me}/task/{me}/children") as file:
            left = file.read().split()
        for child in left:
            os.kill(int(child), signal.SIGKILL)
            os.waitpid(int(child), 0)
        if not left:
            return
