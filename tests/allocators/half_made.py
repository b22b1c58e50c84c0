"""Calls whatever an object of ours has that was made and never set up, and prints each answer that
is an accident. A crash ends this process: `test_half_made.py` runs it as one of its own.

With the argument "no cuda" it does so where cuda-bindings is not installed: no function of the
driver is known then.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
import types
from collections.abc import Iterator

import bfc

#: What a method may be called with: counts, addresses, texts, streams, pools, objects of ours.
ARGUMENTS: tuple[tuple[object, ...], ...] = (
    (),
    (0,),
    (4096,),
    (4096, 5),
    (4096, None, 5),
    (True,),
    (None,),
    (None, None),
    (None, None, None),
    (0.5,),
    ("",),
    ("u1",),
    (b"",),
    ([4096],),
    ([4096], 5),
    ((1, 2),),
    ((1, 2), True),
    (print,),
)
ACCIDENT = "'NoneType' object has no attribute"
#: What else a program calls, under these names or through an operator.
PROTOCOLS = {
    "__array__",
    "__cuda_array_interface__",
    "__del__",
    "__dlpack__",
    "__dlpack_device__",
    "__enter__",
    "__exit__",
    "__init__",
    "__len__",
    "__reduce__",
    "__repr__",
}


def extension_modules() -> Iterator[types.ModuleType]:
    for found in pkgutil.walk_packages(bfc.__path__, "bfc."):
        if found.name.startswith(("bfc.integrations.", "bfc.__main__")):
            continue
        with contextlib.suppress(ImportError):
            module = importlib.import_module(found.name)
            if getattr(module, "__file__", "").endswith(".so"):
                yield module
    yield importlib.import_module("bfc.integrations._torch")


def classes() -> list[type]:
    found = {
        thing
        for module in extension_modules()
        for thing in vars(module).values()
        if isinstance(thing, type) and thing.__module__ == module.__name__
    }
    return sorted(found, key=lambda cls: (cls.__module__, cls.__name__))


def half_made(cls: type) -> Iterator[tuple[str, object]]:
    """Objects of a class that no `__init__` has finished."""
    for arguments in ((), (1,)):
        with contextlib.suppress(TypeError):
            yield "__new__ only", cls.__new__(cls, *arguments)
            break
    else:
        return
    for arguments in ((None,), (None,) * 7, (bfc.SimulatedSubAllocator("1 MiB"), "nonsense"), ()):
        thing = cls.__new__(cls)
        try:
            cls.__init__(thing, *arguments)
        except Exception as error:
            complain(cls, "__init__", arguments, error)
            yield f"__init__{arguments} raised", thing
    if issubclass(cls, bfc.CachingAllocator | bfc.BFCAllocator):
        thing = cls.__new__(cls)
        with contextlib.suppress(Exception):
            thing.__init__(bfc.SimulatedSubAllocator("1 MiB"), memory_limit="nonsense")
        yield "a limit that is none", thing


def complain(cls: type, name: str, arguments: tuple[object, ...], error: BaseException) -> None:
    text = str(error)
    if isinstance(error, SystemError) or ACCIDENT in text or not text:
        print(f"{cls.__module__}.{cls.__name__}.{name}{arguments}: {error!r}", flush=True)


def call_all(cls: type, made: str, thing: object) -> None:
    names = {name for name in dir(thing) if not name.startswith("__")}
    for name in sorted(names | PROTOCOLS & set(dir(thing))):
        print(f"{cls.__name__} ({made}): {name}", file=sys.stderr, flush=True)
        try:
            found = getattr(thing, name)
        except Exception as error:
            complain(cls, name, (), error)
            continue
        if not callable(found):
            continue
        for arguments in ARGUMENTS:
            try:
                found(*arguments)
            except Exception as error:
                complain(cls, name, arguments, error)
    for protocol in (memoryview, bytes, repr, str, len, list, hash):
        try:
            protocol(thing)
        except Exception as error:
            complain(cls, protocol.__name__, (), error)


if __name__ == "__main__":
    import faulthandler

    if sys.argv[1:] == ["no cuda"]:
        sys.modules["cuda"] = None  # type: ignore[assignment]
    faulthandler.enable()
    faulthandler.dump_traceback_later(240, exit=True)
    sys.unraisablehook = lambda _report: None
    walked = 0
    for cls in classes():
        for made, thing in half_made(cls):
            call_all(cls, made, thing)
            walked += 1
    print("walked", walked)
