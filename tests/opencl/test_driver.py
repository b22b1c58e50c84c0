"""All else here is skipped where there is no OpenCL, so that something has to insist on it."""

from __future__ import annotations

import platform
import sys
import sysconfig

import pocl
import pytest

import bfc


@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="PoCL has no wheel here"
)
@pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    reason="pyopencl has no wheel for a Python without the GIL",
)
def test_there_is_an_opencl_device_wherever_the_test_extra_brings_one() -> None:
    assert pocl.devices(), f"pip install '.[test]' brings PoCL, but {bfc.opencl.is_available()}"
