"""Refuses the import in a subinterpreter, before a compiled module is loaded there."""

from importlib import import_module


def refuse() -> None:
    """Raises an ImportError in any interpreter but the main one.

    A call that needs Python takes the GIL with `PyGILState_Ensure`, which knows the main interpreter
    only: in another one it waits for ever.
    """
    for name in ("_interpreters", "_xxsubinterpreters"):  # from Python 3.13 on, and before
        try:
            module = import_module(name)
        except ImportError:
            continue
        if module.get_current() != module.get_main():
            raise ImportError(
                "bfc cannot be used in a subinterpreter: import it in the main interpreter, or in a "
                "process of its own (under mod_wsgi: WSGIApplicationGroup %{GLOBAL})"
            )
        return
