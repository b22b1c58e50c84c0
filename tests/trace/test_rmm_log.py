"""RMM's log in CSV: read as a trace, and written."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
from hypothesis import given, settings

import bfc
from bfc import testing

HEAD = "Thread,Time,Action,Pointer,Size,Stream"
GIB = 1 << 30


def read(tmp_path: Path, *rows: str, head: str = HEAD) -> bfc.Trace:
    path = tmp_path / "log.csv"
    path.write_text("\n".join([head, *rows]) + "\n")
    return bfc.Trace.from_rmm_log(path)


def test_a_log_of_rmm_is_a_trace(tmp_path: Path):
    trace = read(
        tmp_path,
        "1979932,14:21:19.998533,allocate,0x30a000000,256,0x2",
        "1979932,14:21:20.000001,allocate,0x30a000100,1024,0",
        "1980043,14:21:32.661875,free,0x30a000000,256,0x2",
        "1980043,14:21:33.000000,allocate failure,(nil),99999,0x2",
    )
    assert trace.op.tolist() == [0, 0, 1]
    assert trace.id.tolist() == [0, 1, 0]
    assert trace.size.tolist() == [256, 1024, 0]
    assert trace.stream.tolist() == [1, 0, 1]
    assert trace.time_us[0] == ((14 * 60 + 21) * 60 + 19) * 1_000_000 + 998_533
    facts = trace.meta["rmm"]
    assert facts["streams"] == [0, 2]
    assert facts["addresses"] == [0x30A000000, 0x30A000100, 0]
    assert facts["failures"] == [[3, 99999]]
    assert facts["repairs"] == {}
    assert trace.replay(bfc.BFCAllocator(bfc.SimulatedSubAllocator(GIB))).failed == 0


def test_seconds_since_1970_and_deallocate_are_read_too(tmp_path: Path):
    trace = read(
        tmp_path,
        "1,1634567890.123456,allocate,0x7f8a40000000,1024,0x7f8a38001020",
        "1,1634567890.5,deallocate,0x7f8a40000000,1024,0x7f8a38001020",
    )
    assert trace.op.tolist() == [0, 1]
    assert trace.time_us.tolist() == [1634567890123456, 1634567890500000]


def test_time_goes_on_after_midnight_and_a_little_back_is_no_day(tmp_path: Path):
    rows = [
        f"1,{time},allocate,{address},256,0"
        for address, time in enumerate(
            ["23:59:59.999999", "23:59:59.999990", "00:00:00.000001"], start=1
        )
    ]
    day = 86_400_000_000
    assert read(tmp_path, *rows).time_us.tolist() == [day - 1, day - 10, day + 1]


def test_both_names_of_the_default_stream_are_stream_0(tmp_path: Path):
    rows = ["1,0,allocate,0x10,1,0x1", "1,0,allocate,0x20,1,0", "1,0,allocate,0x30,1,0x2"]
    assert read(tmp_path, *rows).stream.tolist() == [0, 0, 1]


def test_a_log_that_contradicts_itself_is_mended_and_counted(tmp_path: Path):
    trace = read(
        tmp_path,
        "1,0,free,0x50,1,0",
        "1,0,allocate,0x10,100,0",
        "1,0,allocate,0x10,200,0",
        "1,0,allocate,0x0,0,0",
        "1,0,free,(nil),0,0",
    )
    assert trace.op.tolist() == [0, 1, 0, 0, 1]
    assert trace.time_us is None
    assert trace.meta["rmm"]["repairs"] == {"frees_added": 1, "frees_of_unknown": 1}


def test_columns_are_found_by_their_names(tmp_path: Path):
    trace = read(
        tmp_path, "kv,4096,0,allocate,0x10,x", head="Owner,Size,Stream,Action,Pointer,Time"
    )
    assert trace.size.tolist() == [4096]
    assert trace.owners == ("", "kv")
    assert trace.owner.tolist() == [1]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("1,0,allocate,0x10,-5,0", "line 2: its size is '-5'"),
        ("1,0,allocate,nowhere,5,0", "line 2: its pointer is 'nowhere'"),
        ("1,0,allocate,0x10,5,stream", "line 2: its stream is 'stream'"),
        ("1,0,allocate,0x10,99999999999999999999,0", "line 2: its size"),
        (f"1,0,allocate,0x10,{1 << 63},0", "line 2: its size is above"),
        ("1,0,grow,0x10,5,0", "line 2: its action is 'grow'"),
        ("1,0,allocate,0x10", "line 2 has 4 columns"),
        ('1,0,"allocate', "it is not a table in CSV"),
        ("1,0,allocate,0x10," + "9" * 5000 + ",0", "line 2: its size"),
        ("1,0," + "a" * 200_000 + ",0x10,5,0", "it is not a table in CSV"),
    ],
)
def test_what_is_no_log_is_one_line(tmp_path: Path, row: str, fault: str):
    with pytest.raises(bfc.TraceError, match=fault) as caught:
        read(tmp_path, row)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 400
    assert text.startswith(str(tmp_path / "log.csv"))


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"a,b,c\n", b"\xff\xfe", b"PK\x03\x04", HEAD[:30].encode()]
)
def test_another_file_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "other.csv"
    path.write_bytes(content)
    with pytest.raises(bfc.TraceError):
        bfc.Trace.from_rmm_log(path)


def test_a_fifo_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "log.csv")
    with pytest.raises(bfc.TraceError, match="a FIFO"):
        bfc.Trace.from_rmm_log(tmp_path / "log.csv")


@given(testing.traces(max_events=40, streams=2, releases=True))
@settings(max_examples=40)
def test_what_is_written_is_read_back(tmp_path_factory, trace: bfc.Trace):
    path = tmp_path_factory.mktemp("log") / "log.csv"
    replayed = trace.replay(bfc.CachingAllocator(bfc.SimulatedSubAllocator(1 << 40)))
    trace.log_csv(path, addresses=replayed.addresses)
    back = bfc.Trace.from_rmm_log(path)
    named = (trace.op != 2) & ~_of_no_bytes(trace)
    kept = ~_of_no_bytes(back)
    assert back.op[kept].tolist() == trace.op[named].tolist()
    assert back.size[kept].tolist() == [
        size if op == 0 else 0
        for op, size in zip(trace.op[named].tolist(), trace.size[named].tolist(), strict=True)
    ]
    assert [a for a in back.meta["rmm"]["addresses"] if a] == [
        a for a in replayed.addresses.tolist() if a
    ]


def _of_no_bytes(trace: bfc.Trace):
    import numpy as np

    sizes: dict[int, int] = {}
    found = []
    for op, number, size in zip(
        trace.op.tolist(), trace.id.tolist(), trace.size.tolist(), strict=True
    ):
        if op == 0:
            sizes[number] = size
        found.append(op != 2 and sizes[number] == 0)
    return np.array(found, bool)


def test_a_trace_without_addresses_gets_some_that_do_not_meet(tmp_path: Path):
    trace = bfc.Trace([0, 0, 1, 0], [0, 1, 0, 2], [1000, 256, 0, 5])
    trace.log_csv(tmp_path / "log.csv")
    with open(tmp_path / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == HEAD.split(",")
    live = [(int(row["Pointer"], 16), int(row["Size"])) for row in rows if row["Action"] != "free"]
    ends = [0, *(address + size for address, size in live)]
    assert all(end <= address for end, (address, _) in zip(ends, live, strict=False))
    assert rows[2]["Pointer"] == rows[0]["Pointer"]
    assert rows[2]["Size"] == "1000"
    with pytest.raises(ValueError, match="1 addresses for 4 events"):
        trace.log_csv(tmp_path / "log.csv", addresses=[1])


def test_a_refused_allocation_is_a_failure(tmp_path: Path):
    trace = bfc.Trace([0, 1], [0, 0], [1 << 40, 0])
    result = trace.replay(bfc.BFCAllocator(bfc.SimulatedSubAllocator(GIB)))
    trace.log_csv(tmp_path / "log.csv", addresses=result.addresses)
    back = bfc.Trace.from_rmm_log(tmp_path / "log.csv")
    assert (len(back), back.meta["rmm"]["failures"]) == (0, [[0, 1 << 40]])


def test_owners_times_and_handles_are_written(tmp_path: Path):
    trace = bfc.Trace(
        [0, 1],
        [0, 0],
        [512, 0],
        stream=[1, 1],
        time_us=[1_634_567_890_123_456, 1_634_567_891_000_000],
        owner=[1, 1],
        owners=["", 'kv "cache", 2'],
        meta={"torch": {"streams": [0, -5]}},
    )
    trace.log_csv(tmp_path / "log.csv")
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert lines[0] == HEAD + ",Owner"
    assert lines[1].startswith("0,14:38:10.123456,allocate,0x10000000000,512,0xfffffffffffffffb,")
    back = bfc.Trace.from_rmm_log(tmp_path / "log.csv")
    assert back.owners == ("", 'kv "cache", 2')


def test_what_an_allocator_has_recorded_is_a_log(tmp_path: Path):
    from bfc.integrations.rmm import log_csv

    pool = bfc.CachingAllocator(bfc.SimulatedSubAllocator("64 MiB"))
    with pytest.raises(ValueError, match="has recorded nothing"):
        log_csv(pool, tmp_path / "log.csv")
    pool.record_history()
    with bfc.owner("kv cache"):
        first = pool.allocate_raw(1000)
    second = pool.allocate_raw(3 << 20, 7)
    pool.deallocate_raw(first)
    with pytest.raises(bfc.OutOfMemoryError):
        pool.allocate_raw(1 << 30)
    log_csv(pool, tmp_path / "log.csv")
    trace = bfc.Trace.from_rmm_log(tmp_path / "log.csv")
    assert (trace.op.tolist(), trace.size.tolist()) == ([0, 0, 1], [1000, 3 << 20, 0])
    assert trace.owners[trace.owner[0]] == "kv cache"
    facts = trace.meta["rmm"]
    assert facts["addresses"] == [first, second, 0]
    assert facts["streams"] == [0, 7]
    assert facts["failures"] == [[3, 1 << 30]]


def test_streams_without_handles_stay_apart(tmp_path: Path) -> None:
    """1 and 2 are handles of CUDA's default streams."""
    path = tmp_path / "log.csv"
    trace = bfc.Trace([0] * 4, range(4), [3 << 20] * 4, [0, 1, 2, 1])
    trace.log_csv(path)
    assert bfc.Trace.from_rmm_log(path).stream.tolist() == [0, 1, 2, 1]


def test_a_line_out_of_order_around_midnight(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    bfc.Trace([0] * 4, range(4), [512] * 4, time_us=[1, 2, 3, 4]).log_csv(path)
    lines = path.read_text().splitlines()
    times = ["23:59:59.900000", "00:00:00.100000", "23:59:59.950000", "00:00:00.200000"]
    for number, clock in enumerate(times):
        cells = lines[number + 1].split(",")
        lines[number + 1] = ",".join([cells[0], clock, *cells[2:]])
    path.write_text("\n".join(lines) + "\n")
    read = bfc.Trace.from_rmm_log(path).time_us.tolist()
    assert [time - read[0] for time in read] == [0, 200_000, 50_000, 300_000]
