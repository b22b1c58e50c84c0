"""The OpenCL suite, on PoCL or whatever OpenCL there is. It is skipped where there is none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pocl
import pytest
from closing import close_all

import bfc

MIB = 1 << 20
MakeOpenCL = Callable[..., bfc.Allocator]


@pytest.fixture(scope="session")
def cl() -> Any:
    if not pocl.devices():
        pytest.skip(str(bfc.opencl.is_available()))
    import pyopencl

    return pyopencl


@pytest.fixture(scope="session")
def context(cl: Any) -> Any:
    return cl.Context([pocl.devices()[0]])


@pytest.fixture
def queue(cl: Any, context: Any) -> Any:
    return cl.CommandQueue(context)


@pytest.fixture
def out_of_order(cl: Any, context: Any) -> Any:
    properties = cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE
    return cl.CommandQueue(context, properties=properties)


@pytest.fixture(params=["buffers", "svm"])
def source(request: pytest.FixtureRequest, context: Any) -> Iterator[bfc.OpenCLSubAllocator]:
    source = bfc.OpenCLSubAllocator(context, svm=request.param == "svm", capacity=64 * MIB)
    yield source
    assert source.live_bytes == 0, "the test, or the source, lost a block"


POLICIES = {"bfc": bfc.BFCAllocator, "caching": bfc.CachingAllocator}


@pytest.fixture(params=POLICIES)
def make(request: pytest.FixtureRequest, context: Any) -> Iterator[MakeOpenCL]:
    """Makes allocators of one policy over 64 MiB of buffers, or over what `source` names. After the
    test each one is checked and closed."""
    allocators: list[bfc.Allocator] = []

    def make(source: bfc.SubAllocator | None = None, **options: Any) -> bfc.Allocator:
        if source is None:
            source = bfc.OpenCLSubAllocator(context, capacity=64 * MIB)
        allocators.append(POLICIES[request.param](source, **options))
        return allocators[-1]

    yield make
    close_all(allocators)


class Held:
    """A queue whose work waits: `with Held(cl, queue): ...`."""

    def __init__(self, cl: Any, queue: Any) -> None:
        self.gate = cl.UserEvent(queue.context)
        self.complete = cl.command_execution_status.COMPLETE
        cl.enqueue_barrier(queue, wait_for=[self.gate])
        self.is_open = False

    def let_go(self) -> None:
        if not self.is_open:
            self.gate.set_status(self.complete)
            self.is_open = True

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.let_go()


@pytest.fixture
def hold(cl: Any) -> Callable[[Any], Held]:
    """Holds a queue's work back until the end of a `with` block, or `let_go()`."""
    return lambda queue: Held(cl, queue)


class Faulty:
    """pyopencl's functions, of which one fails: each call of `name`, with `code`."""

    def __init__(self, patch: pytest.MonkeyPatch, cl: Any) -> None:
        self.patch, self.cl = patch, cl
        self.calls: list[str] = []

    def fail(self, name: str, code: int, owner: Any = None) -> None:
        owner = self.cl if owner is None else owner
        error = self.cl.Error(self.error_record(name, code))

        def fails(*_arguments: Any, **_options: Any) -> None:
            self.calls.append(name)
            raise error

        self.patch.setattr(owner, name, fails)

    def error_record(self, name: str, code: int) -> Any:
        record = self.cl._cl._ErrorRecord(msg="told to fail", code=code, routine=name)
        assert record.code() == code
        return record


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, cl: Any) -> Faulty:
    return Faulty(monkeypatch, cl)


class Interrupt:
    """Runs something at a line of a function, once, in the same thread: as a finaliser might."""

    def __call__(self, function: Any, line: int, action: Callable[[], object]) -> Interrupt:
        self.code, self.line, self.action = function.__code__, line, action
        self.ran = False
        return self

    @staticmethod
    def lines_of(function: Any) -> list[int]:
        first = function.__code__.co_firstlineno
        return sorted({n for *_, n in function.__code__.co_lines() if n and n > first})

    def __enter__(self) -> Interrupt:
        self.before = sys.gettrace()
        sys.settrace(self.enter)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(self.before)
        assert self.ran or exc_info[0], f"line {self.line} was not reached"

    def enter(self, frame: Any, _event: str, _argument: object) -> Any:
        return self.step if frame.f_code is self.code else None

    def step(self, frame: Any, event: str, _argument: object) -> Any:
        if event == "line" and frame.f_lineno == self.line and not self.ran:
            self.ran = True
            self.action()
        return self.step


@pytest.fixture
def interrupt() -> Interrupt:
    return Interrupt()
