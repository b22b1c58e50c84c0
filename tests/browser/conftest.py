"""A headless Chromium for the tests of a module."""

from collections.abc import Iterator

import chromium
import pytest
from chromium import Page


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium.opened(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def page(window: Page) -> Iterator[Page]:
    """A window whose log must be empty after each test: no error, and nothing that was blocked."""
    window.problems()
    yield window
    assert window.problems() == []
