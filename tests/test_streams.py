"""What a user may pass as a stream."""

from __future__ import annotations

import pytest

from bfc.streams import is_queue, stream_handle


class Queue:
    int_ptr = 5

    def finish(self) -> None: ...


class Memory:
    """As OpenCL's other objects: they have a handle, too."""

    int_ptr = 5


class Stream(Queue):
    """A stream of CUDA, whatever else it has."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 7


def test_a_queue_has_a_handle_and_can_be_finished() -> None:
    assert [is_queue(it) for it in (Queue(), Memory(), Stream(), 7, None)] == [True, *[False] * 4]


def test_what_a_queue_is_decides_which_handle_a_stream_has() -> None:
    assert [stream_handle(it) for it in (Queue(), Stream(), 7)] == [5, 7, 7]
    with pytest.raises(TypeError, match="not Memory"):
        stream_handle(Memory())
