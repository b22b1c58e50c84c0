"""Python's functions on files, which a predicted program calls: what they write lies over the
user's files, and is thrown away.

Every function of `os` and `open` that takes a path is replaced, wherever a module has it. What
reaches the system by another way of Python's is refused: an audit hook sees it. Code in C that
opens files itself is seen by neither, but for the functions in `TRANSLATED`, which get the path
where a file lies.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import glob
import importlib
import inspect
import io
import multiprocessing.util
import os
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

from bfc.files import replacing
from bfc_tools.predicting import cudnn
from bfc_tools.predicting.arrivals import Arrivals
from bfc_tools.predicting.overlay import Overlay

#: Folders that are no user's: devices, and what the system tells.
OF_THE_SYSTEM = ("/dev", "/proc", "/sys")
#: Variables that name folders of downloads and compiled code, which are kept.
CACHES = ("HF_HOME", "TORCH_HOME", "MPLCONFIGDIR")
CACHE_ENDS = ("_CACHE", "_CACHE_DIR", "_CACHE_HOME")
#: Functions in C that open files: the number and name of the argument that is a path, and whether
#: they write; None says that an argument `mode` behind it does.
TRANSLATED: dict[str, tuple[tuple[str, int, str, bool | None], ...]] = {
    "sqlite3": (("connect", 0, "database", True),),
    "h5py._hl.files": (("File.__init__", 1, "name", None),),
    "safetensors": (("serialize_file", 1, "filename", True),),
    "torch.export": (("save", 1, "f", True),),
    "torch.jit": (("load", 0, "f", False),),
    "torch.jit._script": (
        ("RecursiveScriptModule.save", 1, "f", True),
        ("ScriptModule.save", 1, "f", True),  # a copy of it, which traced modules have
    ),
    "torch.package.package_exporter": (("PackageExporter.__init__", 1, "f", True),),
    "tokenizers": (
        ("Tokenizer.from_file", 0, "path", False),
        ("Tokenizer.save", 1, "path", True),
        ("models.Model.save", 1, "folder", True),
    ),
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_UNNAMED = getattr(os, "O_TMPFILE", 0)


def caches() -> list[str]:
    """The folders of downloads and compiled code, which the program changes as ever."""
    home = os.path.expanduser("~")
    found = [os.path.join(home, name) for name in (".cache", ".triton", ".nv")]
    for name, value in os.environ.items():
        if (name in CACHES or name.endswith(CACHE_ENDS)) and os.path.isabs(value):
            found.append(value)
    above = [f"{os.path.realpath(one)}/" for one in (home, os.getcwd())]
    kept = []
    for one in map(os.path.realpath, found):
        if not any(path.startswith(f"{one}/".replace("//", "/")) for path in above):
            kept.append(one)
    return kept


class _Entry:
    """As `os.DirEntry`."""

    __slots__ = ("_calls", "_path", "name", "path")

    def __init__(self, calls: FileCalls, folder: str, given: Any, name: str) -> None:
        as_bytes = isinstance(given, bytes)
        self._calls, self._path = calls, f"{folder.rstrip('/')}/{name}"
        self.name: Any = os.fsencode(name) if as_bytes else name
        self.path: Any = self.name if isinstance(given, int) else os.path.join(given, self.name)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        found: os.stat_result = self._calls.stat(self._path, follow_symlinks=follow_symlinks)
        return found

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def _is(self, test: Callable[[int], bool], follow: bool) -> bool:
        try:
            return test(self.stat(follow_symlinks=follow).st_mode)
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


class FileCalls:
    """What stands in the place of Python's functions, over files that lie in `overlay`. `started`
    is called with the name of each program that is started: what it writes is real."""

    def __init__(self, overlay: Overlay, started: Callable[[str], object]) -> None:
        self.overlay, self.started = overlay, started
        self.active = True
        self._thread = threading.local()
        #: Originals by the names of what stands in their places.
        self.originals = {name: getattr(os, name) for name in OF_OS if hasattr(os, name)}
        self.originals["open_file"] = open
        #: What was written and removed, once it has ended.
        self._done: tuple[list[str], list[str]] | None = None
        self.stat = self._reading(os.stat)

    @property
    def written(self) -> list[str]:
        """The files that the program has written."""
        return self.overlay.written() if self._done is None else self._done[0]

    @property
    def removed(self) -> list[str]:
        """The user's files and folders that the program has removed or renamed."""
        return self.overlay.removed() if self._done is None else self._done[1]

    def end(self) -> None:
        """The program has ended."""
        self._leave()
        self.active = False

    def end_here(self) -> None:
        """The program has ended, but for its other threads, and what it does at the exit of the
        process: what this thread does until `go_on` is the prediction's own."""
        self._leave()
        self._thread.aside = True

    def go_on(self) -> None:
        """What this thread does from now on is the program's again."""
        self._thread.aside = False

    def _leave(self) -> None:
        self._done = self.overlay.written(), self.overlay.removed()
        self.overlay.leave()

    # -- whether a call is the program's --------------------------------------------------------

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What this thread does here is the prediction's own, and real."""
        before = getattr(self._thread, "aside", False)
        self._thread.aside = True
        try:
            yield
        finally:
            self._thread.aside = before

    def is_real(self, path: Any) -> bool:
        """Whether a call goes to the system as it is."""
        return isinstance(path, int) or not self.active or getattr(self._thread, "aside", False)

    # -- functions that look --------------------------------------------------------------------

    def _reading(self, real: Callable[..., Any], follow: bool = True) -> Callable[..., Any]:
        """A function of a path that changes nothing."""

        @functools.wraps(real)
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if not self.overlay.changed or self.is_real(path):
                return real(path, *args, **options)
            follows = follow and options.get("follow_symlinks", True)
            name = self.overlay.resolve(path, follows, options.pop("dir_fd", None))
            return _named(path, self.overlay.at(name), real, *args, **options)

        return call

    def access(self, path: Any, mode: int, *, dir_fd: int | None = None, **options: Any) -> bool:
        real = self.originals["access"]
        if not self.overlay.changed or self.is_real(path):
            return bool(real(path, mode, **_given(dir_fd=dir_fd), **options))
        try:
            name = self.overlay.resolve(path, options.get("follow_symlinks", True), dir_fd)
        except OSError:
            return False
        return bool(real(self.overlay.at(name), mode, **options))

    def listdir(self, path: Any = ".") -> list[Any]:
        real = self.originals["listdir"]
        path = "." if path is None else path
        if not self.overlay.changed or (self.is_real(path) and not self._is_folder(path)):
            return list(real(path))
        names = self._names(path)
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def scandir(self, path: Any = ".") -> Any:
        real = self.originals["scandir"]
        path = "." if path is None else path
        if not self.overlay.changed or (self.is_real(path) and not self._is_folder(path)):
            return real(path)
        given = path if isinstance(path, (int, bytes)) else os.fspath(path)
        names = self._names(path)
        folder = self._folder(path)
        return _Entries([_Entry(self, folder, given, name) for name in names])

    def _is_folder(self, path: Any) -> bool:
        """Whether a descriptor is to be read as a folder of the program's."""
        return isinstance(path, int) and self.active

    def _folder(self, path: Any) -> str:
        return self.overlay.opened(path) if isinstance(path, int) else self.overlay.resolve(path)

    def _names(self, path: Any) -> list[str]:
        try:
            return self.overlay.names(self._folder(path))
        except OSError as error:
            error.filename = path
            raise

    def getcwd(self) -> str:
        real: str = self.originals["getcwd"]()
        return real if self.is_real("") else self.overlay.cwd()

    def getcwdb(self) -> bytes:
        return os.fsencode(self.getcwd())

    def chdir(self, path: Any) -> None:
        if self.is_real(path) and not self._is_folder(path):
            self.originals["chdir"](path)
        else:
            _named(path, self._folder(path), self.overlay.chdir)

    def fchdir(self, fd: Any) -> None:
        if isinstance(fd, int):
            self.chdir(fd)
        else:
            self.originals["fchdir"](fd)

    # -- functions that change ------------------------------------------------------------------

    def _changing(self, real: Callable[..., Any], follow: bool = True) -> Callable[..., Any]:
        """A function of a path that changes what is known of a file, or its length."""

        @functools.wraps(real)
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if self.is_real(path):
                return real(path, *args, **options)
            follows = follow and options.get("follow_symlinks", True)
            name = self.overlay.resolve(path, follows, options.pop("dir_fd", None))
            return _named(path, self.overlay.to_change(name), real, *args, **options)

        return call

    def _making(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """A function that makes something new which has this name."""

        @functools.wraps(real)
        def call(path: Any, *args: Any, dir_fd: int | None = None, **options: Any) -> Any:
            if self.is_real(path):
                return real(path, *args, **_given(dir_fd=dir_fd), **options)
            name = self.overlay.resolve(path, False, dir_fd)
            actual = self.overlay.to_write(name, create=True, empty=True, new=True)
            return _named(path, actual, real, *args, **options)

        return call

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if self.is_real(path):
            self.originals["mkdir"](path, mode, **_given(dir_fd=dir_fd))
        else:
            name = self.overlay.resolve(path, False, dir_fd)
            _named(path, name, self.overlay.mkdir, mode)

    def _removing(self, real: Callable[..., Any]) -> Callable[..., None]:
        change = self.overlay.rmdir if real is os.rmdir else self.overlay.remove

        @functools.wraps(real)
        def call(path: Any, *, dir_fd: int | None = None) -> None:
            if self.is_real(path):
                real(path, **_given(dir_fd=dir_fd))
            else:
                _named(path, self.overlay.resolve(path, False, dir_fd), change)

        return call

    def _renaming(self, real: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(real)
        def call(
            src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
        ) -> None:
            if self.is_real(src):
                real(src, dst, **_given(src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd))
                return
            old = self.overlay.resolve(src, False, src_dir_fd)
            _named(src, old, self.overlay.check_folder_of)  # as the system does, before the other
            _named(src, old, self.overlay.rename, self.overlay.resolve(dst, False, dst_dir_fd))

        return call

    def link(self, src: Any, dst: Any, **options: Any) -> None:
        """A second name of a file: a copy."""
        if self.is_real(src):
            self.originals["link"](src, dst, **options)
            return
        old = self.overlay.resolve(src, False, options.get("src_dir_fd"))
        new = self.overlay.resolve(dst, False, options.get("dst_dir_fd"))
        actual = self.overlay.to_write(new, create=True, empty=True, new=True)
        with self.aside():
            _named(src, self.overlay.at(old), shutil.copy2, actual, follow_symlinks=False)

    def symlink(self, src: Any, dst: Any, *args: Any, dir_fd: int | None = None, **kw: Any) -> None:
        if self.is_real(dst):
            self.originals["symlink"](src, dst, *args, **_given(dir_fd=dir_fd), **kw)
            return
        name = self.overlay.resolve(dst, False, dir_fd)
        actual = self.overlay.to_write(name, create=True, empty=True, new=True)
        self.originals["symlink"](src, actual)
        self.overlay.forget_names()

    # -- opening --------------------------------------------------------------------------------

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """As `os.open`."""
        real = self.originals["open"]
        if self.is_real(path) or (_UNNAMED and flags & _UNNAMED == _UNNAMED):
            return int(real(path, flags, mode, **_given(dir_fd=dir_fd)))
        writes = bool(flags & _WRITES)
        if not writes and not self.overlay.changed:
            return int(real(path, flags, mode, **_given(dir_fd=dir_fd)))
        name = self.overlay.resolve(path, not flags & (os.O_NOFOLLOW | os.O_EXCL), dir_fd)
        number = int(_named(path, self._actual(name, flags), real, flags, mode))
        self.overlay.note(number, name)
        return number

    def _actual(self, name: str, flags: int) -> str:
        if not flags & _WRITES:
            return self.overlay.at(name)
        if name.endswith(".py"):
            importlib.invalidate_caches()  # which go by when a folder was changed
        return self.overlay.to_write(
            name,
            create=bool(flags & os.O_CREAT),
            empty=bool(flags & os.O_TRUNC),
            new=flags & (os.O_CREAT | os.O_EXCL) == os.O_CREAT | os.O_EXCL,
        )

    def open_file(
        self, file: Any, mode: str = "r", *args: Any, opener: Any = None, **options: Any
    ) -> Any:
        """As the built-in `open`. The file has the name that was given."""
        real = self.originals["open_file"]
        if self.is_real(file):
            return real(file, mode, *args, opener=opener, **options)
        if len(args) > 5:  # buffering, encoding, errors, newline, closefd, opener
            args, opener = args[:5], args[5]
        if opener is None:
            if not self.overlay.changed and not set(mode) & set("wax+"):
                return real(file, mode, *args, **options)
            opener = self._opener
        self._thread.opens = os.fspath(file)
        try:
            return real(self._thread.opens, mode, *args, opener=opener, **options)
        finally:
            self._thread.opens = None

    def _opener(self, file: Any, flags: int) -> int:
        return self.open(file, flags, 0o666)

    def open_code(self, path: Any) -> Any:
        """As `io.open_code`."""
        return self.open_file(path, "rb")

    # -- all of them ----------------------------------------------------------------------------

    def replacements(self) -> dict[Any, Any]:
        """What stands in the place of each function."""
        real = self.originals
        found: dict[str, Any] = {name: getattr(self, name) for name in OWN}
        found |= {name: self._removing(real[name]) for name in REMOVING}
        found |= {name: self._renaming(real[name]) for name in RENAMING}
        for names, build in (
            (LOOKING, self._reading),
            (LOOKING_AT_LINKS, functools.partial(self._reading, follow=False)),
            (CHANGING, self._changing),
            (CHANGING_LINKS, functools.partial(self._changing, follow=False)),
            (MAKING, self._making),
        ):
            found |= {name: build(real[name]) for name in names}
        made = {real[name]: function for name, function in found.items() if name in real}
        return made | {open: self.open_file, io.open_code: self.open_code}

    def cover(self, path: Any) -> None:
        """A file that only this prediction can read is thrown away, also in a cache."""
        if not self.is_real(path):
            self.overlay.cover(self.overlay.resolve(path))

    def keep(self, path: Any, data: bytes) -> str:
        """Writes a file of the prediction's own, which is kept. Returns its name.

        One that is there, and that no prediction has written, is left as it is: the new one gets a
        name beside it.
        """
        target, name = self.overlay.resolve(path), os.fsdecode(path)
        with self.aside():
            if not _is_predicted(target):
                (stem, end), (name, _) = os.path.splitext(target), os.path.splitext(name)
                target, name = f"{stem}.predicted{end}", f"{name}.predicted{end}"
            if self.overlay.is_folder(os.path.dirname(target)):  # which the program has just made
                os.makedirs(os.path.dirname(target), exist_ok=True)
            with replacing(target) as file:
                file.write(data + MARK)
        self.overlay.leave_alone(target)
        return name

    # -- what is not the user's -----------------------------------------------------------------

    def temporary(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """A function of `tempfile` that makes a file or folder: real, where such things lie."""
        place = os.path.realpath(tempfile.gettempdir())
        names = list(inspect.signature(real).parameters)

        @functools.wraps(real)
        def call(*args: Any, **options: Any) -> Any:
            folder = (dict(zip(names, args, strict=False)) | options).get("dir")
            if folder is not None and self.overlay.resolve(folder) != place:
                return real(*args, **options)
            with self.aside():
                made = real(*args, **options)
            path = made[1] if isinstance(made, tuple) else made
            self.overlay.leave_alone(os.fsdecode(path))
            return made

        return call

    def announced(self, real: Callable[..., Any], program: str) -> Callable[..., Any]:
        """A function that starts a program: what that writes is real."""

        @functools.wraps(real)
        def call(*args: Any, **options: Any) -> Any:
            if not self.is_real(""):
                self.started(program)
            return real(*args, **options)

        return call

    def translated(
        self, real: Callable[..., Any], index: int, keyword: str, writes: bool | None
    ) -> Callable[..., Any]:
        """A function in C that gets a path: it gets that where the file lies."""

        @functools.wraps(real)
        def call(*args: Any, **options: Any) -> Any:
            given = args[index] if index < len(args) else options.get(keyword)
            if self.is_real(given) or not isinstance(given, (str, os.PathLike)):
                return real(*args, **options)
            mode = (args[index + 1 : index + 2] or [options.get("mode", "r")])[0]
            actual = self._translate(os.fspath(given), mode != "r" if writes is None else writes)
            if index < len(args):
                return real(*args[:index], actual, *args[index + 1 :], **options)
            return real(*args, **options | {keyword: actual})

        return call

    def _translate(self, given: str, writes: bool) -> str:
        if given[:1] in ("", ":") or given.startswith("file:"):  # a database in memory, or a URI
            return given
        name = self.overlay.resolve(given)
        if not writes:
            actual = self.overlay.at(name)
            missing = not os.path.lexists(actual) and not os.path.lexists(name)
            return name if missing else actual  # the error names what the program has asked for
        if self.overlay.is_folder(name):
            return self.overlay.to_change(name)
        return self.overlay.to_write(name, create=True, empty=False)

    # -- what the audit hook asks ---------------------------------------------------------------

    def may(self, path: Any, dir_fd: int = -1) -> bool:
        """Whether the system may change a path: it is ours, or one that is changed as ever."""
        if not self.active or getattr(self._thread, "aside", False):
            return True
        if path is None or path is getattr(self._thread, "opens", None):
            return True
        with self.aside():
            base = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd >= 0 else os.getcwd()
            if isinstance(path, int):
                path = os.readlink(f"/proc/self/fd/{path}")
                if not os.path.exists(path):  # of no file that has a name
                    return True
            folder, name = os.path.split(os.path.join(base, os.fsdecode(path)))
            path = os.path.join(os.path.realpath(folder), name)
        return self.overlay.is_ours(path) or self.overlay.is_untouched(path)


#: Functions of a path that change nothing.
LOOKING = ("stat", "statvfs", "getxattr", "listxattr", "pathconf")
LOOKING_AT_LINKS = ("lstat", "readlink")
#: Functions of a path that change what is known of a file, or its length.
CHANGING = ("chmod", "chown", "utime", "truncate", "setxattr", "removexattr")
CHANGING_LINKS = ("lchown",)
MAKING = ("mkfifo", "mknod")
REMOVING = ("remove", "unlink", "rmdir")
RENAMING = ("rename", "replace")
#: Those that have a method of their own.
OWN = (
    *("access", "listdir", "scandir", "getcwd", "getcwdb", "chdir", "fchdir"),
    *("mkdir", "link", "symlink", "open"),
)
OF_OS = (
    *(*LOOKING, *LOOKING_AT_LINKS, *CHANGING, *CHANGING_LINKS),
    *(*MAKING, *REMOVING, *RENAMING, *OWN),
)
#: What the audit hook looks at: which arguments are paths, each with that of its descriptor.
CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.utime": ((0, 3),),
    "os.setxattr": ((0, None),),
    "os.removexattr": ((0, None),),
}
#: Other events that change files: the argument that is a path.
OPENS = {"sqlite3.connect": 0}
#: Events of programs that are started: which argument names them.
STARTS = {"subprocess.Popen": 0, "os.system": 0, "os.posix_spawn": 0, "os.spawn": 1}


class _Hook:
    """The audit hook. It is there for good once it is there, and does nothing without calls."""

    def __init__(self) -> None:
        self.calls: FileCalls | None = None
        self._there = False

    def begin(self, calls: FileCalls) -> None:
        if not self._there:
            self._there = True
            sys.addaudithook(self)
        self.calls = calls

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        calls = self.calls
        if calls is None:
            return
        if event == "open":
            if args[2] & _WRITES and not isinstance(args[0], int) and not calls.may(args[0]):
                _refuse(args[0])
        elif event in CHANGES:
            for at, of in CHANGES[event]:
                if not calls.may(args[at], -1 if of is None else args[of]):
                    _refuse(args[at])
        elif event in OPENS:
            path = args[OPENS[event]]
            if isinstance(path, (str, bytes)) and _is_file(path) and not calls.may(path):
                _refuse(path)
        elif event in STARTS:
            if len(args) > 1 and isinstance(args[1], list) and cudnn.PROGRAM in args[1]:
                return  # ours
            calls.started(_program(args[STARTS[event]]))
        elif event == "os.exec" and not calls.is_real(""):
            raise PermissionError(
                errno.EPERM,
                "the prediction would end here, since the program replaces itself by another",
                args[0],
            )


_hook = _Hook()


#: Stands behind what a file of ours holds; pickles end before it.
MARK = b"\npredicted by bfc\n"


def _is_predicted(path: str) -> bool:
    """Whether a prediction may write a file: it is not there, or of an earlier prediction."""
    try:
        with open(path, "rb") as file:
            file.seek(-len(MARK), os.SEEK_END)
            return file.read() == MARK
    except FileNotFoundError:
        return True
    except OSError:  # too short, or no file
        return not os.path.isfile(path)


def _refuse(path: Any) -> None:
    raise PermissionError(
        errno.EPERM,
        "the prediction throws away what a program writes, and cannot do so for this way to write; "
        "--real-files lets it write",
        path,
    )


def _is_file(database: str | bytes) -> bool:
    """Whether a database of sqlite3 is a file that may be changed."""
    text = os.fsdecode(database)
    if text.startswith("file:"):
        return "mode=memory" not in text and "mode=ro" not in text and ":memory:" not in text
    return text not in ("", ":memory:")


def _program(command: Any) -> str:
    """The name of a program that is started."""
    text = os.fsdecode(command) if isinstance(command, (str, bytes, os.PathLike)) else ""
    return os.path.basename(text.split(maxsplit=1)[0]) if text.split() else "a program"


def _named(
    given: Any, actual: str, function: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """The function called with where a file lies; its error names the path that was given."""
    try:
        return function(actual, *args, **options)
    except OSError as error:
        if error.filename is not None:
            error.filename = given
        raise


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


# -- putting them in place ------------------------------------------------------------------------


def _swap(table: dict[Any, Any]) -> None:
    """Puts functions in the place of others, wherever a module, or a class of the two modules that
    keep such functions in classes, has them."""
    by_id = {id(old): new for old, new in table.items()}
    for module in list(sys.modules.values()):
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


class _Translator:
    """Changes the functions of `TRANSLATED` in modules that are there, and that come."""

    def __init__(self, calls: FileCalls) -> None:
        self._calls = calls
        self._changed: list[tuple[Any, str, Any]] = []
        self._arrivals = Arrivals(TRANSLATED, self._change)

    def begin(self) -> None:
        self._arrivals.__enter__()

    def _change(self, module: Any) -> None:
        for path, index, keyword, writes in TRANSLATED[module.__name__]:
            *holders, name = path.split(".")
            holder = functools.reduce(lambda one, part: getattr(one, part, None), holders, module)
            real = getattr(holder, name, None)
            if real is not None:
                kept = vars(holder).get(name)
                new: Any = self._calls.translated(real, index, keyword, writes)
                if isinstance(kept, staticmethod):
                    new = staticmethod(new)
                with contextlib.suppress(TypeError):  # a type that cannot be changed
                    setattr(holder, name, new)
                    self._changed.append((holder, name, kept))

    def end(self) -> None:
        self._arrivals.__exit__()
        for holder, name, kept in reversed(self._changed):
            setattr(holder, name, kept)


def _throw_away_at_exit(calls: FileCalls, process: int) -> None:
    if os.getpid() == process:
        with calls.aside():
            calls.overlay.remove_all()


@contextlib.contextmanager
def thrown_away(
    started: Callable[[str], object], *, until_exit: bool = False
) -> Iterator[FileCalls]:
    """What the program writes lies over the user's files while this is entered. `started` is called
    with the name of each program that is started.

    With `until_exit`, the program's other threads, and what it does at the exit of the process,
    change nothing either. The calling thread works on the user's files in between.
    """
    folder = tempfile.mkdtemp(prefix="bfc-predict-")
    process = os.getpid()
    calls = FileCalls(Overlay(folder, [*OF_THE_SYSTEM, *caches()]), started)
    if until_exit:  # the last of all, since it is the first to be registered
        atexit.register(_throw_away_at_exit, calls, process)
    table = calls.replacements()
    # multiprocessing's "spawn" tells no audit hook of the program that it starts
    spawn = multiprocessing.util.spawnv_passfds
    table[spawn] = calls.announced(spawn, "a process of multiprocessing")
    for name in ("mkdtemp", "_mkstemp_inner"):
        real = getattr(tempfile, name)
        table[real] = calls.temporary(real)
    translator = _Translator(calls)
    _hook.begin(calls)
    _swap(table)
    translator.begin()
    try:
        yield calls
    finally:
        if os.getpid() != process:
            pass  # a child that was forked ends with what it has
        elif until_exit:
            calls.end_here()
            atexit.register(calls.go_on)
        else:
            calls.end()
            translator.end()
            _swap({new: old for old, new in table.items()})
            _hook.calls = None
            shutil.rmtree(folder, ignore_errors=True)
