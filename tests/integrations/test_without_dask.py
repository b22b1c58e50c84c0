"""What is said where distributed is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "bench" / "traces" / "gpu_lm_small.npz"
HIDDEN = "import sys; sys.modules.update(dict.fromkeys(('dask', 'distributed', 'bokeh')))\n"


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", HIDDEN + code]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_the_module_can_be_imported_and_says_what_to_install() -> None:
    done = run("from bfc.integrations import dask; print(dask.Pools.__name__); dask.Pools(int)")
    assert done.stdout == "Pools\n"
    assert "DeviceUnavailableError: distributed cannot be imported" in done.stderr
    assert done.stderr.endswith("try: pip install 'dask[distributed]' bokeh\n")


def test_the_command_says_what_to_install() -> None:
    done = run(
        "from bfc_tools.cli import main\n"
        f"arguments = ['advise', {str(TRACE)!r}, '--device', '4GiB', '--dask', 'tcp://127.0.0.1:1']\n"
        "sys.exit(main(arguments))"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("bfc: distributed cannot be imported")
    assert done.stderr.endswith("try: pip install 'dask[distributed]'\n")
