"""Every module stands on its own, and every public name is there."""

from __future__ import annotations

import subprocess
import sys

from sources import BESIDE, CHECKOUT, PACKAGES, assert_none, module_name

import bfc

#: Modules that need an extra package: they may fail to import where they say that it is missing.
EXTRAS = (
    *("bfc.integrations", "bfc.testing", "bfc_tools.predicting"),
    *(BESIDE.keys() - {"bfc_tools"}),
)
MODULES = sorted(
    module_name(path)
    for package in PACKAGES
    for path in package.rglob("*.py*")
    if path.suffix in (".py", ".pyx") and path.stem != "__main__"
)
#: Each module of bfc imports `bfc` first, so its children start with that, and with the packages
#: that take long. What a child imports, no other has.
PARENT = """
import os, sys, traceback
import bfc
import hypothesis, numpy, pytest

for name in sys.argv[1:]:
    sys.stdout.flush(), sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.dup2(1, 2)
        try:
            __import__(name)
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    print("\\0", end="", flush=True)
"""


def test_every_module_imports_alone_and_without_a_warning() -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", PARENT, *MODULES],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=CHECKOUT,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    said = dict(zip(MODULES, ran.stdout.split("\0")[:-1], strict=True))
    assert_none(
        f"{name}: {text}" for name, text in said.items() if text and not is_missing(name, text)
    )


def is_missing(name: str, text: str) -> bool:
    """Whether the module says that a package which it needs is not there."""
    errors = ("ModuleNotFoundError", "DeviceUnavailableError")
    return name.startswith(EXTRAS) and any(error in text for error in errors)


def test_every_public_name_exists_and_is_listed_once() -> None:
    assert [name for name in bfc.__all__ if not hasattr(bfc, name)] == []
    assert len(set(bfc.__all__)) == len(bfc.__all__)
    namespace: dict[str, object] = {}
    exec("from bfc import *", namespace)
    assert set(bfc.__all__) <= set(namespace)


def test_every_public_name_says_what_it_is() -> None:
    assert [name for name in bfc.__all__ if not getattr(bfc, name).__doc__] == []
