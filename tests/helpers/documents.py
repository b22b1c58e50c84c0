"""The code of documents, run as it is written."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
HAS_TORCH = importlib.util.find_spec("torch") is not None
#: What a page begins with whose code needs CUDA.
WITHOUT_A_GPU = "from bfc.testing import cuda_emulator\n\ncuda_emulator.load()\n"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(path: Path, names: str) -> list[tuple[str, list[str]]]:
    """The commands of bfc in a document whose names match, each with the lines that are shown below
    it. A block that begins with none goes on with what the last one printed."""
    found: list[tuple[str, list[str]]] = []
    for kind, block in BLOCK.findall(path.read_text()):
        for line in block.splitlines() if kind == "console" else ():
            if line.startswith("$ "):
                found.append((line[2:].partition("#")[0].strip(), []))
            elif found:
                found[-1][1].append(line)
    return [one for one in found if one[1] and re.match(f"bfc (?:{names})", one[0])]


def block_of(name: str, *words: str) -> str:
    """The one block of code in a document below docs/ that has these words."""
    blocks = BLOCK.findall((ROOT / "docs" / name).read_text())
    (found,) = [code for _, code in blocks if all(word in code for word in words)]
    return str(found)


def not_printed(shown: list[str], printed: str) -> list[str]:
    """The lines that a document shows and a command did not print; "..." stands for others."""
    lines = set(map(_without_times, printed.splitlines()))
    return [line for line in shown if line != "..." and _without_times(line) not in lines]


def _without_times(line: str) -> str:
    """A row of a table without the nanoseconds, and with one blank between its columns."""
    return re.sub(r"(%|-) +\d+\.\d\b", r"\1 ns", " ".join(line.split()))


def run_in_a_process(path: Path, first: str = "pass") -> subprocess.CompletedProcess[str]:
    """Runs the code of a document in a new process, after some code of the test's."""
    code = (
        f"{first}\nimport documents, pathlib; documents.run_document(pathlib.Path({str(path)!r}))"
    )
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "tests" / "helpers"),
        "CI": "true",  # where Hypothesis has no deadlines
    }
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )


def run_document(path: Path) -> None:
    """Runs the code of a document, and compares what it prints with the text below it. The README's
    pieces stand alone: people copy one. Elsewhere they go on from each other. Pieces with PyTorch's
    tensors on OpenCL run where there is a PyTorch: tests/torch_opencl has them."""
    names: dict[str, object] = {}
    blocks = BLOCK.findall(path.read_text())
    for (kind, code), (next_kind, expected) in zip(blocks, [*blocks[1:], ("", "")], strict=False):
        if kind != "python" or ("torch_opencl" in code and not HAS_TORCH):
            continue
        if code == WITHOUT_A_GPU and os.environ.get("BFC_TEST_GPU") == "1":
            continue
        out = io.StringIO()
        names = {} if path.name == "README.md" else names
        with redirect_stdout(out):
            exec(compile(code, path.name, "exec"), names)
        if next_kind == "text":
            assert out.getvalue().rstrip() == expected.rstrip()
