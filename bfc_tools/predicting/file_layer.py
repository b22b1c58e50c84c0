"""Files that a program writes with Python's functions lie in a tree of its own, not in the user's.

For a block in a program that runs, and where the kernel gives a process no mounts of its own. What
goes another way is refused: by an audit hook, and by the kernel under Landlock.

The tree begins empty. A folder becomes one of the tree's own when something in it changes, and has
links for files and folders of the user's that are asked for; a file does when it is written to, as
a copy. So the system itself lists, renames and removes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import glob
import inspect
import os
import shutil
import sqlite3
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from bfc.compiling import cache
from bfc.files import replacing
from bfc_tools.predicting import cudnn

#: The functions of Python that get paths, by what they do: they look, change what is known of a
#: file, make something, take it away, or more than that.
LOOKING = (
    *("stat", "lstat", "access", "readlink", "statvfs", "getxattr", "listxattr", "pathconf"),
    *("listdir", "chdir", "fchdir"),
)
CHANGING = (
    *("chmod", "fchmod", "chown", "lchown", "fchown", "utime", "truncate", "setxattr"),
    "removexattr",
)
MAKING = ("mkdir", "mkfifo", "mknod", "symlink")
TAKING = ("unlink", "remove", "rmdir", "rename", "replace")
OWN = ("open", "link", "scandir", "getcwd", "getcwdb")
#: The same, of a path, for those that get an open file.
OF_PATHS = {"fchmod": "chmod", "fchown": "chown", "fchdir": "chdir"}
#: What they call their paths.
PATHS = ("fd", "path", "src", "dst")
OPTIONS = ("buffering", "encoding", "errors", "newline", "closefd", "opener")
#: The functions as they are before any of them is replaced.
REAL = SimpleNamespace(
    open_file=open,
    connect=sqlite3.connect,
    **{name: getattr(os, name) for name in (*LOOKING, *CHANGING, *MAKING, *TAKING, *OWN)},
)
OF_LINKS = (REAL.lstat, REAL.readlink, REAL.lchown, REAL.link)
#: Folders that are no user's.
OF_THE_SYSTEM = ("/dev/", "/proc/", "/sys/")
#: How the text of a link begins that stands for what it leads to.
STANDS_FOR = "//"
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
#: What the audit hook looks at: which arguments are paths.
EVENTS = {
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate"), (0,)),
    **dict.fromkeys(("os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr"), (0,)),
    "os.rename": (0, 1),
    "os.link": (1,),
    "os.symlink": (1,),
    "sqlite3.connect": (0,),
}


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


def write(path: str, data: bytes, folder: str) -> None:
    """Writes a file, after making `folder` if that is not empty."""
    if folder:
        os.makedirs(folder, exist_ok=True)
    with replacing(path) as file:
        file.write(data)


class Layer:
    """The tree of a program, in `folder`. Names of files are absolute, and have no links but for
    their last part."""

    def __init__(self, folder: str) -> None:
        self.folder = os.path.realpath(folder)
        self._tree = f"{self.folder}/tree"
        self._gone: set[str] = set()  # what the program has removed, moved or moved something to
        self._thread = threading.local()
        self._lock, self._process = threading.RLock(), os.getpid()
        self._least = min(FREE, free(folder) // 2)
        #: Whether the program has changed anything.
        self.changed = False
        self._last: Changes | None = None
        os.mkdir(self._tree)
        self.table = self._functions()

    # -- names ----------------------------------------------------------------------------------

    def find(self, path: Any, follow: bool = True, dir_fd: int | None = None) -> tuple[str, str]:
        """The name of what a path leads to, and where that lies now. The name's last part may be a
        link unless `follow`."""
        text = f"/proc/self/fd/{path}" if isinstance(path, int) else os.fsdecode(path)
        if not text:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)
        if text[0] != "/":
            text = f"{self.getcwd() if dir_fd is None else self.find(dir_fd)[0]}/{text}"
        with self._locked(), self.aside():
            return self._walk(text, follow or isinstance(path, int))

    def _walk(self, text: str, follow: bool) -> tuple[str, str]:
        rest, links = text.split("/")[::-1], 0
        name, actual = "", self._tree
        while rest:
            part = rest.pop()
            if part in ("", ".", ".."):
                if part:
                    REAL.stat(f"{actual}/.")  # raises if it is no folder
                if part == "..":
                    rest += os.path.dirname(name).split("/")[::-1]
                    name, actual = "", self._tree
                continue
            if actual == self._tree + name:
                self._meet(f"{name}/{part}")
            link = _link(f"{actual}/{part}")
            if link.startswith(STANDS_FOR):
                name, actual = f"{name}/{part}", link[1:]
            elif link and (rest or follow):
                links += 1
                if links > MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), text)
                link = self._called(link)
                rest += link.split("/")[::-1]
                if link[0] == "/":
                    name, actual = "", self._tree
            else:
                name, actual = f"{name}/{part}", f"{actual}/{part}"
        return name or "/", actual

    def _meet(self, name: str) -> None:
        """Lets a folder of the tree have what is of this name in the user's."""
        if not os.path.lexists(self._tree + name) and os.path.lexists(name):
            above = name
            while above not in self._gone and above != "/":
                above = os.path.dirname(above)
            if above == "/":
                _stand_for(name, self._tree + name)

    def _called(self, actual: str) -> str:
        if f"{actual}/".startswith(f"{self._tree}/"):
            return actual[len(self._tree) :] or "/"
        return actual

    def _place(self, name: str) -> str:
        """Where what has this name is the program's own, if it is."""
        real = f"{name}/".startswith((f"{self.folder}/", *OF_THE_SYSTEM))
        return name if real else self._tree + name

    # -- changes --------------------------------------------------------------------------------

    def _locked(self) -> threading.RLock:
        """The lock of this process: in one that was forked, nobody may be left to release it."""
        if self._process != os.getpid():
            self._lock, self._process = threading.RLock(), os.getpid()
        return self._lock

    def inside(self, name: str) -> str:
        """Where a file may be made, moved or removed, and a folder be changed."""
        place = self._place(name)
        with self._locked(), self.aside():
            if place != name and name != "/":
                self.changed = True
                self.inside(os.path.dirname(name))
                self._meet(name)
            link = _link(place)
            if link.startswith(STANDS_FOR) and os.path.isdir(link):
                new = tempfile.mkdtemp(dir=self.folder)
                shutil.copystat(link, new)
                os.chmod(new, os.stat(new).st_mode | 0o700)
                os.unlink(place)
                os.rename(new, place)
                for one in os.listdir(link) if link[1:] != name else ():  # it has been moved
                    _stand_for(f"{link[1:]}/{one}", f"{place}/{one}")
        return place

    def own(self, name: str, copy: bool = True) -> str:
        """Where a file may be changed: it is copied there, if it is to have what it had."""
        place = self.inside(name)
        with self._locked(), self.aside():
            link = _link(place)
            size = os.stat(link).st_size if copy and link.startswith(STANDS_FOR) else 0
            if free(self.folder) - size < self._least:
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, but for the rest", name)
            if link.startswith(STANDS_FOR):
                number, new = tempfile.mkstemp(dir=self.folder)
                os.close(number)
                if copy:
                    shutil.copyfile(link, new)
                shutil.copystat(link, new)
                os.rename(new, place)
        return place

    def changes(self) -> Changes:
        """What the program has changed, up to now or up to its end."""
        if self._last is not None:
            return self._last
        with self.aside():
            return summed_up(self._changed())

    def _changed(self) -> Iterator[tuple[str, int | None]]:
        for top, folders, files in os.walk(self._tree):
            for path in [f"{top}/{name}" for name in (*folders, *files)]:
                name, link, found = self._called(path), _link(path), os.lstat(path)
                if stat.S_ISREG(found.st_mode):
                    yield name, found.st_blocks * 512
                elif link.startswith(STANDS_FOR) and link[1:] != name:
                    yield name, 0
        for name in self._gone:
            if os.path.lexists(name) and not os.path.lexists(self._tree + name):
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
        follow = not flags & os.O_NOFOLLOW and flags & NEW != NEW
        name, actual = self.find(path, follow, dir_fd)
        kind, moved = _kind(actual), actual not in (name, self._tree + name)
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            actual = self.inside(name)
        elif flags & WRITES and (stat.S_ISREG(kind) or (not kind and flags & os.O_CREAT)):
            actual = self.own(name, copy=not flags & os.O_TRUNC)
        elif moved and (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # its number has to lead there
            actual = self.own(name)
        with self.aside():  # of the user's, it opens no file to write
            return int(REAL.open(actual, flags, mode))

    def open_file(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        """As `open`."""
        options |= dict(zip(OPTIONS, args, strict=False))
        if isinstance(file, int):
            return REAL.open_file(file, mode, **options)
        file = os.fspath(file)
        options["opener"] = options.get("opener") or functools.partial(self.open, mode=0o666)
        self._thread.opens = file  # the audit hook is asked before the opener
        try:
            return REAL.open_file(file, mode, **options)
        finally:
            self._thread.opens = None

    def connect(self, database: Any, *args: Any, **options: Any) -> Any:
        """As `sqlite3.connect`, of files without a URI; no others are attached."""
        text = os.fsdecode(database)
        if text and text[0] != ":" and not text.startswith("file:"):
            name, _ = self.find(database)
            database, *_ = [self.own(name + end) for end in ("", "-wal", "-shm", "-journal")]
        found = REAL.connect(database, *args, **options)
        found.set_authorizer(_attaches_none)
        return found

    def _look(self, name: str, actual: str) -> str:
        if actual == self._tree + name and os.path.isdir(name):
            for one in os.listdir(name):
                self._meet(os.path.join(name, one))
        return actual

    def _change(self, name: str, actual: str) -> str:
        os.lstat(actual)  # raises if it is not there
        return self.own(name)

    def _make(self, name: str, actual: str) -> str:
        self.inside(os.path.dirname(name))
        if self._place(name) != name:
            self._meet(name)
        return self._place(name)

    def _take(self, name: str, actual: str) -> str:
        os.stat(f"{os.path.dirname(actual)}/.")  # raises if it is no folder
        place = self.inside(name)
        if place != name and not _link(place):
            for top, _, _ in os.walk(place):  # which is whole then
                self._look(self._called(top), top)
        return place

    def call(self, real: Any, roles: tuple[Any, ...], *args: Any, **options: Any) -> Any:
        """What one of Python's functions does with files where they are the program's own, each of
        them found as its role says."""
        args += tuple(options.pop(name) for name in PATHS if name in options)
        follow = options.get("follow_symlinks", real not in OF_LINKS)
        folder = options.pop("dir_fd", None)
        places, names = list(args or (".",)), set()
        for at, (role, path) in enumerate(zip(roles, places, strict=False)):
            path = "." if path is None else path
            whole = real in (REAL.listdir, REAL.chdir)
            if role is None or (isinstance(path, int) and role == self._look and not whole):
                continue
            beside = options.pop(("src_dir_fd", "dst_dir_fd")[at], folder)
            name, actual = self.find(path, follow and role in (self._look, self._change), beside)
            with self.aside():
                place = role(name, actual) if role != self._look or whole else actual
            names.add(name)
            if not isinstance(path, int):
                is_bytes = isinstance(os.fspath(path), bytes)
                places[at] = os.fsencode(place) if is_bytes else place
            elif role != self._look or _kind(place):  # it may have been moved since
                places[at] = place
        with self.aside():
            found = real(*places, **options)
        if real is REAL.listdir and places[0] in (self.folder, os.fsencode(self.folder)):
            found = [one for one in found if os.fsencode(one) == b"tmp"]
        if self._take in roles and len(names) == len(roles):
            self._gone |= names
        return found

    def scandir(self, path: Any = ".") -> _Entries:
        """As `os.scandir`."""
        path = "." if path is None else path
        name, _ = self.find(path)
        given = path if isinstance(path, int) else os.fspath(path)
        look = functools.partial(self.call, REAL.stat, (self._look,))
        names = self.call(REAL.listdir, (self._look,), path)
        return _Entries(iter([_Entry(look, name, given, one) for one in names]))

    def getcwd(self) -> str:
        """As `os.getcwd`."""
        return self._called(REAL.getcwd())

    def _functions(self) -> dict[Any, Any]:
        """What stands in the place of Python's functions, by these."""
        made: dict[Any, Any] = {
            REAL.open_file: self.open_file,
            REAL.connect: self.connect,
            REAL.getcwdb: lambda: os.fsencode(self.getcwd()),
            **{getattr(REAL, name): getattr(self, name) for name in ("open", "scandir", "getcwd")},
        }
        roles: dict[str, tuple[Any, ...]] = {
            **dict.fromkeys(LOOKING, (self._look,)),
            **dict.fromkeys(CHANGING, (self._change,)),
            **dict.fromkeys(MAKING, (self._make,)),
            **dict.fromkeys(TAKING, (self._take,)),
            **dict.fromkeys(("rename", "replace"), (self._take, self._take)),
            "symlink": (None, self._make),
            "link": (self._change, self._make),
        }
        for name, each in roles.items():
            real = getattr(REAL, OF_PATHS.get(name, name))
            made[getattr(REAL, name)] = functools.partial(self.call, real, each)
        return {real: self._of_the_program(real, ours) for real, ours in made.items()}

    def _of_the_program(self, real: Callable[..., Any], ours: Callable[..., Any]) -> Any:
        looks = real.__name__ in (*LOOKING, "scandir")

        @functools.wraps(real)
        def call(*args: Any, **options: Any) -> Any:
            if self.is_aside() or (looks and not self.changed):
                return real(*args, **options)
            try:
                return ours(*args, **options)
            except OSError as error:
                if real is REAL.access:
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
            path = REAL.readlink(f"/proc/self/fd/{path}")
            return path[0] != "/" or self._place(path) == path or not _kind(path)
        text = os.fsdecode(path)
        if text[:1] != "/":
            return text in ("", ":memory:") or "mode=memory" in text
        with self.aside():
            actual = f"{os.path.realpath(os.path.dirname(text))}/{os.path.basename(text)}"
            return self._place(actual) == actual


def _kind(path: str) -> int:
    """The mode of what lies there, or 0."""
    try:
        return int(REAL.lstat(path).st_mode)
    except OSError:
        return 0


def _link(path: str) -> str:
    """What a link says, or nothing. Those of /proc that lead to no file are none."""
    try:
        text: str = REAL.readlink(path)
    except OSError:
        return ""
    folder, last = os.path.split(path)
    if folder.startswith("/proc/") and folder.endswith("/fd"):
        users = last in ("0", "1", "2")  # standard output and the like
        return "" if users or not _kind(text) else text
    return text


def _stand_for(path: str, place: str) -> None:
    """Puts a link into the tree for a file or a folder; one for a link says the same."""
    link = _link(path)
    text = f"/{link.lstrip('/')}" if link[:1] == "/" else link
    os.symlink(text or f"/{path}", place)


def _attaches_none(action: int, name: str | None, *_: object) -> int:
    refused = action == sqlite3.SQLITE_ATTACH and name not in ("", ":memory:")
    return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK


class _Entry:
    """As `os.DirEntry`."""

    def __init__(self, look: Callable[..., Any], folder: str, given: Any, name: Any) -> None:
        self._look, self._at = look, os.path.join(folder, os.fsdecode(name))
        self.name = name
        self.path: Any = name if isinstance(given, int) else os.path.join(given, name)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        found: os.stat_result = self._look(self._at, follow_symlinks=follow_symlinks)
        return found

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def _is(self, kind: int, follow: bool) -> bool:
        try:
            return stat.S_IFMT(self.stat(follow_symlinks=follow).st_mode) == kind
        except FileNotFoundError:
            return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_IFDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_IFREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_IFLNK, False)

    def is_junction(self) -> bool:
        return False


@dataclasses.dataclass
class _Entries(Iterator[_Entry]):
    """As what `os.scandir` returns."""

    _entries: Iterator[_Entry]

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


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
        for value in list(known):
            if id(value) in by_id:
                known.remove(value)
                known.add(by_id[id(value)])


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
