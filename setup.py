"""The extension modules, and how each is compiled. Everything else stands in pyproject.toml.

BFC_DEBUG=1 compiles the O(1) assertions in, BFC_DEBUG=2 also a whole check() after each change
(`make check`). BFC_CFLAGS and BFC_LDFLAGS come last on the compiler's and the linker's command
lines: a sanitizer's flags, say.
"""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from glob import glob
from importlib.metadata import version
from pathlib import Path

import Cython
from Cython.Build import cythonize
from Cython.Build.Dependencies import create_dependency_tree
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.modified import newer_group

DEBUG = os.environ.get("BFC_DEBUG", "0")
if DEBUG not in ("0", "1", "2"):
    raise SystemExit(f"BFC_DEBUG is 0, 1 or 2, not {DEBUG!r}")

FLAGS = os.environ.get("BFC_CFLAGS", "").split()
LINK_FLAGS = os.environ.get("BFC_LDFLAGS", "").split()
CC, CXX = (
    shlex.split(os.environ.get(name) or sysconfig.get_config_var(name) or usual)
    for name, usual in (("CC", "cc"), ("CXX", "c++"))
)
CYTHON = version("Cython")


def kind_of_compiler() -> tuple[bool, bool]:
    """Whether the compiler is GCC itself, and whether it compiles for x86-64, which need not be
    what this machine is. Of a compiler that is not there it is said later."""
    look = [*CXX, "-dM", "-E", "-x", "c++", "/dev/null"]
    try:
        said = subprocess.run(look, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return False, False
    return "__clang__" not in said, "__x86_64__" in said


GCC, X86 = kind_of_compiler()
JOBS = len(os.sched_getaffinity(0))

COMMON = ["-g0", "-fvisibility=hidden"]
COMMON += ["-w"]  # what is compiled is Cython's; tests compile our headers with every warning on
CPP = ["-std=c++17"]
HOT = ["-O2"]
CALLS = ["-O3"]  # what a hit and its free pass through: a second of compiling, and 3 ns of 60
COLD = ["-O1"]  # half the time of -O2, and its functions wait for a driver or for Python
LOOPS = ["-O3"]  # of copies and of plans
ENGINE = ["-O3"]

if GCC:
    # The replay loop is to become one function for each policy, split and coalesce and bins
    # included: it took a seventh off an event, from 19.6 ns to 16.8. Without the last of these
    # limits that of TensorFlow's was left out, with a tenth more instructions.
    ENGINE += [f"--param=max-inline-insns-{kind}=9000" for kind in ("single", "auto")]
    ENGINE += ["--param=inline-unit-growth=5000", "--param=large-function-growth=5000"]
    ENGINE += ["--param=large-function-insns=100000"]

    # A hot function stays in one piece. GCC predicted that a lookup mostly fails, and so moved half
    # of the replay loop to another page. It cost the caching policy a fiftieth.
    CALLS += ["-fno-reorder-blocks-and-partition"]
    ENGINE += ["-fno-reorder-blocks-and-partition"]

if GCC and X86:
    # A new Buffer is cleared with plain stores. The instruction that GCC takes for 88 bytes starts
    # slowly: to allocate and drop one took up to a tenth longer.
    CALLS += ["-mmemset-strategy=vector_loop:256:noalign,libcall:-1:noalign"]

# Two fields written one by one and read back as one vector make a processor wait, and what was just
# freed is read back at once: without it an event took up to a fifth longer.
ENGINE += ["-fno-tree-slp-vectorize"]

#: How a module is compiled, by the longest entry that its name begins with.
OPTIMISATION = {
    "": COLD,
    "_core": ENGINE,
    "allocators.": HOT,
    "allocators._allocator": CALLS,
    "allocators._frees": CALLS,
    "allocators._reading": COLD,
    "allocators._recorder": COLD,
    "backings.": HOT,
    "buffers.": HOT,
    "buffers._buffer": CALLS,
    "copying.": LOOPS,
    "interpreter._process": HOT,
    "pinned.": HOT,
    "plans.": LOOPS,
    "policies.": HOT,
    "policies._bfc": CALLS,
    "policies._caching": CALLS,
}
#: Cython's own code for memoryviews and the like, once for all modules.
SHARED = "bfc._cython"
HEADERS = ["bfc/native", "bfc/include"]  # the latter are for others, too

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "cdivision": True,
    "initializedcheck": False,
    "binding": False,
    "embedsignature": True,
    "embedsignature.format": "clinic",
    "annotation_typing": False,
    "freethreading_compatible": True,  # an import leaves the GIL off, where there may be none
    "auto_pickle": False,  # no allocator is pickled; what says so took a tenth of a build
}

#: A compiled module depends on all this, beside the files of the checkout.
BUILT_WITH = [os.environ.get(name) for name in ("CC", "CXX", "CFLAGS", "CPPFLAGS", "LDFLAGS")]
BUILT_WITH += [DEBUG, *FLAGS, "and", *LINK_FLAGS, sys.version, CYTHON]

UNABLE = """
bfc is compiled when it is installed: that needs a C++ compiler, and the header files of Python.
{0}
Install both, and run the same command again:
    apt-get install g++ python3-dev       (Debian, Ubuntu)
    dnf install gcc-c++ python3-devel     (Fedora, RHEL)
    conda install gxx                     (conda, whose Python brings its header files)
Or name a compiler that is there: CC=clang CXX=clang++ pip install .
"""
READ_ONLY = """
{0} cannot be written, and an editable install puts there what it compiles.
Copy it to a folder of yours, or leave out --editable.
"""


def build_folder() -> str:
    """`build`, or, if the checkout is mounted read-only, belongs to another user or was built by
    one, a folder that is removed at the end."""
    if all(os.access(path, os.W_OK) for path in (".", *glob("*.egg-info"), *glob("build/**/"))):
        return "build"
    folder = tempfile.mkdtemp(prefix="bfc-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


BUILD = build_folder()
TRANSLATED = f"{BUILD}/cython{CYTHON}"  # the same for every Python and set of flags
KEPT = f"{BUILD}/{sysconfig.get_config_var('SOABI')}-{zlib.crc32(repr(BUILT_WITH).encode()):08x}"


def extension(source: Path) -> Extension:
    name = ".".join(source.relative_to("bfc").with_suffix("").parts)
    rule = max((start for start in OPTIMISATION if name.startswith(start)), key=len)
    return Extension(
        f"bfc.{name}",
        [str(source)],
        language="c++",
        include_dirs=HEADERS,
        extra_compile_args=COMMON + CPP + OPTIMISATION[rule] + FLAGS,
        extra_link_args=LINK_FLAGS,
        define_macros=[("BFC_DEBUG", DEBUG)],
    )


def extensions() -> list[Extension]:
    """What takes longest to compile comes first, since several are compiled at once. The source of
    the shared module is written by Cython, before version 3.2.9 only in C."""
    found = sorted(Path("bfc").rglob("*.pyx"), key=lambda path: path.stat().st_size, reverse=True)
    shared = Extension(SHARED, [], extra_compile_args=COMMON + COLD + FLAGS)
    return [shared, *map(extension, found)]


def translated_from(source: str) -> list[str]:
    """The files of ours that a module is translated from. Cython's own declarations do not count:
    they are as new as the environment, and each version of Cython has a folder."""
    found = map(Path, create_dependency_tree(quiet=True).all_dependencies(source))
    theirs = Path(Cython.__file__).parent
    return ["setup.py", *(str(path) for path in found if theirs not in path.absolute().parents)]


def compiled_from(compiled: str) -> list[str]:
    """The files that a module was compiled from, as the compiler wrote them down (-MMD). Without
    that list it is what is missing, and so the module is compiled."""
    rule = Path(compiled).with_suffix(".d")
    if not rule.exists():
        return [str(rule)]
    return ["setup.py", *shlex.split(rule.read_text().replace("\\\n", " "))[1:]]


class BuildExtensions(build_ext):  # type: ignore[misc]
    """Translates and compiles what is older than what it is made from, several modules at once."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.parallel = JOBS  # as an option of setup() an editable install would lose it

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.editable_mode:  # setuptools would make everything anew in a folder that it removes
            self.build_lib, self.build_temp = f"{KEPT}/lib", f"{KEPT}/temp"

    def build_extensions(self) -> None:
        self.require_compiler()
        self.translate()
        for module in self.extensions:
            (made,) = self.compiler.object_filenames(module.sources, output_dir=self.build_temp)
            module.depends = compiled_from(made)
            module.extra_compile_args = [*module.extra_compile_args, "-MMD"]
        super().build_extensions()
        self.remove_others(self.build_lib)

    def require_compiler(self) -> None:
        """Ends what cannot succeed before it has begun."""
        places = [f"-I{place}" for place in self.include_dirs]
        program = b"#include <Python.h>\n#include <string>\n"
        try:
            subprocess.run([*CC, "--version"], check=True, capture_output=True)
            look = [*CXX, *places, *CPP, "-E", "-x", "c++", "-"]
            subprocess.run(look, check=True, capture_output=True, input=program)
        except OSError as error:
            raise SystemExit(UNABLE.format(error)) from None
        except subprocess.CalledProcessError as error:
            raise SystemExit(UNABLE.format(error.stderr.decode(errors="replace"))) from None

    def translate(self) -> None:
        shared, *modules = self.extensions
        outdated = []
        for module in modules:
            made = Path(TRANSLATED, module.sources[0]).with_suffix(".cpp")
            if newer_group(translated_from(module.sources[0]), str(made)):
                made.unlink(missing_ok=True)  # which Cython might take for new enough
                outdated.append(module)
        cythonize(
            [shared, *outdated],
            build_dir=TRANSLATED,
            nthreads=self.parallel,
            compiler_directives=DIRECTIVES,
            quiet=not self.distribution.verbose,
            shared_utility_qualified_name=SHARED,
        )
        shared.sources = [f"{TRANSLATED}/{SHARED.replace('.', '/')}.c"]
        for module in modules:
            module.sources = [str(Path(TRANSLATED, module.sources[0]).with_suffix(".cpp"))]

    def copy_extensions_to_source(self) -> None:
        if not os.access("bfc", os.W_OK):
            raise SystemExit(READ_ONLY.format(Path.cwd()))
        self.force = True  # what lies there may be younger, and built with other flags
        super().copy_extensions_to_source()
        self.remove_others(".")

    def remove_others(self, folder: str) -> None:
        """Deletes modules whose source was moved or joined with another: they could still be
        imported, and would hide that something names them."""
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        kept = {Path(folder, module.name.replace(".", "/") + suffix) for module in self.extensions}
        for left in set(Path(folder, "bfc").rglob(f"*{suffix}")) - kept:
            left.unlink()


class BuildModules(build_py):  # type: ignore[misc]
    """Copies all files anew: a wheel would have those whose source was moved since another build,
    and a folder hides the module of the same name."""

    def run(self) -> None:
        for left in Path(self.build_lib).glob("bfc*/**/*"):
            if left.is_file() and left.suffix != ".so":
                left.unlink()
        super().run()


class BuildWheel(bdist_wheel):  # type: ignore[misc]
    """Puts the docstrings of the compiled modules into their stubs: editors show no others."""

    def run(self) -> None:
        self.get_finalized_command("build_ext").require_compiler()  # before anything is copied
        self.run_command("build")
        folder = str(Path(self.get_finalized_command("build").build_lib).absolute())
        if "_PYTHON_HOST_PLATFORM" not in os.environ:  # these modules are of this machine
            subprocess.run([sys.executable, "setup_stubs.py", folder], check=True)
        self.skip_build = True  # it would build the modules a second time
        super().run()


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildExtensions, "build_py": BuildModules, "bdist_wheel": BuildWheel},
    options={
        "build": {"build_base": KEPT, "build_lib": f"{KEPT}/lib", "build_temp": f"{KEPT}/temp"},
        "egg_info": {} if BUILD == "build" else {"egg_base": BUILD},
    },
)
