"""The extension for tensors on OpenCL compiles against the headers of other versions of PyTorch
than the one that `make test-torch` runs."""

from __future__ import annotations

import subprocess
import sysconfig

import pytest

import bfc
from bench.peers.torch_host import VERSIONS, headers
from bfc.compiling import needed
from bfc.pytorch.extension import FLAGS
from bfc_torch_opencl.building import EXTENSION

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("version", VERSIONS)
def test_the_extension_compiles(version: str) -> None:
    """Only the compiler's front end runs: the versions differ in what they declare."""
    folder = headers(version) / "include"
    includes = (folder, folder / "torch/csrc/api/include", sysconfig.get_path("include"))
    flags = [flag for flag in FLAGS if flag != "-shared"]
    command = [
        *(*needed("CXX", "c++", "C++", "the extension"), *flags, "-fsyntax-only"),
        *(f"-DTORCH_EXTENSION_NAME={EXTENSION.name}", f"-I{bfc.get_include()}"),
        *(word for include in includes for word in ("-isystem", str(include))),
        str(EXTENSION.source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
