"""A checkout is installed again and again: after a pull, into another environment, for another
Python, from where nobody may write. The checkout of these tests has setup.py and all that it reads
of this one, and two small modules in place of its own: what is under test is how they are built."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from sources import CHECKOUT

#: Of the checkout, beside the modules.
FILES = ("setup.py", "setup_stubs.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
MODULES = {
    "bfc/__init__.py": "",
    "bfc/_core.pyx": '''
from bfc._numbers cimport OF_PXD

cdef extern from "numbers.hpp":
    const int OF_HEADER
    const int OF_FLAGS

def answer():
    """What each file says."""
    return OF_HEADER, OF_PXD, 1, OF_FLAGS
''',
    "bfc/_core.pyi": "def answer() -> tuple[int, int, int, int]: ...\n",
    "bfc/_numbers.pxd": "cdef enum:\n    OF_PXD = 1\n",
    "bfc/native/numbers.hpp": '#include "included.hpp"\nconst int OF_FLAGS = FLAG;\n',
    "bfc/native/included.hpp": "const int OF_HEADER = 1;\n#ifndef FLAG\n#define FLAG 1\n#endif\n",
    "bfc/old/__init__.py": "",
    "bfc/policies/__init__.py": "",
    "bfc/policies/_other.pyx": "",
    "bfc_pytest.py": "",
    "bfc_tools/browser/vendor/some.LICENSE": "",
}
SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))
ANSWER = "from bfc import _core; print(*_core.answer())"
#: The rights of a user who is not root, whoever runs the tests.
UNPRIVILEGED = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []


class Checkout:
    """A folder with a small package, the commands that install it, and what they built."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkout"
        self.installed = folder / "installed"
        for name in FILES:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(CHECKOUT / name, self.folder / name)
        for name, text in MODULES.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.folder / name).read_text()
        assert old in text
        self.write(name, text.replace(old, new))

    def run(self, *command: str | Path, flags: str = "-O0", **environment: str) -> str:
        """Runs a command in the checkout, and returns what it prints to both streams."""
        ran = subprocess.run(
            command,
            cwd=self.folder,
            env=os.environ | {"BFC_CFLAGS": flags} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self.failed = ran.returncode != 0
        return ran.stdout

    def install(self, what: str = ".", rights: tuple[str, ...] = (), **more: str) -> str:
        """Installs it into a new folder, and returns what its module answers."""
        shutil.rmtree(self.installed, ignore_errors=True)
        pip = (*rights, sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps")
        said = self.run(*pip, "--no-index", "--target", self.installed, what, **more)
        assert not self.failed, said
        return self.answer(self.installed)

    def answer(self, folder: Path, python: str = sys.executable) -> str:
        ran = [python, "-c", ANSWER]
        return subprocess.run(
            ran, cwd=folder, check=True, capture_output=True, text=True
        ).stdout.strip()

    def built(self, pattern: str = "*") -> dict[str, int]:
        """The files below build/ that match, and when they were written."""
        found = (self.folder / "build").rglob(pattern)
        return {str(path): path.stat().st_mtime_ns for path in found if path.is_file()}


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture(scope="module")
def installed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a checkout lies that was installed. It is only copied: to compile takes longest."""
    checkout = Checkout(tmp_path_factory.mktemp("installed"))
    assert checkout.install() == "1 1 1 1"
    return checkout.folder.parent


@pytest.fixture
def installed(installed_once: Path, checkout: Checkout) -> Checkout:
    """A checkout that was installed once. Its files are as old as what was made from them."""
    shutil.copytree(installed_once, checkout.folder.parent, dirs_exist_ok=True)
    return checkout


@pytest.mark.long
def test_it_installs_again_and_nothing_is_made_twice(installed: Checkout) -> None:
    stub = (installed.installed / "bfc/_core.pyi").read_text()
    assert stub.count("What each file says.") == 1
    made = installed.built("*.cpp") | installed.built("*.o") | installed.built("*.so")
    assert len(made) == 2 + 3 + 3  # Cython's own module is in C
    assert installed.install() == "1 1 1 1"
    assert (installed.installed / "bfc/_core.pyi").read_text() == stub
    assert made.items() <= installed.built().items()


long = functools.partial(pytest.param, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("file", "old", "new", "answer"),
    [
        ("bfc/native/included.hpp", "OF_HEADER = 1", "OF_HEADER = 2", "2 1 1 1"),
        long("bfc/_numbers.pxd", "OF_PXD = 1", "OF_PXD = 2", "1 2 1 1"),
        long("bfc/_core.pyx", "OF_PXD, 1", "OF_PXD, 2", "1 1 2 1"),
        long("setup.py", '("BFC_DEBUG", DEBUG)', '("BFC_DEBUG", DEBUG), ("FLAG", "2")', "1 1 1 2"),
        long("setup.py", '"cdivision": True', '"cdivision": False', "1 1 1 1"),
    ],
)
def test_what_a_pull_changes_is_in_the_next_install(installed, file, old, new, answer) -> None:
    """And nothing that it does not touch is made again, unless it is setup.py."""
    before = installed.built("*.cpp") | installed.built("*.so")
    installed.edit(file, old, new)
    assert installed.install() == answer
    after = installed.built()
    changed = {Path(name).name.split(".")[0] for name in before if before[name] != after[name]}
    assert changed == ({"_core", "_other", "_cython"} if file == "setup.py" else {"_core"})


@pytest.mark.long
def test_what_a_pull_moves_is_gone_from_the_next_install(installed: Checkout) -> None:
    assert (installed.installed / "bfc/old/__init__.py").exists()
    shutil.rmtree(installed.folder / "bfc/old")
    (installed.folder / "bfc/policies/_other.pyx").rename(installed.folder / "bfc/_other.pyx")
    installed.install()
    names = {path.name for path in (installed.installed / "bfc").rglob("*") if path.is_file()}
    assert not (installed.installed / "bfc/old").exists()
    assert (installed.installed / f"bfc/_other{SUFFIX}").exists()
    assert not (installed.installed / f"bfc/policies/_other{SUFFIX}").exists()
    assert f"_core{SUFFIX}" in names


@pytest.mark.long
def test_other_flags_make_other_modules(installed: Checkout) -> None:
    """Of a wheel and of the checkout, whichever was built last."""
    inplace = (sys.executable, "setup.py", "--quiet", "build_ext", "--inplace")
    installed.run(*inplace, flags="-O0")
    assert installed.answer(installed.folder) == "1 1 1 1"
    for flags, answer in (("-O0 -DFLAG=2", "1 1 1 2"), ("-O0", "1 1 1 1")):
        installed.run(*inplace, flags=flags)
        assert installed.answer(installed.folder) == answer
        assert installed.install(flags=flags) == answer


@pytest.mark.long
def test_it_installs_beside_an_editable_install(installed: Checkout) -> None:
    """Neither has files of the other, and what is compiled for one serves the other."""
    editable = installed.folder.parent / "editable"
    pip = (sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps")
    edit = (*pip, "--no-index", "--target", editable, "--editable", ".")
    made = installed.built("*.o")
    said = installed.run(*edit)
    assert not installed.failed, said
    assert installed.answer(installed.folder) == "1 1 1 1"
    assert made.items() <= installed.built("*.o").items()
    installed.edit("bfc/native/included.hpp", "OF_HEADER = 1", "OF_HEADER = 2")
    said = installed.run(*edit, "--upgrade")
    assert not installed.failed, said
    assert installed.answer(installed.folder) == "2 1 1 1"
    assert installed.answer(installed.installed) == "1 1 1 1"
    assert "What each" not in (installed.folder / "bfc/_core.pyi").read_text()
    made = installed.built("*.o")
    assert installed.install() == "2 1 1 1"
    assert made.items() <= installed.built("*.o").items()


@pytest.mark.long
def test_its_source_archive_installs(checkout: Checkout) -> None:
    checkout.run(sys.executable, "setup.py", "--quiet", "sdist")
    (archive,) = (checkout.folder / "dist").iterdir()
    assert not (checkout.folder / "build").exists()  # it needs no compiler
    assert checkout.install(str(archive)) == "1 1 1 1"


def pythons() -> Iterator[str]:
    """Others than this one, of those that bfc supports."""
    for minor in (11, 12, 13, 14):
        if sys.version_info[1] != minor:
            name = f"python3.{minor}"
            pyenv = sorted(Path.home().glob(f".pyenv/versions/*/bin/{name}"))
            yield from (str(path) for path in pyenv[:1] or filter(None, [shutil.which(name)]))


@pytest.mark.long
def test_two_pythons_build_in_one_checkout(checkout: Checkout) -> None:
    """In turn, and each finds what it made. The other Python takes this one's Cython, which runs
    without being compiled, too."""
    other = next(pythons(), None)
    if other is None:
        pytest.skip("there is one Python only")
    build = ("setup.py", "--quiet", "build_ext", "--inplace")
    packages = sysconfig.get_path("purelib")
    checkout.run(sys.executable, *build)
    translated = checkout.built("*.cpp")
    said = checkout.run(other, *build, PYTHONPATH=packages)
    assert not checkout.failed, said
    assert checkout.built("*.cpp") == translated
    made = checkout.built("*.so")
    assert len(made) == 2 * 3
    assert checkout.answer(checkout.folder) == checkout.answer(checkout.folder, other) == "1 1 1 1"
    for python in (sys.executable, other):
        checkout.run(python, *build, PYTHONPATH=packages)
    assert checkout.built("*.so") == made


@pytest.fixture
def closed(checkout: Checkout) -> Iterator[Checkout]:
    """A checkout in which nobody may write."""
    for folder, _, _ in os.walk(checkout.folder):
        os.chmod(folder, 0o555)
    yield checkout
    for folder, _, _ in os.walk(checkout.folder):
        os.chmod(folder, 0o755)


needs_setpriv = pytest.mark.skipif(
    bool(UNPRIVILEGED) and shutil.which("setpriv") is None, reason="setpriv is not installed"
)


EDITABLE = ("install", "--no-build-isolation", "--no-deps", "--no-index", "--target")


def says_what_cannot_be_written(checkout: Checkout, *rights: str) -> None:
    """An editable install, which would write into the checkout."""
    pip = (*rights, sys.executable, "-m", "pip", *EDITABLE, checkout.installed, "--editable", ".")
    said = checkout.run(*pip)
    assert checkout.failed
    assert f"{checkout.folder} cannot be written" in said
    assert "leave out --editable" in said


@pytest.mark.long
@needs_setpriv
def test_it_installs_from_where_nobody_may_write(closed: Checkout) -> None:
    before = sorted(closed.folder.rglob("*"))
    assert closed.install(rights=tuple(UNPRIVILEGED)) == "1 1 1 1"
    assert sorted(closed.folder.rglob("*")) == before
    says_what_cannot_be_written(closed, *UNPRIVILEGED)


#: Another user, who may read everything, and write only what that user owns.
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
NOBODY += ("--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search")
#: Runs what follows where the folder named first is mounted read-only; no other process sees that.
MOUNTED = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && cd "$0" && exec "$@"'


def mounts() -> bool:
    """Whether a folder can be mounted here: by root, and in few containers."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return not subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode


@pytest.mark.long
@pytest.mark.parametrize("way", ["mounted read-only", "of another user"])
def test_it_installs_from_a_tree_that_is(way: str, checkout: Checkout) -> None:
    """Nothing in it changes. An editable install says which folder it needs."""
    if way == "mounted read-only":
        rights = ("unshare", "--mount", "sh", "-c", MOUNTED, str(checkout.folder))
        if not mounts():
            pytest.skip("needs root, and a machine where root can mount a folder")
    else:
        rights = NOBODY
        if os.geteuid() != 0 or shutil.which("setpriv") is None:
            pytest.skip("needs root, who becomes another user")
    checkout.folder.parent.chmod(0o777)  # the installation goes there
    before = sorted(checkout.folder.rglob("*"))
    assert checkout.install(rights=rights) == "1 1 1 1"
    assert sorted(checkout.folder.rglob("*")) == before
    says_what_cannot_be_written(checkout, *rights)


@pytest.mark.long
@needs_setpriv
def test_it_installs_where_another_user_has_built(installed: Checkout) -> None:
    """As after `sudo pip install .`"""
    for folder in [installed.folder / "build", *(installed.folder / "build").iterdir()]:
        folder.chmod(0o555)
    assert installed.install(rights=tuple(UNPRIVILEGED)) == "1 1 1 1"
    for folder in [installed.folder / "build", *(installed.folder / "build").iterdir()]:
        folder.chmod(0o755)


NO_PYTHON_H = """
import runpy, sys, sysconfig
sysconfig.get_config_vars().update(INCLUDEPY="bfc", CONFINCLUDEPY="bfc")  # not there
sys.argv = ["setup.py", "--quiet", "bdist_wheel"]
runpy.run_path("setup.py", run_name="__main__")
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("command", "environment", "missing"),
    [
        (("setup.py", "bdist_wheel"), {"CXX": "no-such-compiler"}, "'no-such-compiler'"),
        (("setup.py", "build_ext", "--inplace"), {"PATH": ""}, "No such file or directory"),
        (("-c", NO_PYTHON_H), {}, "Python.h: No such file"),
    ],
    ids=["wheel", "inplace", "header"],
)
def test_what_is_missing_is_said_before_anything_is_made(
    checkout, command, environment, missing
) -> None:
    said = checkout.run(sys.executable, *command, **environment)
    assert checkout.failed
    assert missing in said
    assert "apt-get install g++ python3-dev" in said
    assert "Traceback" not in said
    assert checkout.built() == {}
