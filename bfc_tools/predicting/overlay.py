"""The program's files as they would be: what it writes lies in a folder of its own over them.

Nothing of the user's changes. A path of the program is looked up in that folder first, then where
it was: what was removed is hidden, and what was renamed is found under its new name. Paths are
absolute here, and free of symbolic links but for their last part.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

#: The functions of Python as they are before any of them is replaced.
REAL = SimpleNamespace(
    open=open,
    **{
        name: getattr(os, name)
        for name in (
            *("chdir", "chmod", "getcwd", "listdir", "lstat", "mkdir", "readlink"),
            *("rename", "rmdir", "scandir", "stat", "symlink", "unlink", "utime"),
        )
    },
    os_open=os.open,
)
#: The most symbolic links of one path, as Linux has it.
MOST_LINKS = 40
#: How much is copied at a time.
PIECE = 1 << 20


class Overlay:
    """A folder that lies over all others: there the files lie that the program writes. At first it
    is empty. The program changes what is in the folders `untouched` as ever. `changed` tells
    whether anything lies over the files."""

    def __init__(self, folder: str, untouched: list[str]) -> None:
        self.folder = os.path.realpath(folder)
        self.changed = False
        self._untouched = {os.path.realpath(one).rstrip("/") for one in untouched}
        self._inside = tuple(f"{one}/" for one in self._untouched)
        #: Files there that nobody else can read: they lie over the others all the same.
        self._covered: set[str] = set()
        #: Where the files of a path lie that were there before; None if they are hidden. It holds
        #: for all below the path, unless one of these has its own.
        self._below: dict[str, str | None] = {}
        self._started_in = REAL.getcwd()
        self._cwd: str | None = None
        self._resolved: dict[str, str] = {}
        #: What is open under another name, by descriptors: where it lies, and what it is called.
        self._open: dict[int, tuple[str, str]] = {}

    def leave_alone(self, path: str) -> None:
        """The program changes this file or folder as ever from now on."""
        path = self.resolve(path)
        self._untouched.add(path)
        if self.is_folder(path):
            self._inside += (f"{path}/",)

    def is_untouched(self, path: str) -> bool:
        """Whether the program changes this path as ever."""
        if path in self._covered:
            return False
        return path in self._untouched or path.startswith(self._inside)

    def cover(self, path: str) -> None:
        """This file lies over the one that is there, whatever the folder."""
        if self.is_untouched(path):
            self._covered.add(path)
            self.changed = True

    # -- names ----------------------------------------------------------------------------------

    def cwd(self) -> str:
        """The working directory as the program knows it."""
        return self._cwd or self.called(REAL.getcwd())

    def is_ours(self, actual: str) -> bool:
        """Whether a path lies in the folder over the others."""
        return f"{actual}/".startswith(f"{self.folder}/")

    def called(self, actual: str) -> str:
        """What the program calls a path of ours."""
        if actual.startswith(self.folder + "/"):
            return actual[len(self.folder) :]
        return actual

    def opened(self, number: int) -> str:
        """The path of an open descriptor, as the program knows it."""
        actual: str = REAL.readlink(f"/proc/self/fd/{number}")
        at, path = self._open.get(number, ("", ""))
        return path if at == actual else self.called(actual)

    def note(self, number: int, path: str) -> None:
        """Notes that a file or folder was opened under this name."""
        self._open.pop(number, None)
        actual = REAL.readlink(f"/proc/self/fd/{number}")
        if self.called(actual) != path:
            self._open[number] = actual, path

    def resolve(self, path: Any, follow: bool = True, dir_fd: int | None = None) -> str:
        """The absolute path; of its last part a symbolic link is followed only if `follow`."""
        text = os.fsdecode(path)
        self._check(not text, errno.ENOENT, text)
        if text[0] != "/":
            text = f"{self.cwd() if dir_fd is None else self.opened(dir_fd)}/{text}"
        text = self.called(text)
        if text.endswith("/") and text.strip("/"):
            found = self.resolve(text.rstrip("/"))
            self._check(not stat.S_ISDIR(self.mode(found) or stat.S_IFDIR), errno.ENOTDIR, text)
        head, _, name = text.rstrip("/").rpartition("/")
        if name in ("", ".", ".."):
            return self._walk(text)
        folder = self._resolved.get(head)
        if folder is None:
            folder = self._resolved[head] = self._walk(head)
        text = f"{folder}/{name}" if folder != "/" else f"/{name}"
        return self._walk(text) if follow and self._link(text) is not None else text

    def _link(self, path: str) -> str | None:
        if self.is_untouched(path):
            return None
        try:
            return str(REAL.readlink(self.at(path)))
        except OSError:
            return None

    def _walk(self, path: str) -> str:
        """A path without links."""
        found, links = "/", 0
        rest = path.split("/")[::-1]
        while rest:
            part = rest.pop()
            if part in ("", "."):
                continue
            if part == "..":
                self._check(not self.is_folder(found), self._missing(f"{found}/"), path)
                found = os.path.dirname(found)
                continue
            here = f"{found}/{part}" if found != "/" else f"/{part}"
            target = self._link(here)
            if target is None:
                found = here
                continue
            links += 1
            if links > MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            if target.startswith("/"):
                found = "/"
            rest.extend(self.called(target).split("/")[::-1])
        return found

    # -- looking --------------------------------------------------------------------------------

    def under(self, path: str) -> str | None:
        """Where the files lie that were there before; None if they are hidden."""
        if not self._below:
            return path
        here = path
        while here not in self._below:
            if here == "/":
                return path
            here = os.path.dirname(here)
        before = self._below[here]
        return None if before is None else before + path[len(here) :]

    def at(self, path: str) -> str:
        """Where a file or folder lies; a path that is not there if there is none."""
        if self.is_untouched(path):
            return path
        over = self.folder + path
        if _mode(over) is not None:
            return over
        before = self.under(path)
        if before is not None and _mode(before) is not None:
            return before
        return over if self._missing(path) == errno.ENOENT else f"/dev/null{path}"

    def mode(self, path: str) -> int | None:
        """What lies there: the mode as of `os.lstat`, or None."""
        return _mode(self.at(path))

    def is_folder(self, path: str) -> bool:
        """Whether a folder lies there."""
        return stat.S_ISDIR(self.mode(path) or 0)

    def names(self, path: str) -> list[str]:
        """What a folder holds. Raises OSError if it is no folder."""
        before, over = self.under(path), self.folder + path
        if self.is_untouched(path):
            covered = {
                os.path.basename(one): one
                for one in list(self._covered)
                if os.path.dirname(one) == path
            }
            real = [name for name in REAL.listdir(path) if name not in covered]
            return real + [name for name, one in covered.items() if self.mode(one) is not None]
        there = [one for one in (before, over) if one and stat.S_ISDIR(_mode(one) or 0)]
        if not there or not self.is_folder(path):
            return list(REAL.listdir(self.at(path)))
        found = dict.fromkeys(name for one in there for name in REAL.listdir(one))
        prefix = path.rstrip("/") + "/"
        for one in list(self._below):
            name = one[len(prefix) :] if one.startswith(prefix) else "/"
            if "/" not in name:
                found.pop(name, None)
                if self.mode(one) is not None:
                    found[name] = None
        return list(found)

    # -- changing -------------------------------------------------------------------------------

    def to_write(self, path: str, *, create: bool, empty: bool, new: bool = False) -> str:
        """Where to write a file; what it has is copied there unless it is to be `empty`."""
        if self.is_untouched(path):
            return path
        actual = self.at(path)
        found = _mode(actual)
        if found is None:
            self._check(not create, self._missing(path), path)
            return self.make_room(path)
        self._check(new, errno.EEXIST, path)
        self._check(stat.S_ISDIR(found), errno.EISDIR, path)
        if not stat.S_ISREG(found):  # a pipe or a device
            self.leave_alone(path)
            return path
        return actual if self.is_ours(actual) else self._copy(path, actual, found, empty)

    def make_room(self, path: str) -> str:
        """Where something new lies that is to be called so, in a folder that is there."""
        parent = os.path.dirname(path)
        self._check(not self.is_folder(parent), self._missing(path), path)
        self._lay_over(parent)
        self.changed = True
        return self.folder + path

    def _missing(self, path: str) -> int:
        """Why a path is not there: a folder above it is not there, or is none."""
        above = os.path.dirname(path)
        while self.mode(above) is None and above != "/":
            above = os.path.dirname(above)
        return errno.ENOENT if self.is_folder(above) else errno.ENOTDIR

    def _lay_over(self, path: str) -> None:
        """A folder lies over one that is there, with its permissions."""
        over = self.folder + path
        if _mode(over) is None:
            if path == "/":
                raise OSError(errno.ENOENT, "the prediction is over: nothing is written any more")
            self._lay_over(os.path.dirname(path))
            with contextlib.suppress(FileExistsError):  # another thread was faster
                REAL.mkdir(over)
                REAL.chmod(over, stat.S_IMODE(_mode(self.under(path) or over) or 0o777) | 0o700)

    def to_change(self, path: str) -> str:
        """Where a file or folder lies whose attributes may be changed."""
        actual = self.at(path)
        found = _mode(actual)
        if found is None:
            raise OSError(self._missing(path), os.strerror(self._missing(path)), path)
        if self.is_untouched(path) or self.is_ours(actual):
            return actual
        if stat.S_ISDIR(found):
            self._lay_over(path)
            self.changed = True
            return self.folder + path
        return self._copy(path, actual, found, empty=False)

    def _copy(self, path: str, actual: str, mode: int, empty: bool) -> str:
        over = self.make_room(path)
        if stat.S_ISLNK(mode):
            REAL.symlink(REAL.readlink(actual), over)
            return over
        with REAL.open(over, "wb") as target:
            if not empty:
                with REAL.open(actual, "rb") as source:
                    shutil.copyfileobj(source, target, PIECE)
        found = REAL.stat(actual)
        REAL.chmod(over, stat.S_IMODE(mode) | 0o600)
        REAL.utime(over, ns=(found.st_atime_ns, found.st_mtime_ns))
        return over

    def mkdir(self, path: str, mode: int) -> None:
        """As `os.mkdir`."""
        if self.is_untouched(path):
            REAL.mkdir(path, mode)
            return
        self._check(self.mode(path) is not None, errno.EEXIST, path)
        REAL.mkdir(self.make_room(path), mode)

    def remove(self, path: str) -> None:
        """As `os.remove`."""
        if self.is_untouched(path):
            REAL.unlink(path)
            return
        found = self.mode(path)
        self._check(found is None, self._missing(path), path)
        self._check(stat.S_ISDIR(found or 0), errno.EISDIR, path)
        self._hide(path)

    def rmdir(self, path: str) -> None:
        """As `os.rmdir`."""
        if self.is_untouched(path):
            REAL.rmdir(path)
            return
        self._check(self.mode(path) is None, self._missing(path), path)
        self._check(not self.is_folder(path), errno.ENOTDIR, path)
        self._check(bool(self.names(path)), errno.ENOTEMPTY, path)
        self._hide(path)

    def _hide(self, path: str) -> None:
        """Nothing is there any more: it was a file, or an empty folder."""
        over = self.folder + path
        found = _mode(over)
        if found is not None:
            (REAL.rmdir if stat.S_ISDIR(found) else REAL.unlink)(over)
        self._forget_below(path)
        self._below[path] = None
        self.forget_names()

    def _forget_below(self, path: str) -> dict[str, str | None]:
        inside = f"{path}/"
        return {one: self._below.pop(one) for one in list(self._below) if one.startswith(inside)}

    def forget_names(self) -> None:
        """Links may lead elsewhere now."""
        self.changed = True
        self._resolved.clear()

    def check_folder_of(self, path: str) -> None:
        """Raises OSError unless a path is in a folder that is there."""
        self._check(not self.is_folder(os.path.dirname(path)), self._missing(path), path)

    def rename(self, old: str, new: str) -> None:
        """As `os.rename`."""
        if old in self._covered:
            self.cover(new)
        if self.is_untouched(old) or self.is_untouched(new):
            self._rename_across(old, new)
            return
        found, there = self.mode(old), self.mode(new)
        self.check_folder_of(old)
        self._check(not self.is_folder(os.path.dirname(new)), self._missing(new), old)
        if found is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), old)
        if old == new:
            return
        self._check(new.startswith(f"{old}/"), errno.EINVAL, old)
        self._check(old.startswith(f"{new}/"), errno.ENOTEMPTY, old)
        self._check_target(new, stat.S_ISDIR(found), there)
        over, before = self.folder + old, self.under(old)
        covers = _mode(over)
        if covers is not None and not stat.S_ISDIR(covers):
            before = None  # hidden by the file over it
        if there is not None:
            self._hide(new)
        self._forget_below(new)
        moved = self._forget_below(old)
        room = self.make_room(new)
        if covers is not None:
            REAL.rename(over, room)
        self._below[new] = before if before is not None and _mode(before) is not None else None
        for path, lies in moved.items():
            self._below[new + path[len(old) :]] = lies
        self._below[old] = None
        self.forget_names()

    @staticmethod
    def _check(wrong: bool, number: int, path: str) -> None:
        if wrong:
            raise OSError(number, os.strerror(number), path)

    def _check_target(self, new: str, of_folder: bool, there: int | None) -> None:
        """Whether what is at `new` may be replaced."""
        if there is None:
            return
        is_folder = stat.S_ISDIR(there)
        self._check(is_folder and not of_folder, errno.EISDIR, new)
        self._check(of_folder and not is_folder, errno.ENOTDIR, new)
        self._check(is_folder and bool(self.names(new)), errno.ENOTEMPTY, new)

    def _rename_across(self, old: str, new: str) -> None:
        """From or to a folder that the program changes as ever: a copy."""
        if self.is_untouched(old) and self.is_untouched(new):
            REAL.rename(old, new)
            return
        self._check(self.is_folder(old), errno.EXDEV, old)  # which shutil.move copies
        with REAL.open(self.at(old), "rb") as source:
            to = self.to_write(new, create=True, empty=True)
            with REAL.open(to, "wb") as target:
                shutil.copyfileobj(source, target, PIECE)
        self.remove(old)

    def chdir(self, path: str) -> None:
        """As `os.chdir`."""
        before = self.under(path)
        actual = before if before and stat.S_ISDIR(_mode(before) or 0) else self.at(path)
        REAL.chdir(actual)
        self._cwd = None if actual == path else path

    def remove_all(self) -> None:
        """Nothing can be written any more, and what was is thrown away."""
        folder, self.folder = self.folder, "/dev/null/gone"
        shutil.rmtree(folder, ignore_errors=True)

    def leave(self) -> None:
        """The working directory is one of the system's again."""
        if self._cwd is not None:
            with contextlib.suppress(OSError):
                REAL.chdir(self._started_in)
            self._cwd = None

    # -- what was done --------------------------------------------------------------------------

    def written(self) -> list[str]:
        """The files that lie over the user's."""
        return sorted(self.called(one) for one in _files(self.folder))

    def removed(self) -> list[str]:
        """The user's files and folders that the program has removed or renamed."""
        return sorted(
            path
            for path in list(self._below)
            if _mode(path) is not None and self.mode(path) is None and not self.is_untouched(path)
        )


def _mode(actual: str) -> int | None:
    try:
        return int(REAL.lstat(actual).st_mode)
    except (OSError, ValueError):
        return None


def _files(folder: str) -> Iterator[str]:
    with REAL.scandir(folder) as entries:
        for one in entries:
            if one.is_dir(follow_symlinks=False):
                yield from _files(one.path)
            else:
                yield one.path
