"""A compiled original in a process of its own, over a simulated device: the half in Python.

`server.hpp` is the other half, and `simulated_device.hpp` the device. Both hold what the originals
of PyTorch have in common.
"""

from __future__ import annotations

import os
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

from bench.peers.closing import Closing
from bfc_slow_models.torch_words import OUT_OF_MEMORY as OUT_OF_MEMORY
from bfc_slow_models.torch_words import Call as Call
from bfc_slow_models.torch_words import Failure as Failure
from bfc_slow_models.torch_words import Operation as Operation

#: The files that every server is compiled from, for its fingerprint.
SOURCES = tuple(Path(__file__).with_name(name) for name in ("server.hpp", "simulated_device.hpp"))
#: The first word of each entry of `Peer.calls`, in the order of the device's numbers.
CALLS = (
    "malloc",
    "free",
    "event_record",
    "event_query",
    "event_synchronize",
    "device_synchronize",
    "wait",
    "reserve",
    "unreserve",
    "create",
    "release",
    "map",
    "unmap",
    "access",
    "pool_malloc",
    "pool_free",
    "host_malloc",
    "host_free",
)
#: What can be refused. The log then has no address.
REFUSABLE = (
    *("malloc", "pool_malloc", "host_malloc"),
    *("reserve", "unreserve", "create", "release", "map", "unmap", "access"),
)
ANY_KIND = (1 << 64) - 1
KINDS = ("ok", "oom", "value", "driver", "internal", "other")

#: An encoded operation: at most four words, and a text.
Encoded = tuple[tuple[int, ...], bytes]

_HEAD = struct.Struct("<6Q")
_ANSWER = struct.Struct("<3Q")


class PeerDied(RuntimeError):  # noqa: N818 - what is the case, not what went wrong
    """The server has gone: an upstream fault, or a stop by `close`."""


def plain(*words: int) -> Encoded:
    """An operation that takes numbers as they are."""
    return words, b""


def encode_fault(n: int, code: int = OUT_OF_MEMORY, kind: str | None = None) -> Encoded:
    """The arguments of `Peer.fail_at`."""
    return (n, code, ANY_KIND if kind is None else CALLS.index(kind)), b""


def as_words(data: memoryview) -> tuple[int, ...]:
    """The words of an answer."""
    return struct.unpack(f"<{len(data) // 8}Q", data)


def decode_one(data: memoryview) -> int | None:
    """What most operations answer: one number, or nothing."""
    return int.from_bytes(data, "little") if data else None


def decode_calls(data: memoryview) -> list[Call]:
    """The device's log."""
    words = as_words(data)
    calls: list[Call] = []
    for at in range(0, len(words), 3):
        name, first, second = CALLS[words[at]], words[at + 1], words[at + 2]
        refused = name in REFUSABLE and second == 0
        calls.append((name, first, None if refused else second))
    return calls


class Peer(Closing):
    """Runs a server and asks it. What upstream throws is returned as a `Failure`; a process that an
    upstream fault ends raises PeerDied."""

    #: An operation's number; how its arguments are encoded (`plain` where it is not named), and its
    #: answer decoded (`decode_one`).
    codes: ClassVar[Mapping[str, int]]
    encoders: ClassVar[Mapping[str, Callable[..., Encoded]]] = {}
    decoders: ClassVar[Mapping[str, Callable[[memoryview], Any]]] = {}

    _process: subprocess.Popen[bytes] | None = None

    def __init__(self, server: Path, environment: Mapping[str, str] | None = None) -> None:
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115 - read when the process has died
        self._process = subprocess.Popen(
            [str(server)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            env=None if environment is None else dict(environment),
        )

    def close(self) -> None:
        """End the process. Nothing is freed first."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except BrokenPipeError:
                pass  # it had died, with some of our request unread
        process.wait()
        self._messages.close()

    # Running operations

    def run(self, operations: Iterable[Operation]) -> list[Any]:
        """Run many operations at the cost of one exchange: what each of them returns.

        An operation is a tuple, a method's name and its arguments by position: `("calls",)`. A
        failure does not stop the list.
        """
        listed = list(operations)
        body = b"".join(map(self._encode, listed))
        return self._decode(listed, self._exchange(struct.pack("<Q", len(body) // 8) + body))

    def _encode(self, operation: Operation) -> bytes:
        name, *arguments = operation
        words, text = self.encoders.get(name, plain)(*arguments)
        rest = (0,) * (4 - len(words))
        padding = bytes(-len(text) % 8)
        return _HEAD.pack(self.codes[name], *words, *rest, len(text)) + text + padding

    def _decode(self, operations: Sequence[Operation], reply: bytes) -> list[Any]:
        view, at, answers = memoryview(reply), 0, []
        for operation in operations:
            status, words, length = _ANSWER.unpack_from(view, at)
            start = at + _ANSWER.size
            end = start + 8 * words
            at = end + length + -length % 8
            if status:
                text = bytes(view[end : end + length]).decode(errors="replace")
                answers.append(Failure(KINDS[status], text))
            else:
                answers.append(self.decoders.get(operation[0], decode_one)(view[start:end]))
        return answers

    def _exchange(self, request: bytes) -> bytes:
        if self._process is None:
            raise PeerDied("this peer is closed")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        head = self._process.stdout.read(8)
        length = 8 * int.from_bytes(head, "little")
        reply = self._process.stdout.read(length) if head else b""
        if not head or len(reply) != length:
            raise self._died()
        return reply

    def _died(self) -> PeerDied:
        assert self._process is not None
        status = self._process.wait()
        return PeerDied(f"exit status {status}: {self.messages.strip() or 'no message'}")

    def _one(self, *operation: Any) -> Any:
        return self.run([operation])[0]

    @property
    def messages(self) -> str:
        """What upstream has printed: its warnings."""
        self._messages.seek(0)
        return self._messages.read().decode(errors="replace")

    # The device

    @property
    def calls(self) -> list[Call]:
        """The device's log, from the start: a name of `CALLS` and two numbers.

        For memory they are the bytes and the address (of a "create" and a "release", the handle),
        None for a refusal. Events are numbered from 1 as they are made, and used again once they
        are over: ("event_record", event, stream), ("event_query", event, over or not),
        ("event_synchronize", event, stream). To wait for a whole stream is ("wait", 0, stream).
        """
        return cast("list[Call]", self._one("calls"))

    @property
    def live_bytes(self) -> int:
        """The bytes that the device has given out."""
        return cast(int, self._one("live_bytes"))

    def fail_at(self, n: int, code: int = OUT_OF_MEMORY, kind: str | None = None) -> None:
        """Refuse the n-th call from now (1 is the next) with this error; 0 takes it back.

        Counted are the calls of one kind, such as "map", or all that take memory ("malloc" and its
        like, and "create").
        """
        self._one("fail_at", n, code, kind)

    def hold(self, stream: int) -> None:
        """What is queued on the stream from now on stays unfinished until `finish`, or a wait."""
        self._one("hold", stream)

    def finish(self, stream: int) -> None:
        """Everything queued on the stream has finished, and nothing more is held there."""
        self._one("finish", stream)

    def finish_events(self, stream: int, count: int) -> None:
        """So many of the stream's unfinished events, the oldest, are over; it stays held."""
        self._one("finish_events", stream, count)


def environment_for(settings: str | None, extra: Mapping[str, str] | None) -> dict[str, str]:
    """Ours, without what would steer upstream behind the caller's back."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTORCH_", "TORCH_"))
    }
    if settings is not None:
        ours["PYTORCH_CUDA_ALLOC_CONF"] = settings
    return ours | dict(extra or {})
