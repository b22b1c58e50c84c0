"""Sizes of devices on the command line: what is taken, what is asked back, what is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bfc_tools.cli import main

SMALL = str(Path(__file__).parents[2] / "bench" / "traces" / "gpu_lm_small.npz")
REPLAY = ["replay", SMALL, "--no-picture", "--passes", "1", "--json"]


def reserved(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """What TensorFlow's policy takes, which is all of the device or of its limit, and stderr."""
    assert main([*REPLAY, *options]) == 0
    out, err = capsys.readouterr()
    return json.loads(out)["traces"][0]["peak_bytes_reserved"], err


@pytest.mark.parametrize("size", ["34G", "34g", "34 GiB", "34gib", str(34 << 30)])
def test_g_is_gib(capsys, size):
    assert reserved(capsys, "--device", f"simulated:{size}") == (34 << 30, "")
    assert reserved(capsys, "--device", size) == (34 << 30, "")
    assert reserved(capsys, "--memory-limit", size) == (34 << 30, "")


@pytest.mark.parametrize("option", [["--device", "simulated:34GB"], ["--memory-limit", "34GB"]])
def test_gb_is_decimal_and_said_once(capsys, option):
    policies = ["--policy", "bfc", "--policy", "caching"]
    found, err = reserved(capsys, *option, *policies)
    assert found == 34 * 10**9 // 256 * 256
    assert err.count("\n") == 1
    assert "34GB is 34000000000 bytes, which is 31.66 GiB" in err
    assert "write 34GiB" in err


@pytest.mark.parametrize(
    ("option", "fault"),
    [
        (["--device", "simulated:34"], "--device simulated:34: 34 bytes? Write 34GiB, or 34B"),
        (["--device", "34"], "--device 34: 34 bytes? Write 34GiB, or 34B"),
        (["--device", "host:81559"], "host:81559: 81559 bytes? Write 81559MiB, or 81559B"),
        (["--device", "opencl:0:34"], "opencl:0:34: 34 bytes? Write 34GiB, or 34B"),
        (["--memory-limit", "34"], "--memory-limit 34: 34 bytes? Write 34GiB, or 34B"),
    ],
)
def test_a_bare_number_is_asked_back(capsys, option, fault):
    assert main([*REPLAY, *option]) == 2
    assert fault in capsys.readouterr().err
