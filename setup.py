"""The extension modules. Everything else about the package stands in pyproject.toml.

BFC_DEBUG=1 compiles the O(1) assertions in, BFC_DEBUG=2 also a whole check() after each change
(`make check`).
"""

import os
import sys

from Cython.Build import cythonize
from setuptools import Extension, setup

DEBUG = os.environ.get("BFC_DEBUG", "0")
if DEBUG not in ("0", "1", "2"):
    raise SystemExit(f"BFC_DEBUG is 0, 1 or 2, not {DEBUG!r}")

COMPILE = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden"]
if sys.platform == "linux":
    # The replay loop is to become one function for each policy, split and coalesce and bins
    # included: it took a seventh off an event, from 19.6 ns to 16.8.
    COMPILE += [
        f"--param={name}=3000" for name in ("max-inline-insns-single", "max-inline-insns-auto")
    ]
    COMPILE += [f"--param={name}=2000" for name in ("inline-unit-growth", "large-function-growth")]

    # Two fields written one by one and read back as one vector make a processor wait, and what was
    # just freed is read back at once: without it an event took up to a fifth longer.
    COMPILE += ["-fno-tree-slp-vectorize"]

HEADERS = [
    "bfc/_bins.hpp",
    "bfc/_usage.hpp",
    "bfc/_caching.hpp",
    "bfc/_history.hpp",
    "bfc/_torch_sizes.hpp",
    "bfc/_starts.hpp",
    "bfc/_lock.hpp",
    "bfc/_wait.hpp",
    "bfc/_source.h",
    "bfc/_memory.hpp",
    "bfc/_pages.hpp",
    "bfc/_nothrow.hpp",
    "bfc/_debug.h",
    "bfc/dlpack.h",
]
MODULES = [
    "_core",
    "_invariants",
    "_driver",
    "_arguments",
    "_current",
    "_buffer",
    "_ledger",
    "_frees",
    "_allocator",
    "_bfc",
    "_recorded",
    "_caching",
    "_pinned_books",
    "_pinned",
    "copy/_fast",
    "trace/_replay",
    "integrations/_torch",
]


def extension(module: str) -> Extension:
    return Extension(
        f"bfc.{module.replace('/', '.')}",
        [f"bfc/{module}.pyx"],
        language="c++",
        include_dirs=["bfc"],
        depends=[header for header in HEADERS if os.path.exists(header)],
        extra_compile_args=COMPILE,
        define_macros=[("BFC_DEBUG", DEBUG)],
    )


setup(
    ext_modules=cythonize(
        [extension(module) for module in MODULES],
        build_dir=f"build/cython-{DEBUG}",
        compiler_directives={
            "language_level": 3,
            "boundscheck": False,
            "wraparound": False,
            "cdivision": True,
            "initializedcheck": False,
            "embedsignature": True,
            "annotation_typing": False,
        },
    ),
)
