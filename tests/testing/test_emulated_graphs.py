"""Tests of the emulated captures and graphs: what goes in, what spoils one, what a launch does."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
from cuda_calls import alloc, code, cu, event, fill, ok, peek, stream

from bfc.testing import cuda_emulator as emulator

INVALID_VALUE, INVALID_HANDLE, ILLEGAL_STATE, NOT_SUPPORTED = 1, 400, 401, 801
UNSUPPORTED, INVALIDATED, MERGE, UNMATCHED, UNJOINED, ISOLATION = 900, 901, 902, 903, 904, 905
IMPLICIT, CAPTURED_EVENT, WRONG_THREAD, UPDATE_FAILURE = 906, 907, 908, 910
MODES = cu.CUstreamCaptureMode
GLOBAL = MODES.CU_STREAM_CAPTURE_MODE_GLOBAL
THREAD_LOCAL = MODES.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
RELAXED = MODES.CU_STREAM_CAPTURE_MODE_RELAXED
ACTIVE, INVALID = 1, 2


def begin(queue: Any, mode: Any = GLOBAL) -> None:
    ok(cu.cuStreamBeginCapture(queue, mode))


def follow(queue: Any, after: Any) -> Any:
    """Makes a stream wait for all that is in another. Returns the event."""
    mark = event()
    ok(cu.cuEventRecord(mark, after))
    ok(cu.cuStreamWaitEvent(queue, mark, 0))
    return mark


def terminals(queue: Any) -> list[int]:
    """The nodes that the next one of a capturing stream will depend on."""
    _status, _id, _graph, nodes, _edges, count = ok(cu.cuStreamGetCaptureInfo(queue))
    return [int(node) for node in (nodes or [])[:count]]


def edges(graph: Any) -> set[tuple[int, int]]:
    """The edges as pairs of the nodes' places in the order of capture."""
    _, count = ok(cu.cuGraphGetNodes(graph, 0))
    places = {int(node): i for i, node in enumerate(ok(cu.cuGraphGetNodes(graph, count))[0])}
    _, _, _, count = ok(cu.cuGraphGetEdges(graph, 0))
    if not count:
        return set()
    starts, ends, _, _ = ok(cu.cuGraphGetEdges(graph, count))
    return {(places[int(a)], places[int(b)]) for a, b in zip(starts, ends, strict=True)}


def run(graph: Any, queue: Any) -> Any:
    """Instantiates a graph and launches it. Returns what was instantiated."""
    made = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuGraphLaunch(made, queue))
    return made


def test_a_launch_does_the_work_of_a_capture_each_time(gpu: emulator.Driver) -> None:
    queue, one, two = stream(1), alloc(8), alloc(8)
    begin(queue)
    fill(one, 5, queue)
    ok(cu.cuMemcpyDtoDAsync(two, one, 8, queue))
    graph = ok(cu.cuStreamEndCapture(queue))
    assert peek(two) == b"\0"
    made = run(graph, queue)
    assert peek(two) == b"\5"
    ok(cu.cuGraphDestroy(graph))
    fill(two, 1, queue)
    gpu.hold(queue)
    ok(cu.cuGraphLaunch(made, queue))
    assert peek(two) == b"\1"  # it waits for its turn
    gpu.release(queue)
    assert peek(two) == b"\5"
    ok(cu.cuGraphExecDestroy(made))
    assert code(cu.cuGraphLaunch(made, queue)) == INVALID_VALUE
    assert len(gpu.complaints) == 1
    gpu.clear()


def test_forks_and_joins_become_edges(gpu: emulator.Driver) -> None:
    first, second, memory = stream(1), stream(1), [alloc(8) for _ in range(4)]
    begin(first)
    fill(memory[0], 1, first)
    follow(second, first)
    fill(memory[1], 1, second)
    fill(memory[2], 1, first)
    assert terminals(first) != terminals(second)
    follow(first, second)
    assert len(terminals(first)) == 2
    fill(memory[3], 1, first)
    graph = ok(cu.cuStreamEndCapture(first))
    assert edges(graph) == {(0, 1), (0, 2), (1, 3), (2, 3)}
    nodes, _ = ok(cu.cuGraphGetNodes(graph, 4))
    assert ok(cu.cuGraphGetRootNodes(graph, 0))[1] == 1
    _, _, count = ok(cu.cuGraphNodeGetDependencies(nodes[3], 0))
    assert count == 2
    _, _, count = ok(cu.cuGraphNodeGetDependentNodes(nodes[0], 0))
    assert count == 2
    assert ok(cu.cuGraphNodeGetType(nodes[0])) == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET


@pytest.mark.parametrize("joined", [True, False])
def test_a_fork_with_work_has_to_be_joined(gpu: emulator.Driver, joined: bool) -> None:
    first, second, memory = stream(1), stream(1), alloc(8)
    begin(first)
    follow(second, first)
    fill(memory, 1, second)
    if joined:
        follow(first, second)
    result = code(cu.cuStreamEndCapture(first))
    assert result == (0 if joined else UNJOINED)
    for queue in (first, second):
        assert not int(ok(cu.cuStreamIsCapturing(queue)))


def captured_event(queue: Any) -> Any:
    mark = event()
    ok(cu.cuEventRecord(mark, queue))
    return mark


def outside_event(queue: Any) -> Any:
    mark, other = event(), stream(1)
    ok(cu.cuEventRecord(mark, other))
    return mark


NO_CALLBACK = cu.CUstreamCallback(1)  # never called

#: What conflicts with a capture: a relaxed thread may not call it either.
CONFLICTS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "query": (lambda queue: cu.cuStreamQuery(queue), UNSUPPORTED),
    "synchronise": (lambda queue: cu.cuStreamSynchronize(queue), UNSUPPORTED),
    "context": (lambda _: cu.cuCtxSynchronize(), UNSUPPORTED),
    "callback": (lambda queue: cu.cuStreamAddCallback(queue, NO_CALLBACK, 0, 0), UNSUPPORTED),
    "identified": (lambda queue: cu.cuStreamGetId(queue), UNSUPPORTED),
    "attach": (lambda queue: cu.cuStreamAttachMemAsync(queue, MEMORY[0], 0, 1), UNSUPPORTED),
    "captured": (lambda queue: cu.cuEventQuery(captured_event(queue)), CAPTURED_EVENT),
    "waited": (lambda queue: cu.cuEventSynchronize(captured_event(queue)), CAPTURED_EVENT),
    "timed": (
        lambda queue: cu.cuEventElapsedTime(captured_event(queue), event()),
        CAPTURED_EVENT,
    ),
    "isolation": (lambda queue: cu.cuStreamWaitEvent(queue, outside_event(queue), 0), ISOLATION),
    "joined": (lambda queue: cu.cuStreamWaitEvent(0, captured_event(queue), 0), IMPLICIT),
    "free": (lambda queue: cu.cuMemFreeAsync(MEMORY[0], queue), INVALID_VALUE),
}
#: What is only unsafe.
UNSAFE: dict[str, tuple[Callable[[Any], Any], int]] = {
    "cuMemAlloc": (lambda _: cu.cuMemAlloc(8), UNSUPPORTED),
    "cuMemAllocManaged": (lambda _: cu.cuMemAllocManaged(8, 1), UNSUPPORTED),
    "cuMemFree": (lambda _: cu.cuMemFree(MEMORY[1]), UNSUPPORTED),
    "cuMemAllocHost": (lambda _: cu.cuMemHostAlloc(8, 0), UNSUPPORTED),
    "cuMemFreeHost": (lambda _: cu.cuMemFreeHost(MEMORY[2]), UNSUPPORTED),
    "cuModuleLoadData": (lambda _: cu.cuModuleLoadData(b"code"), UNSUPPORTED),
    "event": (lambda _: cu.cuEventQuery(event()), UNSUPPORTED),
    "wait": (lambda _: cu.cuEventSynchronize(event()), UNSUPPORTED),
    "other stream": (lambda _: cu.cuStreamSynchronize(stream(1)), UNSUPPORTED),
    "legacy stream": (lambda _: cu.cuStreamSynchronize(0), UNSUPPORTED),
    "asked": (lambda _: cu.cuStreamQuery(stream(1)), UNSUPPORTED),
}
SPOILERS = CONFLICTS | UNSAFE
MEMORY: list[int] = []


@pytest.fixture
def memory() -> None:
    """Of a pool, of the device, of the host."""
    pooled = int(ok(cu.cuMemAllocAsync(8, 0)))
    MEMORY[:] = [pooled, alloc(8), int(ok(cu.cuMemHostAlloc(8, 0)))]


@pytest.mark.parametrize("name", SPOILERS)
def test_a_forbidden_call_fails_and_spoils_the_capture(
    gpu: emulator.Driver, memory: None, name: str
) -> None:
    queue = stream(1)
    call, error = SPOILERS[name]
    begin(queue)
    assert code(call(queue)) == error
    assert int(ok(cu.cuStreamIsCapturing(queue))) == INVALID
    assert code(cu.cuMemsetD8Async(MEMORY[0], 1, 8, queue)) == INVALIDATED
    assert code(cu.cuStreamEndCapture(queue)) == INVALIDATED
    assert not int(ok(cu.cuStreamIsCapturing(queue)))
    fill(MEMORY[0], 3, queue)  # the stream works as before
    assert peek(MEMORY[0]) == b"\3"


@pytest.mark.parametrize("begun", [GLOBAL, RELAXED])
@pytest.mark.parametrize("name", SPOILERS)
def test_a_relaxed_thread_or_capture_allows_what_is_only_unsafe(
    gpu: emulator.Driver, memory: None, name: str, begun: Any
) -> None:
    queue = stream(1)
    call, error = SPOILERS[name]
    begin(queue, begun)
    before = ok(cu.cuThreadExchangeStreamCaptureMode(GLOBAL if begun == RELAXED else RELAXED))
    assert code(call(queue)) == (0 if name in UNSAFE else error)
    ok(cu.cuThreadExchangeStreamCaptureMode(before))
    spoilt = name in CONFLICTS
    assert int(ok(cu.cuStreamIsCapturing(queue))) == (INVALID if spoilt else ACTIVE)
    assert code(cu.cuStreamEndCapture(queue)) == (INVALIDATED if spoilt else 0)


@pytest.mark.parametrize("theirs", [GLOBAL, THREAD_LOCAL])
@pytest.mark.parametrize("begun", [GLOBAL, THREAD_LOCAL])
def test_another_thread_is_forbidden_only_if_both_modes_are_global(
    gpu: emulator.Driver, memory: None, begun: Any, theirs: Any
) -> None:
    queue, results = stream(1), {}
    context = ok(cu.cuCtxGetCurrent())
    forbidden = begun == theirs == GLOBAL

    def other_thread() -> None:
        ok(cu.cuCtxSetCurrent(context))
        ok(cu.cuThreadExchangeStreamCaptureMode(theirs))
        for name, (call, _error) in UNSAFE.items():
            results[name] = code(call(queue))

    begin(queue, begun)
    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert results == dict.fromkeys(UNSAFE, UNSUPPORTED if forbidden else 0)
    assert int(ok(cu.cuStreamIsCapturing(queue))) == (INVALID if forbidden else ACTIVE)
    cu.cuStreamEndCapture(queue)


#: With the legacy stream, which waits for all streams that are not non-blocking.
LEGACY: dict[str, Callable[[], Any]] = {
    "fill": lambda: cu.cuMemsetD8Async(MEMORY[1], 1, 8, 0),
    "copy": lambda: cu.cuMemcpyDtoD(MEMORY[1], MEMORY[1], 8),
    "record": lambda: cu.cuEventRecord(event(), 0),
    "wait": lambda: cu.cuStreamWaitEvent(0, captured_event(stream(0)), 0),
    "query": lambda: cu.cuStreamQuery(0),
    "synchronise": lambda: cu.cuStreamSynchronize(0),
    "allocate": lambda: cu.cuMemAllocAsync(8, 0),
}


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("name", LEGACY)
def test_the_legacy_stream_may_not_be_used_while_a_blocking_stream_captures(
    gpu: emulator.Driver, memory: None, name: str, blocking: bool
) -> None:
    queue = stream(0 if blocking else 1)
    begin(queue, RELAXED)  # in other modes no stream may be waited for, nor asked
    result = code(LEGACY[name]())
    assert result == (IMPLICIT if blocking else 0)
    assert int(ok(cu.cuStreamIsCapturing(queue))) == (INVALID if blocking else ACTIVE)
    cu.cuStreamEndCapture(queue)


def test_to_ask_whether_the_legacy_stream_captures_spoils_nothing(gpu: emulator.Driver) -> None:
    queue = stream(0)
    begin(queue)
    assert code(cu.cuStreamIsCapturing(0)) == IMPLICIT
    assert code(cu.cuStreamGetCaptureInfo(0)) == IMPLICIT
    assert int(ok(cu.cuStreamIsCapturing(queue))) == ACTIVE
    ok(cu.cuStreamEndCapture(queue))


def test_two_captures_do_not_merge(gpu: emulator.Driver) -> None:
    first, second = stream(1), stream(1)
    begin(first)
    begin(second)
    mark = captured_event(first)
    assert code(cu.cuStreamWaitEvent(second, mark, 0)) == MERGE
    assert [code(cu.cuStreamEndCapture(queue)) for queue in (first, second)] == [INVALIDATED] * 2


def test_who_may_end_a_capture(gpu: emulator.Driver) -> None:
    first, second, results = stream(1), stream(1), []
    context = ok(cu.cuCtxGetCurrent())
    begin(first, THREAD_LOCAL)
    follow(second, first)
    assert code(cu.cuStreamEndCapture(second)) == UNMATCHED

    def other_thread() -> None:
        ok(cu.cuCtxSetCurrent(context))
        results.append(code(cu.cuStreamEndCapture(first)))

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert results == [WRONG_THREAD]
    ok(cu.cuStreamEndCapture(first))
    assert code(cu.cuStreamEndCapture(first)) == INVALID_VALUE


@pytest.mark.parametrize("joined", [True, False])
def test_a_stream_may_be_destroyed_once_it_is_joined(gpu: emulator.Driver, joined: bool) -> None:
    first, second, third, memory = stream(1), stream(1), stream(1), alloc(8)
    begin(first)
    ok(cu.cuStreamDestroy(first))  # and its capture is over
    begin(second)
    follow(third, second)
    fill(memory, 1, third)
    if joined:
        follow(second, third)
    ok(cu.cuStreamDestroy(third))
    assert code(cu.cuStreamEndCapture(second)) == (0 if joined else UNJOINED)


def test_memory_of_a_graph_lives_from_its_node_to_its_free(gpu: emulator.Driver) -> None:
    queue, out = stream(1), alloc(8)
    begin(queue)
    memory = int(ok(cu.cuMemAllocAsync(8, queue)))
    fill(memory, 7, queue)
    ok(cu.cuMemcpyDtoDAsync(out, memory, 8, queue))
    ok(cu.cuMemFreeAsync(memory, queue))
    assert code(cu.cuMemFreeAsync(memory, queue)) == INVALID_VALUE  # twice
    assert code(cu.cuStreamEndCapture(queue)) == INVALIDATED
    begin(queue)
    memory = int(ok(cu.cuMemAllocAsync(8, queue)))
    fill(memory, 7, queue)
    ok(cu.cuMemcpyDtoDAsync(out, memory, 8, queue))
    ok(cu.cuMemFreeAsync(memory, queue))
    graph = ok(cu.cuStreamEndCapture(queue))
    made = run(graph, queue)
    ok(cu.cuGraphLaunch(made, queue))
    assert peek(out) == b"\7"
    fill(memory, 1, queue)
    assert "before their stream has allocated them" in gpu.complaints[0]
    gpu.clear()
    ok(cu.cuGraphDestroy(graph))
    assert memory in gpu.live()
    ok(cu.cuGraphExecDestroy(made))
    assert memory not in gpu.live()


def test_memory_that_a_launch_leaves_is_freed_before_the_next(gpu: emulator.Driver) -> None:
    queue = stream(1)
    begin(queue)
    memory = int(ok(cu.cuMemAllocAsync(8, queue)))
    fill(memory, 7, queue)
    graph = ok(cu.cuStreamEndCapture(queue))
    made = run(graph, queue)
    assert peek(memory) == b"\7"
    assert code(cu.cuGraphLaunch(made, queue)) == INVALID_VALUE
    ok(cu.cuMemFreeAsync(memory, queue))
    ok(cu.cuGraphLaunch(made, queue))


def test_external_events_are_recorded_and_awaited_at_each_launch(gpu: emulator.Driver) -> None:
    queue, other, mark, memory = stream(1), stream(1), event(), alloc(8)
    begin(queue)
    ok(cu.cuEventRecordWithFlags(mark, queue, 1))
    graph = ok(cu.cuStreamEndCapture(queue))
    gpu.hold(queue)
    run(graph, queue)
    ok(cu.cuStreamWaitEvent(other, mark, 0))
    fill(memory, 1, other)
    assert peek(memory) == b"\0"
    gpu.release(queue)
    assert peek(memory) == b"\1"


@pytest.mark.parametrize("waits", [True, False])
def test_a_launch_is_refused_if_an_event_of_its_graph_was_destroyed(
    gpu: emulator.Driver, waits: bool
) -> None:
    queue, mark, memory = stream(1), event(), alloc(8)
    begin(queue)
    if waits:
        ok(cu.cuStreamWaitEvent(queue, mark, 1))
    else:
        ok(cu.cuEventRecordWithFlags(mark, queue, 1))
    fill(memory, 3, queue)
    made = run(ok(cu.cuStreamEndCapture(queue)), queue)
    fill(memory, 0, queue)
    ok(cu.cuEventDestroy(mark))
    assert code(cu.cuGraphLaunch(made, queue)) == INVALID_HANDLE
    assert "was destroyed" in gpu.complaints[0]
    gpu.clear()
    assert peek(memory) == b"\0"


def test_a_graph_does_not_run_beside_itself(gpu: emulator.Driver) -> None:
    first, second, source, out = stream(1), stream(1), alloc(8), alloc(8)
    begin(first)
    ok(cu.cuMemcpyDtoDAsync(out, source, 8, first))
    made = ok(cu.cuGraphInstantiate(ok(cu.cuStreamEndCapture(first)), 0))
    fill(source, 5, second)
    gpu.hold(first)
    ok(cu.cuGraphLaunch(made, first))
    ok(cu.cuGraphLaunch(made, second))
    assert peek(out) == b"\0"
    gpu.release(first)
    assert peek(out) == b"\5"


def test_an_update_takes_the_same_shape_only(gpu: emulator.Driver) -> None:
    queue, memory = stream(1), alloc(8)
    graphs = []
    for value in (1, 2):
        begin(queue)
        fill(memory, value, queue)
        graphs.append(ok(cu.cuStreamEndCapture(queue)))
    begin(queue)
    graphs.append(ok(cu.cuStreamEndCapture(queue)))
    made = run(graphs[0], queue)
    ok(cu.cuGraphExecUpdate(made, graphs[1]))
    ok(cu.cuGraphLaunch(made, queue))
    assert peek(memory) == b"\2"
    assert code(cu.cuGraphExecUpdate(made, graphs[2])) == UPDATE_FAILURE


def test_a_graph_whose_memory_is_gone_is_complained_of(gpu: emulator.Driver) -> None:
    queue, memory = stream(1), alloc(8)
    begin(queue)
    fill(memory, 1, queue)
    graph = ok(cu.cuStreamEndCapture(queue))
    ok(cu.cuMemFree(memory))
    run(graph, queue)
    assert "are not allocated" in gpu.complaints[0]
    gpu.clear()


def test_the_dependencies_of_a_stream_can_be_set(gpu: emulator.Driver) -> None:
    queue, memory = stream(1), alloc(8)
    begin(queue)
    fill(memory, 1, queue)
    first = ok(cu.cuStreamGetCaptureInfo(queue))[3][0]
    fill(memory, 2, queue)
    ok(cu.cuStreamUpdateCaptureDependencies(queue, [first], None, 1, 1))
    fill(memory, 3, queue)
    assert edges(ok(cu.cuStreamEndCapture(queue))) == {(0, 1), (0, 2)}


def test_a_graph_that_is_captured_is_neither_launched_nor_destroyed(gpu: emulator.Driver) -> None:
    queue = stream(1)
    begin(queue)
    graph = ok(cu.cuStreamGetCaptureInfo(queue))[2]
    assert code(cu.cuGraphDestroy(graph)) == ILLEGAL_STATE
    assert code(cu.cuGraphInstantiate(graph, 0)) == ILLEGAL_STATE
    graph = ok(cu.cuStreamEndCapture(queue))
    made = ok(cu.cuGraphInstantiate(graph, 0))
    begin(queue)
    assert code(cu.cuGraphLaunch(made, queue)) == NOT_SUPPORTED  # graphs within graphs
    ok(cu.cuStreamEndCapture(queue))


def test_objects_of_the_user_go_with_the_last_graph(gpu: emulator.Driver) -> None:
    queue, memory, gone = stream(1), alloc(8), []
    destroy = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(gone.append)
    pointer = ctypes.cast(destroy, ctypes.c_void_p).value
    held = ok(cu.cuUserObjectCreate(5, cu.CUhostFn(pointer), 1, 1))
    begin(queue)
    fill(memory, 1, queue)
    graph = ok(cu.cuStreamEndCapture(queue))
    ok(cu.cuGraphRetainUserObject(graph, held, 1, 1))
    made = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuGraphDestroy(graph))
    gpu.hold(queue)
    ok(cu.cuGraphLaunch(made, queue))
    ok(cu.cuGraphExecDestroy(made))
    assert gone == []  # the launch still waits
    gpu.release(queue)
    ok(cu.cuStreamSynchronize(queue))
    assert gone == [5]
