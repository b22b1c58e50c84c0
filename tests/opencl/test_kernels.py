"""Whether a device compiles kernels, as `bfc devices` tells it."""

from __future__ import annotations

import types

import pytest
from own_interpreter import run

import bfc
from bfc.drivers.opencl import platform

POCL = "OpenCL 3.0 PoCL 3.0-rc2  Linux, Release, RELOC, LLVM 14.0.6, SLEEF, DISTRO, POCL_DEBUG"
X86, ARM = (
    f"OpenCL 3.0 PoCL HSTR: pthread-{name}-unknown-linux-gnu" for name in ("x86_64", "aarch64")
)


@pytest.mark.parametrize(
    ("of_platform", "of_device", "compiles"),
    [
        (POCL, f"{X86}-generic", False),  # as on an emulated processor of 2025
        (POCL, f"{X86}-icelake-client", True),
        (POCL, f"{ARM}-generic", True),  # where the compiler knows that name
        ("OpenCL 2.0 pocl 1.8  Linux, None+Asserts, RELOC, LLVM 11.1.0", f"{X86}-generic", False),
        (POCL.replace("PoCL 3.0-rc2", "PoCL 6.0"), f"{X86}-generic", True),
        ("OpenCL 3.0 CUDA 13.0.84", "OpenCL 3.0 CUDA", True),
    ],
)
def test_a_processor_that_pocl_does_not_know_is_told(of_platform, of_device, compiles) -> None:
    device = types.SimpleNamespace(
        platform=types.SimpleNamespace(version=of_platform), version=of_device
    )
    assert (platform.why_no_kernels(device) == "") == compiles


def test_what_is_told_is_what_happens() -> None:
    """On this machine: in a process of its own, where no test has renamed the processor."""
    if not bfc.opencl.is_available():
        pytest.skip(str(bfc.opencl.is_available()))
    run("""
        import pyopencl
        from bfc.drivers.opencl import platform

        for device in platform.devices():
            program = pyopencl.Program(pyopencl.Context([device]), "kernel void nothing() {}")
            try:
                program.build(cache_dir=False)
            except pyopencl.RuntimeError as error:
                assert "unknown target CPU" in str(error)
                assert platform.why_no_kernels(device)
            else:
                assert not platform.why_no_kernels(device)
    """)
