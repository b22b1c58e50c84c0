"""A program that does random things to the files of its folder, and prints what it sees.

Arguments: the seed, how many steps, and "python" for Python's functions alone, "all" for C's,
sqlite's and other programs' too, or "attack" for all that Landlock knows of these.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import socket
import sqlite3
import stat
import struct
import subprocess
import sys
from collections.abc import Callable

NAMES = ("a", "b", "c/a", "c/b", "c/d/a", "d", "d/e", "link", "link/a", "new", "c/new")
libc = ctypes.CDLL(None, use_errno=True)


def c(name: str, *args: object) -> None:
    """Calls C's function."""
    texts = [os.fsencode(one) if isinstance(one, str) else one for one in args]
    if getattr(libc, name)(*texts) < 0:
        raise OSError(ctypes.get_errno(), name)


def write(path: str, flags: int, text: bytes = b"new text") -> None:
    number = os.open(path, flags, 0o644)
    try:
        os.write(number, text)
    finally:
        os.close(number)


def mapped(path: str) -> None:
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[0] = 65


def through_proc(path: str) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        with open(f"/proc/self/fd/{number}", "r+") as file:
            file.write("proc")
    finally:
        os.close(number)


def sent(path: str, other: str) -> None:
    with open(path, "rb") as source, open(other, "wb") as target:
        os.sendfile(target.fileno(), source.fileno(), 0, 100)


def copied(path: str, other: str) -> None:
    with open(path, "rb") as source, open(other, "wb") as target:
        os.copy_file_range(source.fileno(), target.fileno(), 100)


def passed_on(path: str, other: str) -> None:
    """A file is opened, and another process, which gets it through a socket, writes to it."""
    ours, theirs = socket.socketpair()
    with ours, theirs, open(path, "r+b") as file:
        child = os.fork()
        if not child:
            _, numbers, _, _ = socket.recv_fds(theirs, 1, 1)
            os.write(numbers[0], b"passed")
            os._exit(0)
        socket.send_fds(ours, [b"x"], [file.fileno()])
        os.waitpid(child, 0)
    os.stat(other)


def unnamed(path: str, other: str) -> None:
    """A file without a name gets one."""
    number = os.open(os.path.dirname(path) or ".", os.O_TMPFILE | os.O_RDWR)
    try:
        os.write(number, b"unnamed")
        c("linkat", -100, f"/proc/self/fd/{number}", -100, other, 0x400)
    finally:
        os.close(number)


def ring(operation: int, number: int, address: int, length: int, flags: int) -> int | None:
    """What io_uring answers, or None where it is not allowed."""
    details = bytearray(120)
    uring = libc.syscall(425, 4, (ctypes.c_char * 120).from_buffer(details))
    if uring < 0:
        return None
    try:
        entries, answers = struct.unpack_from("2I", details)
        tail, array = struct.unpack_from("4xI16xI", details, 40)
        (results,) = struct.unpack_from("I", details, 100)
        queue = mmap.mmap(uring, array + 4 * entries, offset=0)
        done = mmap.mmap(uring, results + 16 * answers, offset=0x8000000)
        calls = mmap.mmap(uring, 64 * entries, offset=0x10000000)
        asked = struct.pack("BBHiQQII32x", operation, 0, 0, number, 0, address, length, flags)
        calls[:64] = asked
        queue[array : array + 4] = bytes(4)
        queue[tail : tail + 4] = struct.pack("I", 1)
        libc.syscall(426, uring, 1, 1, 1, None, 0)
        result: int = struct.unpack_from("i", done, results + 8)[0]
        if result < 0:
            raise OSError(-result, "io_uring")
        return result
    finally:
        os.close(uring)


def ring_opens(path: str) -> None:
    """A file is opened and truncated by io_uring."""
    name = ctypes.create_string_buffer(os.fsencode(path))
    number = ring(18, -100, ctypes.addressof(name), 0, os.O_WRONLY | os.O_TRUNC)
    if number is None:
        write(path, os.O_WRONLY | os.O_TRUNC, b"")
    else:
        os.close(number)


def ring_writes(path: str) -> None:
    """io_uring writes into an open file."""
    text = ctypes.create_string_buffer(b"ring")
    with open(path, "r+b") as file:
        if ring(23, file.fileno(), ctypes.addressof(text), 4, 0) is None:
            file.write(b"ring")


def nameless(path: str, other: str) -> None:
    """What is in a file without a name gets into another one."""
    number = os.open(os.path.dirname(path) or ".", os.O_TMPFILE | os.O_RDWR)
    try:
        os.write(number, b"nameless")
        with open(other, "wb") as file:
            os.sendfile(file.fileno(), number, 0, 100)
    finally:
        os.close(number)


def base(path: str) -> None:
    found = sqlite3.connect(path + ".db")
    with contextlib.closing(found):
        found.execute("create table if not exists t (x)")
        found.execute("insert into t values (1)")
        found.commit()


def program(text: str) -> None:
    if subprocess.run(text, shell=True, capture_output=True, check=False).returncode:
        raise OSError(0, "the program failed")


Steps = dict[str, Callable[[str, str], object]]
PYTHON: Steps = {
    "w": lambda a, b: write(a, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    "x": lambda a, b: write(a, os.O_WRONLY | os.O_CREAT | os.O_EXCL),
    "a": lambda a, b: write(a, os.O_WRONLY | os.O_APPEND),
    "r+": lambda a, b: write(a, os.O_RDWR, b"X"),
    "nofollow": lambda a, b: write(a, os.O_WRONLY | os.O_NOFOLLOW),
    "truncate": lambda a, b: os.truncate(a, 3),
    "chmod": lambda a, b: os.chmod(a, 0o700),
    "utime": lambda a, b: os.utime(a, (1, 1)),
    "mkdir": lambda a, b: os.mkdir(a),
    "rmdir": lambda a, b: os.rmdir(a),
    "unlink": lambda a, b: os.unlink(a),
    "rename": os.rename,
    "replace": os.replace,
    "symlink": lambda a, b: os.symlink(a, b),
    "map": lambda a, b: mapped(a),
    "proc": lambda a, b: through_proc(a),
    "send": sent,
    "copy": copied,
    "pass": passed_on,
    "nameless": nameless,
    "ring writes": lambda a, b: ring_writes(a),
}
OTHERS: Steps = {
    "link": lambda a, b: os.link(a, b),
    "base": lambda a, b: base(a),
    "unnamed": unnamed,
    "ring opens": lambda a, b: ring_opens(a),
    "xattr": lambda a, b: os.setxattr(a, "user.x", b"1"),
    "C truncate": lambda a, b: c("truncate", a, ctypes.c_long(2)),
    "C chmod": lambda a, b: c("chmod", a, 0o750),
    "C unlink": lambda a, b: c("unlink", a),
    "C mkdir": lambda a, b: c("mkdir", a, 0o755),
    "C symlink": lambda a, b: c("symlink", a, b),
    "cp": lambda a, b: program(f"cp {a} {b}"),
    "sh": lambda a, b: program(f"echo text >> {a}"),
}


def look() -> list[object]:
    """All that is there, as this process sees it."""
    found: list[object] = []
    for top, folders, files in os.walk("."):
        folders.sort()
        for name in sorted([*folders, *files]):
            path = os.path.join(top, name)
            status = os.lstat(path)
            kind = stat.S_IFMT(status.st_mode)
            content: object = None
            if kind == stat.S_IFREG and not name.endswith(".db"):
                with open(path, "rb") as file:
                    content = file.read()
            elif kind == stat.S_IFLNK:
                content = os.readlink(path)
            mode = 0 if kind == stat.S_IFLNK else stat.S_IMODE(status.st_mode)
            found.append((path, kind, mode, content))
    return found


def main(seed: int, steps: int, kinds: str) -> None:
    rng = random.Random(seed)
    table = PYTHON if kinds == "python" else PYTHON | OTHERS
    if kinds == "attack":
        table = {name: step for name, step in table.items() if name != "C chmod"}
    for step in range(steps):
        # those that begin a program are rarer, since they take long
        name = rng.choice([*table, *PYTHON] if step % 20 else list(table))
        first, second = rng.choice(NAMES), rng.choice(NAMES)
        if name in ("cp", "sh") and step % 20:
            name = "w"
        if name in ("send", "copy") and os.path.realpath(first) == os.path.realpath(second):
            continue  # who has opened a file before it is first written goes on reading the old one
        try:
            said: object = table[name](first, second) and None
        except OSError as error:
            said = error.errno
        except (ValueError, sqlite3.Error) as error:
            said = type(error).__name__
        print(step, name, first, second, said)
        if step % 10 == 9:
            print(look())
        if step % 200 == 199:  # so that not all ends up as one
            with contextlib.suppress(OSError):
                os.makedirs("c/d")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
