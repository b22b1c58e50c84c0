"""What is installed has every header and every source that others compile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_not_python_is_installed_too(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    installed = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    wanted = {
        path.relative_to(ROOT)
        for suffix in ("*.h", "*.hpp", "*.cpp", "*.c", "*.pyi", "*.pxd", "*.js", "page.*")
        for path in (ROOT / "bfc").rglob(suffix)
    }
    assert Path("bfc/include/bfc_torch_allocator.hpp") in wanted
    assert Path("bfc/integrations/torch_opencl/extension.cpp") in wanted
    assert wanted - installed == set()
