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
