"""The sources of the package, for the rules of tests/repo, and how a rule lists its faults."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = CHECKOUT / "bfc"
#: The packages beside it, and the module of bfc through which users reach each: they are one layer.
BESIDE = {
    "bfc_cuda_emulator": "bfc.testing.cuda_emulator",
    "bfc_slow_models": "bfc.testing.differential",
    "bfc_tools": "bfc.study",
    "bfc_torch_opencl": "bfc.integrations.torch_opencl",
}
PACKAGES = [PACKAGE, *(CHECKOUT / name for name in BESIDE)]
OF_C = (".hpp", ".h", ".cpp")
SUFFIXES = (".py", ".pyx", ".pxd", ".pyi", *OF_C)

FILES = sorted(
    path for package in PACKAGES for path in package.rglob("*") if path.suffix in SUFFIXES
)
READ = [path for path in FILES if path.suffix in (".py", ".pyx", ".pxd")]
COMPILED = [path for path in READ if path.suffix != ".py"]

IMPORT = re.compile(
    r"^(?P<indent>\s*)(?:from\s+(?P<source>[\w.]+)\s+c?import\s+(?P<names>.+)|c?import\s+(?P<modules>.+))$"
)
TYPING = re.compile(r"^if TYPE_CHECKING:\n(?:(?: .*)?\n)+", re.MULTILINE)


def file_name(path: Path) -> str:
    return str(path.relative_to(PACKAGE if PACKAGE in path.parents else CHECKOUT))


def module_name(path: Path) -> str:
    """The dotted name of a module; that of the folder for its `__init__`."""
    parts = path.relative_to(CHECKOUT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_ours(dotted: str) -> bool:
    """Whether a module, or a name in one, is of these packages."""
    return dotted.split(".")[0] in ("bfc", *BESIDE)


def is_module(dotted: str) -> bool:
    path = CHECKOUT.joinpath(*dotted.split("."))
    return path.is_dir() or any(
        path.with_suffix(suffix).exists() for suffix in (".py", ".pyx", ".pxd")
    )


def code_lines(text: str) -> list[str]:
    """The lines of code: no comments, no long texts, nothing for type checkers alone, and what
    stands in brackets on one line."""
    text = re.sub(r'(?s)("""|\'\'\').*?\1', '""', TYPING.sub("", text))
    text = re.sub(r"#.*", "", text)
    return re.sub(
        r"\(([^()]*)\)", lambda found: "(" + found[1].replace("\n", " ") + ")", text
    ).splitlines()


def listed(names: str) -> Iterator[tuple[str, str]]:
    """(name, what the file calls it) of what an import lists."""
    for part in filter(None, map(str.strip, names.strip("() ").split(","))):
        name, _, alias = part.partition(" as ")
        yield name.strip(), (alias or name).strip()


def assert_none(faults: Iterable[str]) -> None:
    """Fails with every fault, one a line."""
    found = list(faults)
    if found:
        pytest.fail("\n".join([f"{len(found)} found:", *found]), pytrace=False)
