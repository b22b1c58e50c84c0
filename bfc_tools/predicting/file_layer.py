"""Files that a program writes with Python's functions lie in a tree of its own, not in the user's.

For a block in a program that runs, and where the kernel gives a process no mounts of its own. What
goes another way is refused: by an audit hook, and by the kernel under Landlock.

The tree begins empty. A folder of the user's is made there when something in it changes, and a file
is copied there when it is written to, or moved. A name has what the tree has, else what the user
has, unless the program has taken that away. CALLS says what each function does with its paths.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import inspect
import itertools
import os
import shutil
import sqlite3
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bfc.compiling import cache
from bfc.files import replacing
from bfc_tools.predicting import cudnn

#: What functions of `os` do with each of their paths: they look (L), change what is there (C), make
#: something (M), move it (R), or take it away (T).
CALLS = {
    **dict.fromkeys(("stat", "lstat", "access", "readlink", "statvfs", "pathconf"), "L"),
    **dict.fromkeys(("getxattr", "listxattr", "chdir", "fchdir"), "L"),
    **dict.fromkeys(("chmod", "fchmod", "chown", "lchown", "fchown", "utime", "truncate"), "C"),
    **dict.fromkeys(("setxattr", "removexattr"), "C"),
    **dict.fromkeys(("mkdir", "mkfifo", "mknod"), "M"),
    **dict.fromkeys(("unlink", "remove", "rmdir"), "T"),
    **dict.fromkeys(("rename", "replace"), "RT"),
    "symlink": "-M",
    "link": "CM",
}
#: Those that have a method of their own.
OWN = ("open", "listdir", "scandir", "getcwd", "getcwdb")
LOOK = ("listdir", "scandir", *(name for name, roles in CALLS.items() if roles == "L"))
#: Those that do not follow a link at the end of a path.
OF_LINKS = ("lstat", "readlink", "lchown", "link")
#: The same, of a path, for those that get an open file.
OF_PATHS = {"fchmod": "chmod", "fchown": "chown", "fchdir": "chdir"}
#: What they call their paths.
PATHS = ("fd", "path", "src", "dst")
OPTIONS = ("buffering", "encoding", "errors", "newline", "closefd", "opener")
#: The functions as they are before any of them is replaced.
REAL = {name: getattr(os, name) for name in (*CALLS, *OWN)}
OPEN, CONNECT = open, sqlite3.connect
#: Folders that are no user's.
OF_THE_SYSTEM = ("/dev/", "/proc/", "/sys/")
NEW = os.O_CREAT | os.O_EXCL
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
MOST_LINKS = 40
#: What a program has to leave free on the disk, in bytes, or half of what is free at first.
FREE = 1 << 30
#: The most files that are listed.
MOST = 10_000
REFUSED = (
    "the prediction throws away what a program writes, and cannot do so for this way to write; "
    "--real-files, or real_files=True, lets it write"
)
#: What the audit hook looks at: which arguments are paths that something happens to.
EVENTS = {
    f"os.{name}": [at for at, role in enumerate(roles) if role not in "L-"]
    for name, roles in CALLS.items()
} | {"sqlite3.connect": [0]}


class Changes(NamedTuple):
    """What a program has done to files, and how many bytes it has written."""

    written: list[str]
    removed: list[str]
    nbytes: int


def summed_up(found: Iterator[tuple[str, int | None]]) -> Changes:
    """Of paths with the bytes that were written there, or None if they were removed. Temporary
    files, what Python compiles and what bfc itself keeps are not listed. Those of the working
    folder come first."""
    here = os.path.join(os.getcwd(), "")
    aside = tuple(f"{one}/" for one in (os.path.realpath(tempfile.gettempdir()), "/dev/shm"))
    ours = os.path.join(os.path.realpath(cache()), "")
    changes, nbytes = Changes([], [], 0), 0
    for path, size in found:
        if path.startswith(ours):
            continue
        nbytes += size or 0
        listed = "/__pycache__/" not in path and (
            path.startswith(here) or not path.startswith(aside)
        )
        if listed and len(changes.written) + len(changes.removed) < MOST:
            (changes.removed if size is None else changes.written).append(path)
    for paths in changes[:2]:
        paths.sort(key=lambda path: (not path.startswith(here), path))
    return changes._replace(nbytes=nbytes)


def free(folder: str) -> int:
    """The bytes that are free on the disk of a folder."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def files_below(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """All below a folder that are no folders."""
    for top, _, files in os.walk(folder):
        for path in [f"{top}/{file}" for file in files]:
            with contextlib.suppress(OSError):
                yield path, os.lstat(path)


def write(path: str, data: bytes, folder: str) -> None:
    """Writes a file, after making `folder` if that is not empty."""
    if folder:
        os.makedirs(folder, exist_ok=True)
    with replacing(path) as file:
        file.write(data)


_numbers = itertools.count()  # of files that are on their way into a tree
#: By process: in one that was forked, nobody may be left to release its parent's.
_locks: dict[int, threading.RLock] = {}


def _lock() -> threading.RLock:
    """One thread of a process at a time looks for a file and changes the tree."""
    return _locks.setdefault(os.getpid(), threading.RLock())


class Layer:
    """The tree of a program, in `folder`. Names of files are absolute, and have no links but for
    their last part."""

    def __init__(self, folder: str) -> None:
        self.folder = os.path.realpath(folder)
        self._tree = f"{self.folder}/tree"
        self._gone: set[str] = set()  # of the user's, what the program has taken away or moved
        self._thread = threading.local()
        self._least = min(FREE, free(folder) // 2)
        #: Whether the program has changed anything.
        self.changed = False
        self._last: Changes | None = None
        os.mkdir(self._tree)
        self.table = self._functions()

    # -- names ----------------------------------------------------------------------------------

    def find(self, path: Any, follow: bool = True, dir_fd: int | None = None) -> str:
        """The name of what a path leads to. Its last part may be a link unless `follow`."""
        if isinstance(path, int):
            return self._called(os.readlink(f"/proc/self/fd/{path}"))
        text = os.fsdecode(path)
        if not text:
            raise _error(errno.ENOENT, text)
        if text[0] != "/":
            text = f"{self.getcwd() if dir_fd is None else self.find(dir_fd)}/{text}"
        rest, name, links = text.split("/")[::-1], "/", 0
        while rest:
            part = rest.pop()
            if part:
                os.stat(f"{self.at(name)}/.")  # raises if it is no folder
            if part in ("", ".", ".."):
                name = os.path.dirname(name) if part == ".." else name
                continue
            found = os.path.join(name, part)
            link = _link(self.at(found)) if rest or follow else ""
            if not link:
                name = found
                continue
            links += 1
            if links > MOST_LINKS:
                raise _error(errno.ELOOP, text)
            link = self._called(link)
            rest += link.split("/")[::-1]
            name = "/" if link[0] == "/" else name
        return name

    def _called(self, actual: str) -> str:
        if f"{actual}/".startswith(f"{self._tree}/"):
            return actual[len(self._tree) :] or "/"
        return actual

    def _place(self, name: str) -> str:
        """Where what has this name is the program's own, if it is."""
        real = f"{name}/".startswith((f"{self.folder}/", *OF_THE_SYSTEM))
        return name if real else self._tree + name

    def _is_gone(self, name: str) -> bool:
        while name not in self._gone and name != "/":
            name = os.path.dirname(name)
        return name != "/"

    def at(self, name: str) -> str:
        """Where what has this name lies now."""
        place = self._place(name)
        return place if os.path.lexists(place) or self._is_gone(name) else name

    def names(self, name: str) -> list[str]:
        """What is in a folder."""
        at = self.at(name)
        found = os.listdir(at)
        if at != name and os.path.isdir(name) and not self._is_gone(name):
            more = set(os.listdir(name)).difference(found)
            found += [one for one in more if os.path.join(name, one) not in self._gone]
        return found

    # -- changes --------------------------------------------------------------------------------

    def inside(self, name: str) -> str:
        """Where a file may be made, in a folder of the tree's."""
        place, folder = self._place(name), os.path.dirname(name)
        os.stat(f"{self.at(folder)}/.")  # raises if it is no folder
        if place != name and name != "/":
            self.changed = True
            self.own(folder)
        return place

    def own(self, name: str, copy: bool = True) -> str:
        """Where a file may be changed, or what a folder has. It is put there if it is not there; a
        file is empty then unless `copy`."""
        place = self.inside(name)
        at = self.at(name)
        if at == place or not os.path.lexists(at):
            return place
        found = os.lstat(at)
        new = f"{self.folder}/{os.getpid()}-{next(_numbers)}"
        if stat.S_ISLNK(found.st_mode):
            os.symlink(os.readlink(at), new)
        elif stat.S_ISDIR(found.st_mode):
            os.mkdir(new)
            shutil.copystat(at, new)
            os.chmod(new, found.st_mode | 0o700)
        else:
            self._room(found.st_size if copy else 0, name)
            if copy and not stat.S_ISREG(found.st_mode):
                raise PermissionError(errno.EPERM, REFUSED, name)
            if copy:
                shutil.copyfile(at, new)
            else:
                OPEN(new, "x").close()
            shutil.copystat(at, new)
        os.rename(new, place)
        return place

    def _room(self, nbytes: int, name: str) -> None:
        if free(self.folder) - nbytes < self._least:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, but for the rest", name)

    def whole(self, name: str) -> str:
        """Where all that has this name lies, so that it may be moved."""
        place = self.own(name)
        if stat.S_ISDIR(_kind(place)) and place != name:
            for one in self.names(name):
                self.whole(os.path.join(name, one))
        return place

    @contextlib.contextmanager
    def _emptied(self, name: str) -> Iterator[str]:
        """Where a file stands for one of the user's, or a folder with one in it that is to be taken
        away: whether that may be is the system's to say, and if not, nothing has changed."""
        kind, place = _kind(self.at(name)), self._place(name)
        made = kind and not _kind(place) and not stat.S_ISDIR(kind)
        with contextlib.ExitStack() as stack:
            self.own(name, copy=False)
            if stat.S_ISDIR(kind) and place != name:
                for one in self.names(name)[:1]:
                    stack.enter_context(self._emptied(os.path.join(name, one)))
            if made:
                stack.callback(Path(place).unlink, missing_ok=True)
            yield place
            if made:
                stack.pop_all()

    def changes(self) -> Changes:
        """What the program has changed, up to now or up to its end."""
        if self._last is not None:
            return self._last
        with self.aside():
            return summed_up(self._changed())

    def _changed(self) -> Iterator[tuple[str, int | None]]:
        for path, found in files_below(self._tree):
            if stat.S_ISREG(found.st_mode):
                yield self._called(path), found.st_blocks * 512
        for name in self._gone:
            if not os.path.lexists(self._tree + name):
                yield name, None

    def end(self) -> None:
        """What it has changed is what it has changed up to now."""
        self._last = self.changes()

    def write(self, path: str, data: bytes, folder: str = "") -> None:
        """Writes a real file, after making `folder`."""
        with self.aside():
            write(path, data, folder)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What this thread does here is the prediction's own, and real."""
        before = self.is_aside()
        self._thread.aside = True
        try:
            yield
        finally:
            self._thread.aside = before

    def is_aside(self) -> bool:
        """Whether what this thread does is the prediction's own."""
        return getattr(self._thread, "aside", False)

    # -- Python's functions ---------------------------------------------------------------------

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """As `os.open`."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.aside())
            with _lock():
                follow = not flags & os.O_NOFOLLOW and flags & NEW != NEW
                name = self.find(path, follow, dir_fd)
                at = self.at(name)
                kind = _kind(at)
                if flags & os.O_TMPFILE == os.O_TMPFILE:
                    at = self.own(name)
                elif flags & WRITES and not kind and flags & os.O_CREAT:
                    self._room(0, name)
                    at = self.inside(name)
                elif flags & WRITES and stat.S_ISREG(kind) and flags & NEW != NEW:
                    self._room(0, name)
                    if flags & os.O_TRUNC:
                        at = stack.enter_context(self._emptied(name))
                    else:
                        at = self.own(name)
            return int(REAL["open"](at, flags, mode))

    def open_file(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        """As `open`."""
        options |= dict(zip(OPTIONS, args, strict=False))
        if isinstance(file, int):
            return OPEN(file, mode, **options)
        file = os.fspath(file)
        options["opener"] = options.get("opener") or functools.partial(self.open, mode=0o666)
        self._thread.opens = file  # the audit hook is asked before the opener
        try:
            return OPEN(file, mode, **options)
        finally:
            self._thread.opens = None

    def connect(self, database: Any, *args: Any, **options: Any) -> Any:
        """As `sqlite3.connect`, of files without a URI; no others are attached."""
        text = os.fsdecode(database)
        if text and text[0] != ":" and not text.startswith("file:"):
            name = self.find(database)
            database, *_ = [self.own(name + end) for end in ("", "-wal", "-shm", "-journal")]
        found = CONNECT(database, *args, **options)
        found.set_authorizer(_attaches_none)
        return found

    def listdir(self, path: Any = ".") -> list[Any]:
        """As `os.listdir`."""
        found = self.names(self.find("." if path is None else path))
        is_bytes = not isinstance(path, int | None) and isinstance(os.fspath(path), bytes)
        return [os.fsencode(one) for one in found] if is_bytes else found

    def scandir(self, path: Any = ".") -> _Entries:
        """As `os.scandir`."""
        path = "." if path is None else path
        name = self.find(path)
        return _Entries(_Entry(name, path, one) for one in self.listdir(path))

    def getcwd(self) -> str:
        """As `os.getcwd`."""
        return self._called(REAL["getcwd"]())

    def call(self, function: str, *args: Any, **options: Any) -> Any:
        """What a function of CALLS does where files are the program's own."""
        real = REAL[OF_PATHS.get(function, function)]
        places = [*args, *(options.pop(name) for name in PATHS if name in options)]
        follow = options.get("follow_symlinks", function not in OF_LINKS)
        folder, taken = options.pop("dir_fd", None), []
        with contextlib.ExitStack() as stack:
            for at, role in enumerate(CALLS[function][: len(places)]):
                path, beside = places[at], options.pop(("src_dir_fd", "dst_dir_fd")[at], folder)
                is_open = isinstance(path, int)
                if role == "-" or (is_open and role == "L" and real is not REAL["chdir"]):
                    continue
                name = self.find(path, follow and role in "LC", beside)
                if is_open and self._place(name) == name:  # a socket, say
                    continue
                place = self._put(role, name, stack)
                taken += [name] if role in "RT" else []
                is_bytes = not is_open and isinstance(os.fspath(path), bytes)
                places[at] = os.fsencode(place) if is_bytes else place
            found = real(*places, **options)
        self._gone.update(name for name in taken if os.path.lexists(name))
        return found

    def _put(self, role: str, name: str, stack: contextlib.ExitStack) -> str:
        """Where a file is what a function needs for its role."""
        if role == "R":
            return self.whole(name)
        if role == "T":
            return stack.enter_context(self._emptied(name))
        if role == "M":
            if os.path.lexists(self.at(name)):
                raise _error(errno.EEXIST, name)
            return self.inside(name)
        return self.at(name) if role == "L" else self.own(name)

    def _functions(self) -> dict[Any, Any]:
        """What stands in the place of Python's functions, by these."""
        made: dict[Any, Any] = {OPEN: self.open_file, CONNECT: self.connect}
        made |= {REAL[name]: functools.partial(self.call, name) for name in CALLS}
        made |= {REAL[name]: getattr(self, name) for name in OWN[:-1]}
        made[REAL["getcwdb"]] = lambda: os.fsencode(self.getcwd())
        return {real: self._of_the_program(real, ours) for real, ours in made.items()}

    def _of_the_program(self, real: Callable[..., Any], ours: Callable[..., Any]) -> Any:
        looks = real.__name__ in LOOK

        @functools.wraps(real)
        def call(*args: Any, **options: Any) -> Any:
            if self.is_aside() or (looks and not self.changed):
                return real(*args, **options)
            try:
                if real in (OPEN, REAL["open"]):  # which may wait, and call the program
                    return ours(*args, **options)
                with _lock(), self.aside():
                    return ours(*args, **options)
            except OSError as error:
                if real is REAL["access"]:
                    return False
                if error.filename is not None and args:
                    error.filename = args[0]
                raise

        return call

    # -- what the audit hook asks ---------------------------------------------------------------

    def may(self, path: Any) -> bool:
        """Whether the system may change a path as it is."""
        if path is None or path is getattr(self._thread, "opens", None) or self.is_aside():
            return True
        if isinstance(path, int):
            path = REAL["readlink"](f"/proc/self/fd/{path}")
            return path[0] != "/" or self._place(path) == path or not _kind(path)
        text = os.fsdecode(path)
        if text[:1] != "/":
            return text in ("", ":memory:") or "mode=memory" in text
        with self.aside():
            actual = f"{os.path.realpath(os.path.dirname(text))}/{os.path.basename(text)}"
            return self._place(actual) == actual


def _error(number: int, name: str) -> OSError:
    return OSError(number, os.strerror(number), name)


def _kind(path: str) -> int:
    """The mode of what lies there, or 0."""
    try:
        return int(REAL["lstat"](path).st_mode)
    except OSError:
        return 0


def _link(path: str) -> str:
    """What a link says, or nothing. Those of /proc that lead to no file are none."""
    try:
        text: str = REAL["readlink"](path)
    except OSError:
        return ""
    folder, last = os.path.split(path)
    if folder.startswith("/proc/") and folder.endswith("/fd"):
        users = last in ("0", "1", "2")  # standard output and the like
        return "" if users or not _kind(text) else text
    return text


def _attaches_none(action: int, name: str | None, *_: object) -> int:
    refused = action == sqlite3.SQLITE_ATTACH and name not in ("", ":memory:")
    return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK


class _Entry(os.PathLike[Any]):
    """As `os.DirEntry`."""

    def __init__(self, folder: str, given: Any, name: Any) -> None:
        self._at = os.path.join(folder, os.fsdecode(name))
        self.name = name
        self.path: Any = name if isinstance(given, int) else os.path.join(given, name)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self._at, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return os.lstat(self._at).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self._at) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self._at) and (follow_symlinks or not self.is_symlink())

    def is_symlink(self) -> bool:
        return os.path.islink(self._at)

    def is_junction(self) -> bool:
        return False


class _Entries(contextlib.ExitStack):
    """As what `os.scandir` returns."""

    def __init__(self, entries: Iterable[_Entry]) -> None:
        super().__init__()
        self._entries = iter(list(entries))

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __next__(self) -> _Entry:
        return next(self._entries)


# -- putting it in place --------------------------------------------------------------------------


class _Hook:
    """The audit hook. It is there for good once it is there, and does nothing without a layer."""

    def __init__(self) -> None:
        self.layer: Layer | None = None
        self.started: Callable[[str], object] = str
        self._there = False

    def begin(self, layer: Layer, started: Callable[[str], object]) -> None:
        if not self._there:
            self._there = True
            sys.addaudithook(self)
        self.layer, self.started = layer, started

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        layer = self.layer
        if layer is None:
            return
        paths = [args[at] for at in EVENTS.get(event, ())]
        if event == "open" and args[2] & WRITES and not isinstance(args[0], int):
            paths = [args[0]]
        elif event == "subprocess.Popen" and not (
            isinstance(args[1], list) and cudnn.PROGRAM in args[1]
        ):
            self.started(_program(args[0]))
        elif event in ("os.system", "os.posix_spawn", "os.spawn"):
            self.started(_program(args[event == "os.spawn"]))
        for path in paths:
            if not layer.may(path):
                raise PermissionError(errno.EPERM, REFUSED, path)


_hook = _Hook()


def _program(command: Any) -> str:
    """The name of a program that is started."""
    text = os.fsdecode(command) if isinstance(command, (str, bytes, os.PathLike)) else ""
    return os.path.basename(text.split(maxsplit=1)[0]) if text.split() else "a program"


def _swap(table: dict[Any, Any]) -> None:
    """Puts functions in the place of others, wherever a module, or a class of the two modules that
    keep such functions in classes, has them."""
    by_id = {id(old): new for old, new in table.items()}
    ours = sys.modules[__name__]
    for module in [one for one in list(sys.modules.values()) if one is not ours]:
        names = getattr(module, "__dict__", None)
        if type(names) is dict:
            for name, value in list(names.items()):
                if id(value) in by_id:
                    names[name] = by_id[id(value)]
    for module in (glob, tempfile):
        for kind in [one for one in vars(module).values() if isinstance(one, type)]:
            for name, value in list(vars(kind).items()):
                if isinstance(value, staticmethod) and id(value.__func__) in by_id:
                    setattr(kind, name, staticmethod(by_id[id(value.__func__)]))
                elif inspect.isfunction(value) and value.__defaults__:
                    found = value.__defaults__
                    value.__defaults__ = tuple(by_id.get(id(one), one) for one in found)
    for known in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        known.update(new for old, new in table.items() if old in known)


def lay_over(folder: str, started: Callable[[str], object] = str) -> Layer:
    """What the program writes lies in a folder over the user's from now on, and so do temporary
    files. `started` is called with the name of each program that is started."""
    layer = Layer(folder)
    tempfile.tempdir = os.environ["TMPDIR"] = f"{layer.folder}/tmp"
    os.makedirs(tempfile.tempdir, exist_ok=True)
    _hook.begin(layer, started)
    _swap(layer.table)
    return layer


@contextlib.contextmanager
def laid_over(folder: str, started: Callable[[str], object]) -> Iterator[Layer]:
    """The same while this is entered."""
    before, place, here = tempfile.tempdir, os.environ.get("TMPDIR"), os.getcwd()
    layer = lay_over(folder, started)
    try:
        yield layer
    finally:
        _hook.layer = None
        _swap({new: old for old, new in layer.table.items()})
        tempfile.tempdir = before
        os.environ.pop("TMPDIR", None)
        if place is not None:
            os.environ["TMPDIR"] = place
        if os.getcwd() != here:
            os.chdir(here)
