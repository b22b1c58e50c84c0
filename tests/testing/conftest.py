"""A fixture for the tests of the emulated driver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bfc.testing import cuda_emulator as emulator


@pytest.fixture
def gpu() -> Iterator[emulator.Driver]:
    """A fresh machine, with the context of device 0 current."""
    from cuda_calls import enter  # which needs cuda-bindings

    it = emulator.load()
    it.reset()
    enter()
    yield it
    it.release_all()
    assert it.complaints == []
