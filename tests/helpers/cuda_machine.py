"""The machine of the CUDA tests: three emulated devices, or with BFC_TEST_GPU=1 a real GPU."""

from __future__ import annotations

import os

from bfc.testing import cuda_emulator as emulator

ON_GPU = os.environ.get("BFC_TEST_GPU") == "1"
#: The memory of each emulated device, in bytes.
TOTALS = [64 << 30, 8 << 30, 1 << 30]


def load() -> emulator.Driver | None:
    """The emulated driver, loaded before cuda-python looks for a real one; None on a real GPU."""
    if ON_GPU:
        return None
    driver = emulator.load()
    reset(driver)
    return driver


def reset(driver: emulator.Driver) -> None:
    """Three devices that nobody has used."""
    driver.reset(devices=len(TOTALS), total=TOTALS)
