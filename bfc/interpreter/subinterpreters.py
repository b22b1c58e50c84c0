"""Whether this is a subinterpreter, asked before a compiled module is loaded there."""

from importlib import import_module


def is_subinterpreter() -> bool:
    """False also where Python cannot tell."""
    for name in ("_interpreters", "_xxsubinterpreters"):  # from Python 3.13 on, and before
        try:
            module = import_module(name)
        except ImportError:
            continue
        return bool(module.get_current() != module.get_main())
    return False
