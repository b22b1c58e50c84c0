"""What the kernel keeps apart: mounts of a process's own, and Landlock. Both hold for the process
that calls and for all that it starts, until they end.

From mount(2), overlayfs.rst, user_namespaces(7), ioctl_iflags(2) and landlock(7).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterator

_libc = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_BIND, _MOVE, _RECURSIVE, _PRIVATE = 0x1000, 0x2000, 0x4000, 1 << 18
_NO_NEW_PRIVILEGES, _DIES_WITH_PARENT, _ADOPTS = 38, 1, 36
_MOUNT_SETATTR, _LANDLOCK = 442, 444
_EMPTY_PATH, _READ_ONLY = 0x1000, 1
_GET_FLAGS, _SET_FLAGS, _TOP_OF_TREES = 0x80086601, 0x40086602, 0x20000
#: Landlock's rights to change something: to write, to remove, to make, to link and to truncate.
_WRITE, _LINK, _CHANGES = 1 << 1, 1 << 13, 1 << 1 | 0x7FF << 4
_OLDEST_LANDLOCK = 3  # the first that knows how to truncate
#: File systems without files of anybody's.
_OF_THE_SYSTEM = frozenset(
    (
        *("proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "mqueue", "securityfs"),
        *("debugfs", "tracefs", "configfs", "bpf", "pstore", "efivarfs", "autofs", "fusectl"),
        *("binfmt_misc", "hugetlbfs", "nsfs"),
    )
)

#: Of so many folders in a folder for temporary files, if something else is mounted there.
MOST_TEMPORARY = 32
#: What overlays are told. Their changes reach the disk at any time, since they are thrown away.
OF_ROOT, OF_USERS = ",volatile,redirect_dir=on,metacopy=off", ",volatile,userxattr"


def _call(function: str, *args: object, name: str | None = None) -> int:
    """A function of the C library. Raises OSError with what it says."""
    result = int(getattr(_libc, function)(*args))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    texts = [os.fsencode(one) for one in (source, target, kind)]
    _call("mount", *texts, ctypes.c_ulong(flags), os.fsencode(options), name=target)


def die_with_parent(signal: int) -> None:
    """This process gets the signal when the one that has forked it ends."""
    _call("prctl", _DIES_WITH_PARENT, signal, 0, 0, 0)


def adopt() -> None:
    """Processes whose parents end are children of this one, if it has begun them."""
    _call("prctl", _ADOPTS, 1, 0, 0, 0)


# -- mounts of its own ----------------------------------------------------------------------------


def lay_over(folder: str, hidden: str) -> None:
    """What this process writes lies below `folder` from now on, in folders that are laid over all
    others. It must have no threads, and does not see what lies in `hidden`, a folder above.

    Each of `folder/0`, `folder/1`, ... lies over the path at that place in `folder/names`, between
    zero bytes, or over none. Where none lies, nothing can be written. Raises OSError where the
    system allows none of it, and the process is to end then.
    """
    here, user, group = os.getcwd(), os.getuid(), os.getgid()
    of_root = True
    try:
        _call("unshare", _NEW_MOUNTS)
    except PermissionError:
        of_root = False
        _call("unshare", _NEW_MOUNTS | _NEW_USER)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _mount("", "/", "", _RECURSIVE | _PRIVATE)
    sockets, mounts = list(_sockets()), _mounts()
    trees = [path for path, changes in mounts.items() if changes]
    opened = []
    for path in trees:
        with contextlib.suppress(OSError):
            opened.append(os.open(path, os.O_PATH))
    os.chdir(folder)  # which is below one of the mounts that are covered
    _spread(".")
    overlays = _Overlays(here, list(mounts), of_root)
    for path in sorted(filter(os.path.isdir, trees), key=len, reverse=True):  # "/" is the last
        overlays.cover(path)
    if overlays.refused and not any(overlays.covered):
        raise overlays.refused
    with open("names", "wb") as file:
        file.write(b"\0".join(map(os.fsencode, overlays.covered)))
    os.chdir("/..")  # which leads into what lies over it
    os.chroot(".")
    attributes = struct.pack("=4Q", _READ_ONLY, 0, 0, 0)
    for number in opened:  # also where it is covered, for who still has an old folder
        _call("syscall", _MOUNT_SETATTR, number, b"", _EMPTY_PATH, attributes, len(attributes))
        os.close(number)
    _mount("tmpfs", hidden, "tmpfs", _READ_ONLY)
    for number, path in sockets:  # which nobody answers through a folder that lies over them
        with contextlib.suppress(OSError):
            _mount(f"/proc/self/fd/{number}", path, "", _BIND)
        os.close(number)
    os.chdir(here)
    if user and not of_root:  # in a namespace of one's own one has root's rights over one's files
        version_3 = struct.pack("=2I", 0x20080522, 0)
        _call("capset", version_3, bytes(24))
    # no way back through /proc/PID/root of a process that is outside, nor by mounting
    with contextlib.suppress(OSError):
        _restrict(_LINK, {"/": _LINK})


class _Overlays:
    """Folders below the working one that lie over others."""

    def __init__(self, here: str, mounts: list[str], of_root: bool) -> None:
        self._here, self._mounts = here, sorted(mounts, key=lambda path: path.split("/"))
        self._options = OF_ROOT if of_root else OF_USERS
        #: What they lie over, or nothing where one was refused.
        self.covered: list[str] = []
        self.refused: OSError | None = None

    def cover(self, path: str) -> None:
        """One lies over this folder, and takes what is mounted inside. An ordinary user may not do
        that: there one lies over each folder inside in which nothing is mounted."""
        before = path.rstrip("/")
        inside: list[str] = []
        for one in self._mounts:
            is_deeper = inside and one.startswith(f"{inside[-1]}/")
            if one != path and one.startswith(f"{before}/") and not is_deeper:
                inside.append(one)
        laid = self._lay(path, aside=bool(inside))
        if not laid:
            for folder in self._folders(path) if inside else ():
                self.cover(folder)
            return
        for one in inside:
            with contextlib.suppress(FileNotFoundError):  # it has no name any more
                _mount(one, laid + one[len(before) :], "", _MOVE)
        if inside:
            _mount(laid, path, "", _MOVE)

    def _lay(self, path: str, *, aside: bool) -> str:
        """Where the overlay is, or nothing if the system refuses it."""
        if aside and self._options == OF_USERS:
            return ""
        upper = str(len(self.covered))
        self.covered.append("")  # one that was refused would suit no other path
        target = f"{upper}.whole" if aside else path
        for name in (upper, f"{upper}.work", *([target] if aside else ())):
            os.mkdir(name)
        lower = re.sub(r"([\\,:])", r"\\\1", path)
        options = f"lowerdir={lower},upperdir={upper},workdir={upper}.work"
        for more in (self._options, OF_USERS):  # the second suits root in a container
            try:
                _mount("overlay", target, "overlay", 0, options + more)
            except OSError as error:
                self.refused = error
            else:
                self._options, self.covered[-1] = more, path
                return target
        return ""

    def _folders(self, path: str) -> list[str]:
        """Those inside in which something may be changed. Among everybody's temporary files these
        are the way to the working folder, and some that have changed last."""
        found: list[tuple[bool, float, str]] = []
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            for one in entries:
                with contextlib.suppress(OSError):  # it may go meanwhile
                    if one.is_dir(follow_symlinks=False) and _is_of_use(one.path):
                        leads_here = f"{self._here}/".startswith(f"{one.path}/")
                        found.append((leads_here, one.stat().st_mtime, one.path))
        found = [one for one in found if one[-1] not in self._mounts]
        if os.stat(path).st_mode & stat.S_ISVTX:
            found = sorted(found)[-MOST_TEMPORARY:]
        return [path for *_, path in found]


def _spread(folder: str) -> None:
    """On ext4, what is made inside lies in groups of inodes apart (`chattr +T`). In the group of
    temporary files a new inode takes long: those that were freed in the last minutes are passed."""
    opened = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):
        (flags,) = struct.unpack("=I", fcntl.ioctl(opened, _GET_FLAGS, bytes(4)))
        fcntl.ioctl(opened, _SET_FLAGS, struct.pack("=I", flags | _TOP_OF_TREES))
    os.close(opened)


def _is_of_use(folder: str) -> bool:
    """Whether this process may find or make something there."""
    if not os.access(folder, os.X_OK) or os.access(folder, os.W_OK):
        return os.access(folder, os.X_OK)
    return not os.access(folder, os.R_OK) or bool(os.listdir(folder))


def _mounts() -> dict[str, bool]:
    """Where file systems are mounted, and whether somebody's files may be changed there."""
    found: dict[str, bool] = {}
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            place, _, source = line.partition(" - ")
            path, options = place.split(" ")[4:6]
            kind, _, more = source.split(" ")[:3]
            path = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)
            read_only = "ro" in [*options.split(","), *more.strip().split(",")]
            ours = path.startswith(("/proc/", "/sys/")) or kind in _OF_THE_SYSTEM
            found[path] = not read_only and not ours
    return found


def _sockets() -> Iterator[tuple[int, str]]:
    """The sockets that this process may connect to, opened, with their paths."""
    with open("/proc/net/unix", errors="surrogateescape") as file:
        paths = {line.rstrip("\n").partition(" /")[2] for line in file}
    for path in sorted(paths - {""}):
        with contextlib.suppress(OSError):
            if os.access(f"/{path}", os.W_OK):
                yield os.open(f"/{path}", os.O_PATH), f"/{path}"


# -- Landlock -------------------------------------------------------------------------------------


def keep_below(folder: str) -> None:
    """This process, and what it starts, changes nothing from now on but what lies in `folder`, and
    shared memory. It may still change permissions, owners, times and attributes of files that lie
    elsewhere, which Landlock does not know. Raises OSError where the kernel does not have it.
    """
    everywhere = {"/dev": _WRITE, "/proc": _WRITE, "/dev/shm": _CHANGES, folder: _CHANGES}
    _restrict(_CHANGES, everywhere)


def _restrict(handled: int, allowed: dict[str, int]) -> None:
    """Forbids this process the rights `handled` but below these folders."""
    version = _call("syscall", _LANDLOCK, None, ctypes.c_size_t(0), 1)
    if version < _OLDEST_LANDLOCK:
        raise OSError(errno.ENOSYS, f"Landlock {version} is too old")
    rules = _call("syscall", _LANDLOCK, struct.pack("=Q", handled), ctypes.c_size_t(8), 0)
    try:
        for path, rights in allowed.items():
            with contextlib.suppress(FileNotFoundError):
                opened = os.open(path, os.O_PATH)
                rule = struct.pack("=Qi", rights, opened)
                _call("syscall", _LANDLOCK + 1, rules, 1, rule, 0)
                os.close(opened)
        _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        _call("syscall", _LANDLOCK + 2, rules, 0)
    finally:
        os.close(rules)
