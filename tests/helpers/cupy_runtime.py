"""CuPy on the emulated driver: its calls of the CUDA runtime, made by calls of the driver."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".cpp")
#: The functions of `cupy_runtime.cpp` by CuPy's names, where these are taken in C++.
RENAMED = {"memcpy": "memcpyNow"}
TYPES = {
    "PyObject *": ctypes.py_object,
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "intptr_t": ctypes.c_ssize_t,
    "size_t": ctypes.c_size_t,
}


def build(folder: Path) -> Path:
    """Compiles the functions."""
    made = folder / "cupy_runtime.so"
    include = f"-I{sysconfig.get_path('include')}"
    flags = ["-std=c++17", "-shared", "-fPIC", "-Wno-deprecated-declarations", include]
    subprocess.run(["g++", *flags, "-o", made, SOURCE], check=True)
    return made


def install(made: Path) -> None:
    """Puts the functions into CuPy's module. CuPy must not have been imported yet."""
    from cupy_backends.cuda.api import runtime

    functions = ctypes.PyDLL(str(made))
    table = runtime.__pyx_capi__
    for name in table:
        function: Any = getattr(functions, RENAMED.get(name, name), None)
        if function is not None:
            types = name_of(table[name])
            table[name] = capsule(function, types)
            setattr(runtime, name, for_python(function, types.decode()))


def name_of(given: object) -> bytes:
    """A capsule's name: the types of its function, which Cython compares."""
    ask = ctypes.pythonapi.PyCapsule_GetName
    ask.restype, ask.argtypes = ctypes.c_char_p, [ctypes.py_object]
    return ask(given)


_names: list[bytes] = []  # capsules do not keep their names


def capsule(function: Any, types: bytes) -> object:
    _names.append(types)
    make = ctypes.pythonapi.PyCapsule_New
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(ctypes.cast(function, ctypes.c_void_p), _names[-1], None)


def for_python(function: Any, types: str) -> Any:
    """The same function for Python. What is optional, it does not take."""
    result, arguments = re.fullmatch(r"(.*?) ?\((.*)\)", types).groups()
    kinds = [it for it in arguments.split(", ") if "__pyx" not in it and it != "void"]
    function.restype = TYPES[result.strip()]
    function.argtypes = [TYPES[it.strip()] for it in kinds] + [ctypes.c_int, ctypes.c_void_p]
    return lambda *given: function(*given[: len(kinds)], 0, None)
