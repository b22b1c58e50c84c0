"""A subinterpreter refuses the import in words. It used to accept it, and the first allocation
waited for ever for the GIL."""

import pytest
from own_interpreter import run

MAKE = """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
other = interpreters.create()
code = """ + repr(
    """
try:
    import bfc
except ImportError as error:
    assert "main interpreter" in str(error), error
else:
    raise AssertionError("it was imported")
"""
)
TWICE = """
for _ in range(2):
    assert interpreters.run_string(other, code) is None
interpreters.destroy(other)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", ["the main interpreter", "the other"])
def test_a_subinterpreter_refuses_the_import(first: str) -> None:
    """The main interpreter can use it, whichever of the two asked first."""
    if first == "the main interpreter":
        run(f"{MAKE}{TWICE}\nassert_usable(bfc.CachingAllocator(bfc.HostSubAllocator('64 MiB')))")
    else:  # the set-up of `run` has imported bfc already
        script = f"{MAKE}{TWICE}\nimport bfc"
        run(f"import subprocess\nsubprocess.run([sys.executable, '-c', {script!r}], check=True)")
