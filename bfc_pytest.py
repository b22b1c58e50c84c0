"""Fixtures for pytest, which finds them where the package is installed.

They are outside of the package, so that pytest loads them without importing `bfc`. It is imported
when a test first asks for a fixture.

bfc_leak_check
    `bfc_leak_check(allocator)`: what is allocated from then on must be freed when the test ends.
bfc_memory_budget
    `bfc_memory_budget(run, "22 GiB")`: a prediction, a trace or a block that needs more fails the
    test. Without a number, what `--bfc-write-budgets` has stored beside the test counts. A test
    that asks for it, or has its marker, and measures nothing fails, too.
bfc_cuda_emulator
    The emulated CUDA driver, a new machine for each test. No complaint may be left at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import bfc
    from bfc.testing.cuda_emulator import Driver
    from bfc.testing.leaks import leak_check
    from bfc_tools.study.budgets import Budget

pytest.register_assert_rewrite("bfc.testing.contract")  # its asserts say what was compared


@pytest.fixture
def bfc_leak_check() -> Iterator[Callable[[bfc.Allocator], leak_check]]:
    """Watches allocators: `bfc_leak_check(allocator)`. What is allocated from then on must be freed
    when the test ends, or it fails and names the lines."""
    from bfc.testing.leaks import leak_check

    with ExitStack() as checks:
        yield lambda allocator: checks.enter_context(leak_check(allocator))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("bfc").addoption(
        "--bfc-write-budgets",
        action="store_true",
        help="store the peaks that tests with bfc_memory_budget measure, beside the tests",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "bfc_memory_budget(limit, allow): what the fixture's calls take if they say nothing else",
    )


#: The `Budget` of a test that has asked for one.
BUDGET = pytest.StashKey[Any]()


@pytest.fixture
def bfc_memory_budget(request: pytest.FixtureRequest) -> Budget:
    """Fails a test that needs too much memory: `bfc_memory_budget(run, "22 GiB")`. `run` is a
    prediction, a trace, or an allocator, whose `with` block is measured."""
    from bfc_tools.study.budgets import Budget

    node, config = request.node, request.config
    marker = node.get_closest_marker("bfc_memory_budget")
    options: dict[str, Any] = {}
    if marker:
        options = dict(zip(("limit", "allow"), marker.args, strict=False)) | marker.kwargs
    if marker and (len(marker.args) > 2 or options.keys() - {"limit", "allow"}):
        raise TypeError(f"{marker.name} takes limit and allow: {marker.args}, {marker.kwargs}")
    test = f"{node.path.name}::{node.nodeid.partition('::')[2]}"
    write = config.getoption("--bfc-write-budgets")
    budget = Budget(test, node.path.parent, config.rootpath, **options, write=write)
    node.stash[BUDGET] = budget
    return budget


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    """Fails a test that has passed without having measured what it says that it measures."""
    outcome: Any = yield
    report = outcome.get_result()
    if call.when != "call" or not report.passed:
        return
    fault = ""
    if BUDGET in item.stash:
        fault = item.stash[BUDGET].passed()
    elif any(mark.name == "bfc_memory_budget" for mark in item.own_markers):
        fault = (
            f"{item.nodeid} has the marker bfc_memory_budget, but does not ask for the fixture of "
            "that name, so that nothing is measured"
        )
    if fault:
        report.outcome, report.longrepr = "failed", fault


@pytest.fixture
def bfc_cuda_emulator() -> Iterator[Driver]:
    """The emulated CUDA driver, as a new machine with two devices of 8 GiB. After the test all
    streams are released, and the driver must have no complaints."""
    from bfc.testing import cuda_emulator

    driver = cuda_emulator.load()
    driver.reset()
    yield driver
    driver.release_all()
    assert driver.complaints == []
