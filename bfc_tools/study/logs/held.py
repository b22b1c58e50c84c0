"""What a log lists, as a trace: the blocks that were live, and the request that was refused."""

from __future__ import annotations

import os

from bfc.errors import TraceError
from bfc.trace import Trace
from bfc.trace.from_snapshot import live_in
from bfc.units import format_bytes
from bfc_tools.study.candidates import BFC, PAGES, Point, replay
from bfc_tools.study.logs.log import Log, read_log
from bfc_tools.study.logs.side_by_side import Logs
from bfc_tools.study.recorded_settings import with_requests


def trace_of(path: str | os.PathLike[str]) -> Trace:
    """The blocks that a log lists as in use, in the order of their addresses, since no log says in
    which order they were made; and, as the last events, the request that was refused. Of several
    processes it is the first one that lists its chunks. `meta["log"]` says what was refused.

    Raises TraceError if the log lists no chunks.
    """
    log = read_log(path)
    listed = log.snapshots()
    if not listed:
        if log.refusals:
            raise TraceError(
                f"{os.fspath(path)}: it is an error text without a list of chunks, so there is "
                "nothing to replay: `bfc report` says what it tells, and what to record"
            )
        raise TraceError(nothing_in(os.fspath(path), log))
    refusal, snapshot = listed[0]
    columns, _, _ = live_in(snapshot)
    said = {**refusal.as_dict(), "remarks": list(refusal.remarks), "processes": len(listed)}
    meta = {"source": "log", "log": said}
    trace = Trace(**columns, meta=meta)
    if refusal.nbytes is None:
        return trace
    return with_requests(trace, [(len(trace), refusal.nbytes, 0)])


def nothing_in(name: str, log: Log) -> str:
    """What is wrong with a file that is a text without a refusal."""
    text = (
        f"{name}: it is not a recorded run (an .npz trace, a memory snapshot of PyTorch or a log "
        "of RMM), and as a text it has no out-of-memory error of PyTorch, TensorFlow or JAX"
    )
    return f"{text}; {log.hint}" if log.hint else text


def replays_of(logs: Logs, device: int | None = None) -> list[str]:
    """What replays of the live blocks come to, with the request behind them, on the memory that the
    allocator had, or on a device of so many bytes: a line for each policy of bfc. Empty if no log
    lists all of its chunks."""
    listed = logs.listed()
    if listed is None or listed[1].nbytes is None or not listed[1].is_whole:
        return []
    _, refusal, snapshot = listed
    room = device or refusal.limit or snapshot.stats.pool_bytes
    columns, _, _ = live_in(snapshot)
    trace = with_requests(Trace(**columns), [(len(columns["op"]), listed[1].nbytes, 0)])
    found = []
    for point, how in ((Point(BFC, ""), "laid out anew"), (Point(PAGES, ""), "joined from pages")):
        outcome = replay(trace, point, room)
        served = "served" if outcome.completes else "refused"
        found.append(f"  {how} ({point.name}): {served}")
    return ["", f"Replayed, what was live and then the request, on {format_bytes(room)}:", *found]
