"""The page about Dask, run as it is written."""

from __future__ import annotations

import os
import subprocess
import sys

from documents import ROOT


def test_the_code_of_the_page_runs_and_prints_what_stands_below_it() -> None:
    code = (
        "import documents\ndocuments.run_document(documents.ROOT / 'docs' / 'how-to' / 'dask.md')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests" / "helpers")}
    command = [sys.executable, "-c", code]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )
    assert ran.returncode == 0, ran.stderr  # where distributed logs, too
