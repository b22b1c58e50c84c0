"""The extension modules, and how each is compiled. Everything else stands in pyproject.toml.

BFC_DEBUG=1 compiles the O(1) assertions in, BFC_DEBUG=2 also a whole check() after each change
(`make check`). BFC_CFLAGS and BFC_LDFLAGS come last on the compiler's and the linker's command
lines: a sanitizer's flags, say.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import sysconfig
import zlib
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

DEBUG = os.environ.get("BFC_DEBUG", "0")
if DEBUG not in ("0", "1", "2"):
    raise SystemExit(f"BFC_DEBUG is 0, 1 or 2, not {DEBUG!r}")

FLAGS = os.environ.get("BFC_CFLAGS", "").split()
LINK_FLAGS = os.environ.get("BFC_LDFLAGS", "").split()

HERE = Path(__file__).parent
JOBS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

COMMON = ["-g0", "-fvisibility=hidden"]
COMMON += ["-w"]  # what is compiled is Cython's; tests compile our headers with every warning on
CPP = ["-std=c++17"]
HOT = ["-O2"]
CALLS = ["-O3"]  # what a hit and its free pass through: a second of compiling, and 3 ns of 60
COLD = ["-O1"]  # half the time of -O2, and its functions wait for a driver or for Python
COPIES = ["-O3"]
PLANS = ["-O3"]
ENGINE = ["-O3"]
if sys.platform == "linux":
    # The replay loop is to become one function for each policy, split and coalesce and bins
    # included: it took a seventh off an event, from 19.6 ns to 16.8. Without the last of these
    # limits TensorFlow's was left out, with a tenth more instructions.
    ENGINE += [
        f"--param={name}=9000" for name in ("max-inline-insns-single", "max-inline-insns-auto")
    ]
    ENGINE += [f"--param={name}=5000" for name in ("inline-unit-growth", "large-function-growth")]
    ENGINE += ["--param=large-function-insns=100000"]

    # Two fields written one by one and read back as one vector make a processor wait, and what was
    # just freed is read back at once: without it an event took up to a fifth longer.
    ENGINE += ["-fno-tree-slp-vectorize"]

    # A hot function stays in one piece. GCC predicted that a lookup mostly fails, and so moved half
    # of the replay loop to another page. It cost the caching policy a fiftieth.
    CALLS += ["-fno-reorder-blocks-and-partition"]
    ENGINE += ["-fno-reorder-blocks-and-partition"]

    # A new Buffer is cleared with plain stores. The instruction that GCC takes for 88 bytes starts
    # slowly: to allocate and drop one took up to a tenth longer. Clang does not know the flag.
    compilers = [os.environ.get(name) or sysconfig.get_config_var(name) for name in ("CC", "CXX")]
    if platform.machine() == "x86_64" and "clang" not in str(compilers):
        CALLS += ["-mmemset-strategy=vector_loop:256:noalign,libcall:-1:noalign"]

#: How a module is compiled, by the longest entry that its name begins with.
OPTIMISATION = {
    "": COLD,
    "_core": ENGINE,
    "allocators.": HOT,
    "allocators._allocator": CALLS,
    "allocators._frees": CALLS,
    "allocators._reading": COLD,
    "allocators._recorder": COLD,
    "buffers.": HOT,
    "buffers._buffer": CALLS,
    "copying.": COPIES,
    "interpreter._process": HOT,
    "pinned.": HOT,
    "plans.": PLANS,
    "policies.": HOT,
    "policies._bfc": CALLS,
    "policies._caching": CALLS,
}
#: Cython's own code for memoryviews and the like, once for all modules.
SHARED = "_cython"
HEADERS = "bfc/native"
#: Headers that others compile with, too.
PUBLIC_HEADERS = "bfc/include"

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
    "auto_pickle": False,  # no allocator is pickled; what says so took a tenth of a build
}

#: What nearly every module includes: half of what the compiler's front end had to read.
FIRST = "#define PY_SSIZE_T_CLEAN\n" + "".join(
    f"#include <{name}>\n"
    for name in (
        *("Python.h", "structmember.h", "frameobject.h", "traceback.h", "pthread.h"),
        *("algorithm", "atomic", "chrono", "cmath", "cstdlib", "cstring", "ios", "map", "mutex"),
        *("new", "stdexcept", "string", "thread", "typeinfo", "utility", "vector"),
    )
)


def headers_of(source: Path) -> set[str]:
    """The headers of ours that a source includes, by itself or through what it cimports, and those
    that they include: a class whose layout is in a header is laid out anew in all that use it."""
    headers: set[str] = set()
    read: set[Path] = set()
    left = [source, source.with_suffix(".pxd")]
    while left:
        path = left.pop()
        if path in read or not path.exists():
            continue
        read.add(path)
        text = path.read_text()
        names = re.findall(r'(?:#include|cdef extern from) "(\w+\.hp?p?)"', text)
        cimported = re.findall(r"from (bfc[\w.]*) cimport", text)
        names += [f"{name.rpartition('.')[2]}.hpp" for name in cimported]
        places = (f"{folder}/{name}" for folder in (HEADERS, PUBLIC_HEADERS) for name in names)
        found = {place for place in places if (HERE / place).exists()}
        left += [HERE / place for place in found]
        left += [HERE / f"{name.replace('.', '/')}.pxd" for name in cimported]
        headers |= found
    return headers


def sources() -> list[Path]:
    """What takes longest to compile comes first, since several are compiled at once."""
    found = (HERE / "bfc").rglob("*.pyx")
    return sorted(found, key=lambda source: source.stat().st_size, reverse=True)


def extension(source: Path) -> Extension:
    name = ".".join(source.relative_to(HERE / "bfc").with_suffix("").parts)
    rule = max((start for start in OPTIMISATION if name.startswith(start)), key=len)
    return Extension(
        f"bfc.{name}",
        [str(source.relative_to(HERE))],
        language="c++",
        include_dirs=[HEADERS, PUBLIC_HEADERS],
        depends=sorted(headers_of(source)),
        extra_compile_args=COMMON + CPP + OPTIMISATION[rule] + FLAGS,
        extra_link_args=LINK_FLAGS,
        define_macros=[("BFC_DEBUG", DEBUG)],
    )


class BuildExtensions(build_ext):  # type: ignore[misc]
    """Translates what is older than its sources, several modules at once, and compiles likewise.

    What is built into the checkout (`pip install --editable`, `build_ext --inplace`) keeps its
    intermediate files in build/, for each Python and each set of flags apart, so that nothing is
    made twice; setuptools alone would make an editable install from nothing each time.
    """

    parallel: int

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or JOBS
        if self.inplace or self.editable_mode:
            self.build_temp = f"{self.kept_in()}/temp"
            self.build_lib = f"{self.kept_in()}/lib"

    def kept_in(self) -> str:
        """The folder for this Python, this Cython and these flags."""
        variant = f"-{zlib.crc32(' '.join(FLAGS).encode()):x}" if FLAGS else ""
        return (
            f"build/{sysconfig.get_config_var('SOABI')}-cython{version('Cython')}-{DEBUG}{variant}"
        )

    def build_extensions(self) -> None:
        folder = f"build/cython{version('Cython')}"  # the same for each Python and set of flags
        shared, *modules = self.extensions
        shared.sources = [self.shared_code(folder)]
        self.translate(modules, folder)
        for built in self.extensions:
            built.depends.append("setup.py")
        if sys.platform == "linux" and "clang" not in str(self.compiler.compiler_so_cxx):
            self.precompile(modules)
        super().build_extensions()

    def copy_extensions_to_source(self) -> None:
        """Also deletes modules of the checkout whose source was moved or joined with another: they
        could still be imported, and would hide that something names them."""
        super().copy_extensions_to_source()
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        kept = {HERE / (module.name.replace(".", "/") + suffix) for module in self.extensions}
        for left in set((HERE / "bfc").rglob(f"*{suffix}")) - kept:
            left.unlink()

    def precompile(self, modules: list[Extension]) -> None:
        """Has GCC read once what nearly every module includes, for each set of flags that several
        modules have. GCC takes such a file only for the flags that it was made with, and makes the
        same code with it as without."""
        sets = Counter(tuple(module.extra_compile_args) for module in modules)
        for flags in (flags for flags, count in sets.items() if count > 3):
            places = [f"-I{place}" for place in self.compiler.include_dirs]
            command = [*self.compiler.compiler_so_cxx, *places, *flags, "-x", "c++-header"]
            key = zlib.crc32(f"{command} {sys.version} {FIRST}".encode())
            header = Path(self.kept_in(), f"first-{key:x}.hpp")
            if not header.with_suffix(".hpp.gch").exists():
                header.parent.mkdir(parents=True, exist_ok=True)
                header.write_text(FIRST)
                made = header.with_suffix(f".{os.getpid()}")
                subprocess.run([*command, str(header), "-o", str(made)], check=True)
                made.rename(header.with_suffix(".hpp.gch"))
            for module in (one for one in modules if tuple(one.extra_compile_args) == flags):
                module.extra_compile_args = ["-include", str(header), *flags]

    def shared_code(self, folder: str) -> str:
        source = Path(folder, f"{SHARED}.c")  # before Cython 3.2.9 it cannot be C++
        if not source.exists() or source.stat().st_mtime < (HERE / "setup.py").stat().st_mtime:
            source.parent.mkdir(parents=True, exist_ok=True)
            generate = [sys.executable, "-m", "cython", f"--generate-shared={source}"]
            subprocess.run(generate, check=True)
        return str(source)

    def translate(self, modules: list[Extension], folder: str) -> None:
        """Cython alone would do it again in each environment, where its own declarations are as new
        as the environment."""
        from Cython.Build import cythonize
        from Cython.Build.Dependencies import create_dependency_tree

        def newest_source(source: str) -> float:
            dependencies = map(Path, create_dependency_tree(quiet=True).all_dependencies(source))
            ours = (path for path in dependencies if (HERE / "bfc") in path.absolute().parents)
            return max(path.stat().st_mtime for path in ours)

        outdated = []
        for module in modules:
            (source,) = module.sources
            made = Path(folder, source).with_suffix(".cpp")
            if made.exists() and made.stat().st_mtime >= newest_source(source):
                module.sources = [str(made)]
            else:
                outdated.append(module)
        translated = cythonize(
            outdated,
            build_dir=folder,
            nthreads=self.parallel,
            compiler_directives=DIRECTIVES,
            quiet=not self.distribution.verbose,
            shared_utility_qualified_name=f"bfc.{SHARED}",
        )
        by_name = {module.name: module for module in translated}
        for module in outdated:
            module.sources = by_name[module.name].sources
            module.depends = by_name[module.name].depends


class BuildModules(build_py):  # type: ignore[misc]
    """Also deletes files that an earlier build left in its folder, and whose source was moved: a
    wheel would have them, and a folder hides the module of the same name."""

    def run(self) -> None:
        for left in Path(self.build_lib).glob("bfc*/**/*"):
            is_source = left.is_file() and left.suffix not in (".so", ".pyd")
            if is_source and not (HERE / left.relative_to(self.build_lib)).exists():
                left.unlink()
        super().run()


class BuildWheel(bdist_wheel):  # type: ignore[misc]
    """Puts the docstrings of the compiled modules into their stubs: editors show no others."""

    def run(self) -> None:
        self.run_command("build")
        folder = str(Path(self.get_finalized_command("build").build_lib).absolute())
        script = HERE / "tests/helpers/stub_docstrings.py"
        subprocess.run([sys.executable, str(script), folder], check=True, cwd=folder)
        super().run()


def shared_extension() -> Extension:
    return Extension(f"bfc.{SHARED}", [], language="c++", extra_compile_args=COMMON + COLD + FLAGS)


setup(
    ext_modules=[shared_extension(), *map(extension, sources())],
    cmdclass={"build_ext": BuildExtensions, "build_py": BuildModules, "bdist_wheel": BuildWheel},
)
