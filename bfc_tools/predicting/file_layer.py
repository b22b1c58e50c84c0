"""Files that a program writes with Python's functions lie over the user's: a folder holds them.

For a block in a program that runs, and where the kernel gives a process no mounts of its own. What
goes another way is refused: by an audit hook, and by the kernel under Landlock. A path of the
program is made absolute and free of links first; then it is looked up in the folder, and where it
was. What is removed is hidden, and what is renamed is copied.
"""

from __future__ import annotations

import contextlib
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
from typing import Any

from bfc.files import replacing
from bfc_tools.predicting import cudnn

#: Functions of a path that look, and that change what is known of a file.
LOOKING = ("stat", "lstat", "access", "readlink", "statvfs", "getxattr", "listxattr", "pathconf")
CHANGING = ("chmod", "chown", "lchown", "utime", "truncate", "setxattr", "removexattr")
OF_FILES = {"fchmod": "chmod", "fchown": "chown"}
OF_LINKS = ("lstat", "readlink", "lchown")
OWN = (
    *("open", "mkdir", "rmdir", "unlink", "remove", "rename", "replace", "link", "symlink"),
    *("listdir", "scandir", "chdir", "fchdir", "getcwd", "getcwdb", "mkfifo", "mknod"),
)
OPTIONS = ("buffering", "encoding", "errors", "newline", "closefd", "opener")
SAME = {"remove": "unlink", "replace": "rename", "fchdir": "chdir"}
#: The functions of Python as they are before any of them is replaced.
REAL = SimpleNamespace(
    open_file=open,
    connect=sqlite3.connect,
    **{name: getattr(os, name) for name in (*LOOKING, *CHANGING, *OF_FILES, *OWN)},
)
#: Folders that are no user's.
OF_THE_SYSTEM = ("/dev/", "/proc/", "/sys/")
NEW = os.O_CREAT | os.O_EXCL
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
MOST_LINKS = 40
#: What the audit hook looks at: which arguments are paths.
EVENTS = {
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate"), (0,)),
    **dict.fromkeys(("os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr"), (0,)),
    "os.rename": (0, 1),
    "os.link": (1,),
    "os.symlink": (1,),
    "sqlite3.connect": (0,),
}


class Layer:
    """What lies over the user's files, in `folder`. Names of files are absolute, and have no links
    but for their last part."""

    def __init__(self, folder: str) -> None:
        self.folder = os.path.realpath(folder)
        self._over = f"{self.folder}/layer"
        self._gone: set[str] = set()  # what is not to be seen below the folder, nor what is in it
        self._cwd: str | None = None
        self._thread = threading.local()
        self._lock = threading.RLock()
        #: Whether anything lies over the user's files.
        self.changed = False
        self.written: list[str] = []
        self.removed: list[str] = []
        os.makedirs(self._over, exist_ok=True)
        self.table = self.functions()

    # -- names ----------------------------------------------------------------------------------

    def name(self, path: Any, follow: bool = True, dir_fd: int | None = None) -> str:
        """The name of what a path leads to; its last part may be a link unless `follow`."""
        if isinstance(path, int):
            return self._called(REAL.readlink(f"/proc/self/fd/{path}"))
        text = os.fsdecode(path)
        _check(not text, errno.ENOENT, text)
        if text[0] != "/":
            text = f"{self.getcwd() if dir_fd is None else self.name(dir_fd)}/{text}"
        follow = follow or text[-1] == "/"
        found, links = "", 0
        rest = [part for part in text.split("/")[::-1] if part not in ("", ".")]
        while rest:
            part = rest.pop()
            if part == "..":
                self._check_folder(found or "/")
                found = os.path.dirname(found)
                continue
            here = self._called(f"{found}/{part}")
            target = self._link(here) if rest or follow else None
            if target is None:
                found = here
                if rest:
                    self._check_folder(here)
                continue
            links += 1
            _check(links > MOST_LINKS, errno.ELOOP, text)
            if target[0] == "/":
                found = ""
            rest += [part for part in target.split("/")[::-1] if part not in ("", ".")]
        return found or "/"

    def _link(self, name: str) -> str | None:
        try:
            target: str = REAL.readlink(self.at(name))
        except OSError:
            return None
        if not (name.startswith("/proc/") and "/fd/" in name):
            return target
        users = name.rpartition("/")[2] in ("0", "1", "2")  # standard output and the like
        return None if users or target[0] != "/" else target

    def _called(self, actual: str) -> str:
        if actual.startswith(f"{self._over}/"):
            return actual[len(self._over) :]
        return actual

    def _is_real(self, name: str) -> bool:
        return f"{name}/".startswith((f"{self.folder}/", *OF_THE_SYSTEM))

    def _is_hidden(self, name: str) -> bool:
        while name not in self._gone:
            if name == "/":
                return False
            name = os.path.dirname(name)
        return True

    def at(self, name: str) -> str:
        """Where a file lies, or would lie."""
        over = self._over + name
        if self._is_real(name) or not (_exists(over) or self._is_hidden(name)):
            return name
        return over

    # -- changes --------------------------------------------------------------------------------

    def _check_folder(self, name: str) -> None:
        _check(not stat.S_ISDIR(REAL.stat(self.at(name)).st_mode), errno.ENOTDIR, name)

    def over(self, name: str, copy: bool = True, note: bool = True) -> str:
        """Where a file may be changed: it is copied there, if it is to have what it had."""
        if self._is_real(name):
            return name
        with self._lock:
            return self._copied(name, copy, note)

    def _copied(self, name: str, copy: bool, note: bool) -> str:
        self.changed = True
        over, actual = self._over + name, self.at(name)
        if not _exists(over):
            parent = os.path.dirname(name)
            if parent != "/":
                self._check_folder(parent)
            if not _exists(self._over + parent):
                self.over(parent, note=False)
            if _exists(actual) and stat.S_ISDIR(REAL.lstat(actual).st_mode):
                REAL.mkdir(over)
                self._aside(shutil.copystat, actual, over)
                REAL.chmod(over, REAL.stat(over).st_mode | 0o700)
            elif copy and _exists(actual):
                self._aside(shutil.copy2, actual, over, follow_symlinks=False)
            elif _exists(actual):
                os.close(REAL.open(over, os.O_CREAT | os.O_WRONLY))
                self._aside(shutil.copystat, actual, over, follow_symlinks=False)
        if note and name not in self.written and not os.path.isdir(over):
            self.written.append(name)
        return over

    def _whole(self, name: str) -> str:
        """As `over`, with all that is inside."""
        over = self.over(name, note=False)
        if stat.S_ISDIR(REAL.lstat(over).st_mode):
            for one in self.names(name):
                self._whole(f"{name}/{one}")
        return over

    def _hide(self, name: str) -> None:
        with self._lock:
            self._hidden(name)

    def _hidden(self, name: str) -> None:
        if not self._is_hidden(name) and _exists(name):
            self.removed.append(name)
        self._gone.add(name)
        self.changed = True
        self.written = [one for one in self.written if not f"{one}/".startswith(f"{name}/")]

    def names(self, name: str) -> list[str]:
        """What a folder holds."""
        actual, below = self.at(name), name.rstrip("/")
        found = dict.fromkeys(REAL.listdir(actual) if actual != name else ())
        if not self._is_hidden(name) and (actual == name or _exists(name)):
            real = [one for one in REAL.listdir(name) if f"{below}/{one}" not in self._gone]
            found |= dict.fromkeys(real)
        return list(found)

    def write(self, path: str, data: bytes, folder: str = "") -> None:
        """Writes a real file, after making `folder`."""
        with self.aside():
            if folder:
                os.makedirs(folder, exist_ok=True)
            with replacing(path) as file:
                file.write(data)

    def _aside(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """What a function does is the prediction's own, and real."""
        with self.aside():
            return function(*args, **options)

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
        unnamed = flags & os.O_TMPFILE == os.O_TMPFILE
        follow = not flags & os.O_NOFOLLOW and flags & NEW != NEW
        name = self.name(path, follow, dir_fd)
        actual = self.at(name)
        if flags & WRITES and not unnamed:
            found = REAL.lstat(actual).st_mode if _exists(actual) else None
            new = found is None and flags & os.O_CREAT
            if new or (found is not None and stat.S_ISREG(found) and not flags & os.O_EXCL):
                actual = self.over(name, copy=not flags & os.O_TRUNC)
        with self.aside():  # of the user's, it opens no file to write
            return int(REAL.open(actual, flags, mode))

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._make(REAL.mkdir, path, mode, dir_fd=dir_fd)

    def _make(self, real: Any, path: Any, *args: Any, dir_fd: int | None = None) -> None:
        name = self.name(path, False, dir_fd)
        _check(_exists(self.at(name)), errno.EEXIST, name)
        self.names(os.path.dirname(name))  # raises if it is no folder
        real(self.over(name, copy=False, note=False), *args)

    def mkfifo(self, path: Any, mode: int = 0o666, *, dir_fd: int | None = None) -> None:
        self._make(REAL.mkfifo, path, mode, dir_fd=dir_fd)

    def mknod(self, path: Any, *args: Any, dir_fd: int | None = None) -> None:
        self._make(REAL.mknod, path, *args, dir_fd=dir_fd)

    def symlink(self, src: Any, dst: Any, *_: Any, dir_fd: int | None = None, **__: Any) -> None:
        self._make(lambda over: REAL.symlink(src, over), dst, dir_fd=dir_fd)

    def link(
        self, src: Any, dst: Any, *, src_dir_fd: Any = None, dst_dir_fd: Any = None, **_: Any
    ) -> None:
        """A second name of a file: a copy."""
        actual = self.at(self.name(src, False, src_dir_fd))
        _check(stat.S_ISDIR(REAL.lstat(actual).st_mode), errno.EPERM, actual)
        copy = functools.partial(self._aside, shutil.copy2, actual, follow_symlinks=False)
        self._make(copy, dst, dir_fd=dst_dir_fd)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove(self.name(path, False, dir_fd), REAL.unlink, folder=False)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        name = self.name(path, False, dir_fd)
        self._remove(name, REAL.rmdir, folder=True)

    def _remove(self, name: str, real: Any, folder: bool) -> None:
        actual = self.at(name)
        if self._is_real(name):
            real(actual)
            return
        is_folder = stat.S_ISDIR(REAL.lstat(actual).st_mode)
        _check(folder and not is_folder, errno.ENOTDIR, name)
        _check(is_folder and not folder, errno.EISDIR, name)
        _check(folder and bool(self.names(name)), errno.ENOTEMPTY, name)
        if _exists(self._over + name):
            real(self._over + name)
        self._hide(name)

    def rename(self, src: Any, dst: Any, *, src_dir_fd: Any = None, dst_dir_fd: Any = None) -> None:
        old, new = self.name(src, False, src_dir_fd), self.name(dst, False, dst_dir_fd)
        for one in (old, new):
            self._check_folder(os.path.dirname(one))
        REAL.lstat(self.at(old))
        if old == new:
            return
        with self._lock:
            self._rename(old, new)

    def _rename(self, old: str, new: str) -> None:
        _check(new.startswith(f"{old}/"), errno.EINVAL, old)
        _check(old.startswith(f"{new}/"), errno.ENOTEMPTY, new)
        if _exists(self.at(new)):
            folders = [stat.S_ISDIR(REAL.lstat(self.at(one)).st_mode) for one in (old, new)]
            _check(folders == [True, False], errno.ENOTDIR, new)
            _check(folders == [False, True], errno.EISDIR, new)
            _check(folders[1] and bool(self.names(new)), errno.ENOTEMPTY, new)
        self.over(os.path.dirname(new), note=False)
        source = self._whole(old)
        target = new if self._is_real(new) else self._over + new
        if self._is_real(old) != self._is_real(new):
            self._aside(shutil.move, source, target)
        else:
            REAL.rename(source, target)
        written = [one for one in self.written if f"{one}/".startswith(f"{old}/")]
        self._hide(old)
        self._hide(new)
        self.removed = [one for one in self.removed if one != new]
        self.written += [new + one[len(old) :] for one in written or [old]]

    def listdir(self, path: Any = ".") -> list[Any]:
        names = self.names(self.name("." if path is None else path))
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def scandir(self, path: Any = ".") -> _Entries:
        path = "." if path is None else path
        given = path if isinstance(path, (int, bytes)) else os.fspath(path)
        name = self.name(path)
        return _Entries([_Entry(self, name, given, one) for one in self.names(name)])

    def chdir(self, path: Any) -> None:
        name = self.name(path)
        REAL.chdir(self.at(name))
        self._cwd = name

    def getcwd(self) -> str:
        return self._cwd or self._called(REAL.getcwd())

    def getcwdb(self) -> bytes:
        return os.fsencode(self.getcwd())

    def open_file(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
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
        """As `sqlite3.connect`, of files without a URI."""
        text = os.fsdecode(database)
        if text and text[0] != ":" and not text.startswith("file:"):
            database = self.over(self.name(database))
        return REAL.connect(database, *args, **options)

    def functions(self) -> dict[Any, Any]:
        """What stands in the place of Python's functions, by these."""
        made: dict[Any, Any] = {REAL.open_file: self.open_file, REAL.connect: self.connect}
        made |= {getattr(REAL, name): getattr(self, SAME.get(name, name)) for name in OWN}
        for name in LOOKING:
            real = getattr(REAL, name)
            made[real] = functools.partial(self._apply, real, self.at, name)
        for name in (*CHANGING, *OF_FILES):
            real = getattr(REAL, OF_FILES.get(name, name))
            made[getattr(REAL, name)] = functools.partial(self._apply, real, self.over, name)
        return {real: self._of_the_program(real, ours) for real, ours in made.items()}

    def _of_the_program(self, real: Callable[..., Any], ours: Callable[..., Any]) -> Any:
        looks = real.__name__ in (*LOOKING, "listdir", "scandir")

        @functools.wraps(real)
        def call(*args: Any, **options: Any) -> Any:
            if self.is_aside() or (looks and not self.changed):
                return real(*args, **options)
            try:
                return ours(*args, **options)
            except OSError as error:
                if error.filename is not None and args:
                    error.filename = args[0]
                raise

        return call

    def _apply(
        self,
        real: Callable[..., Any],
        place: Callable[[str], str],
        called: str,
        path: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        follow = options.get("follow_symlinks", called not in OF_LINKS)
        if isinstance(path, int) and place != self.over:
            return real(path, *args, **options)
        try:
            name = self.name(path, follow, options.pop("dir_fd", None))
        except OSError:
            if called == "access":
                return False
            raise
        if place == self.over:
            REAL.lstat(self.at(name))  # raises if it is not there
        return real(place(name), *args, **options)

    # -- what the audit hook asks ---------------------------------------------------------------

    def may(self, path: Any) -> bool:
        """Whether the system may change a path as it is."""
        if path is None or path is getattr(self._thread, "opens", None) or self.is_aside():
            return True
        if isinstance(path, int):
            path = REAL.readlink(f"/proc/self/fd/{path}")
            return path[0] != "/" or self._is_real(path) or not _exists(path)
        text = os.fsdecode(path)
        if text[:1] != "/":
            return text in ("", ":memory:") or "mode=memory" in text
        folder, name = os.path.split(text)
        with self.aside():
            return self._is_real(f"{os.path.realpath(folder)}/{name}")


class _Entry:
    """As `os.DirEntry`."""

    def __init__(self, layer: Layer, folder: str, given: Any, name: str) -> None:
        self._name = f"{folder.rstrip('/')}/{name}"
        self._layer = layer
        self.name: Any = os.fsencode(name) if isinstance(given, bytes) else name
        self.path: Any = self.name if isinstance(given, int) else os.path.join(given, self.name)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        name = self._layer.name(self._name, follow_symlinks)
        found: os.stat_result = REAL.lstat(self._layer.at(name))
        return found

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def _is(self, kind: Callable[[int], bool], follow: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follow).st_mode)
        except OSError:
            return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        return False


class _Entries(Iterator[Any]):
    """As what `os.scandir` returns."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


def _exists(path: str) -> bool:
    try:
        REAL.lstat(path)
    except OSError:
        return False
    return True


def _check(wrong: bool, number: int, name: Any) -> None:
    if wrong:
        raise OSError(number, os.strerror(number), name)


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
                raise PermissionError(
                    errno.EPERM,
                    "the prediction throws away what a program writes, and cannot do so for this "
                    "way to write; --real-files lets it write",
                    path,
                )


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
