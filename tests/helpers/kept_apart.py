"""Runs a program in Python apart, as `bfc predict` runs a script, but without PyTorch.

Arguments: the system calls that are refused, as "unshare,landlock_create_ruleset" or "", as a
container does, with "root" for the rights of root, or "block", for a block of `bfc.predict`; the
program; its own arguments.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import runpy
import struct
import sys
import tempfile

from bfc_tools.predicting import outside
from bfc_tools.predicting.file_layer import laid_over

NUMBERS = {
    "unshare": 97 if platform.machine() == "aarch64" else 272,
    "mount": 40 if platform.machine() == "aarch64" else 165,
    "landlock_create_ruleset": 444,
}


def refuse(names: list[str]) -> None:
    """This process, and all that it starts, gets EPERM from these calls."""
    rules = [(0x20, 0, 0, 0)]  # the number of the call
    for at, name in enumerate(names):
        rules.append((0x15, len(names) - at, 0, NUMBERS[name]))  # jumps to the end
    rules += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | errno.EPERM)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *rule) for rule in rules))
    program = struct.pack("@HxxxxxxP", len(rules), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()


def give_up_rights() -> None:
    """As an ordinary user, whose files are those of root. To map root's number takes SETFCAP."""
    rights = struct.pack("=6I", 1 << 31, 1 << 31, 0, 0, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capset(struct.pack("=2I", 0x20080522, 0), rights) == 0


def main(refused: str, program: str, *arguments: str) -> None:
    names = [name for name in refused.split(",") if name]
    if "root" in names:
        names.remove("root")
        give_up_rights()
    refuse([name for name in names if name in NUMBERS])
    sys.argv = [program, *arguments]
    if names == ["block"]:
        with tempfile.TemporaryDirectory() as folder, laid_over(folder, str):
            runpy.run_path(program, run_name="__main__")
        return
    outside.begin(real_files=False)
    assert outside.link is not None
    runpy.run_path(program, run_name="__main__")
    outside.link.answered(0)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (OSError, RuntimeError) as error:
        sys.exit(f"bfc: {error}")
