"""Reads only regular files, and arrays of bounded sizes; writes a file completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from bfc.errors import TraceError
from bfc.libraries import NDArray

#: The most bytes of an array's header, in addition to those of its numbers.
HEADER_BYTES = 4096


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A new file, which replaces `path` once it is complete. An error leaves nothing of it."""
    if os.path.exists(path) and not os.path.isfile(path):
        with naming(path), open(path, "wb") as file:  # a pipe or a device: it is not replaced
            yield file
        return
    target = os.path.realpath(path)
    new = os.path.join(os.path.dirname(target), f".{secrets.token_hex(8)}.tmp")
    with naming(path), _new(new, path) as file:
        try:
            if os.path.exists(target):
                shutil.copymode(target, new)
            yield file
            file.close()
            os.replace(new, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new)
            raise


#: Errors of a file that is written, which say nothing of where.
OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """To be entered while a file is written: that the disk is full names it."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in OF_WRITING:
            error.filename = os.fspath(path)
        raise


def _new(name: str, path: str | os.PathLike[str]) -> IO[bytes]:
    """A new file. An error names `path`, which the user gave, and not `name`."""
    try:
        return open(name, "xb")
    except OSError as error:
        error.filename = os.fspath(path)
        raise


#: Kinds of files that have no end, or that wait for another process.
OTHER_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """A file, opened for reading. Raises OSError, or TraceError if it is not a regular file."""
    # The check is of the open file: by now the path may lead to another one.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind != stat.S_IFREG:
            kind_in_words = OTHER_KINDS.get(kind, "something else")
            raise TraceError(f"it is {kind_in_words}, and only regular files are read")
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


@contextlib.contextmanager
def named_in_errors(path: str | os.PathLike[str], kind: type[ValueError]) -> Iterator[None]:
    """To be entered while an .npz file is read: whatever is wrong with it becomes an error of this
    kind that names it. An OSError stays as it is."""
    try:
        yield
    except (TraceError, kind) as error:
        raise kind(f"{os.fspath(path)}: {error}") from None
    except OSError:
        raise
    except Exception as error:  # BadZipFile, zlib.error: whatever a damaged archive causes
        fault = " ".join(f"{type(error).__name__}: {error}".split())
        raise kind(f"{os.fspath(path)}: it cannot be read ({fault})") from None


def read_arrays(
    path: str | os.PathLike[str],
    most_bytes: Mapping[str, int],
    needed: Sequence[str],
    most_numbers: int,
    most_in_all: int,
) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file that have an entry in `most_bytes`. Others are not read.

    Raises OSError, or TraceError for a file that is not such an archive, lacks what is `needed`, or
    unpacks to more than is allowed. The latter is found out before anything is unpacked. Nothing in
    the file is executed.
    """
    with open_regular(path) as raw:
        if not zipfile.is_zipfile(raw):
            raise TraceError("it is not an .npz archive")
        try:
            with zipfile.ZipFile(raw) as archive:
                by_file = {info.filename: info for info in archive.infolist()}
                members = {
                    name: by_file[f"{name}.npy"] for name in most_bytes if f"{name}.npy" in by_file
                }
                _check_sizes(members, most_bytes, needed, most_in_all)
                return {name: _array(archive, members[name], most_numbers) for name in members}
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise TraceError("it is damaged: its list of files is outside of it") from None


def _check_sizes(
    members: Mapping[str, zipfile.ZipInfo],
    most_bytes: Mapping[str, int],
    needed: Sequence[str],
    most_in_all: int,
) -> None:
    for name in needed:
        if name not in members:
            raise TraceError(f"it holds no array {name!r}")
    for name, info in members.items():
        if info.file_size > most_bytes[name] + HEADER_BYTES:
            raise TraceError(
                f"{name} unpacks to {info.file_size} bytes: at most {most_bytes[name]} are read"
            )
    total = sum(info.file_size for info in members.values())
    if total > most_in_all + len(members) * HEADER_BYTES:
        raise TraceError(f"it unpacks to {total} bytes: at most {most_in_all} are read")


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, most: int) -> NDArray[Any]:
    from numpy.lib.format import read_array

    with archive.open(info) as member:
        array: NDArray[Any] = read_array(member, allow_pickle=False)
    if array.size > most:
        raise TraceError(f"{info.filename} holds {array.size} numbers: at most {most}")
    return array
