"""Traces: what they accept, what they refuse, and what a replay leaves behind."""

from __future__ import annotations

import copy
import io
import os
import pickle
import random
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

import bfc
import bfc.trace.trace as trace_module
from bfc import files
from bfc.testing import Misbehaving

TRACES = sorted((Path(__file__).parents[2] / "bench" / "traces").glob("*.npz"))


def allocator(size: str = "80 GiB", **options) -> bfc.BFCAllocator:
    return bfc.BFCAllocator(bfc.SimulatedSubAllocator(size), **options)


def test_a_replay_reports_addresses_peaks_and_failures():
    trace = bfc.Trace(op=[0, 0, 1, 0, 0], id=[0, 1, 0, 2, 3], size=[1000, 300, 0, 1 << 20, 0])
    result = trace.replay(allocator("1 MiB"))
    assert (result.addresses - (1 << 40))[:2].tolist() == [0, 1024]
    assert result.addresses[2:].tolist() == [0, 0, 0]
    assert (result.failed, result.events) == (1, 5)
    assert (result.peak_bytes_live, result.peak_bytes_in_use) == (1300, 1536)
    assert result.peak_bytes_reserved == 1 << 20
    assert result.seconds > 0


def test_what_a_trace_leaves_live_can_be_freed_by_its_address():
    pool = allocator()
    result = bfc.Trace([0, 0, 1], [0, 1, 0], [1000, 300, 0]).replay(pool)
    assert pool.requested_size(int(result.addresses[1])) == 300
    pool.deallocate_raw(int(result.addresses[1]))
    with pytest.raises(bfc.InvalidPointerError):
        pool.deallocate_raw(int(result.addresses[0]))
    pool.check()
    assert pool.stats().bytes_in_use == 0


def test_peaks_of_a_replay_do_not_see_what_was_before_it():
    pool = allocator("1 MiB")
    pool.deallocate_raw(pool.allocate_raw(500_000))
    result = bfc.Trace([0], [0], [1000]).replay(pool)
    assert result.peak_bytes_in_use == 1024
    assert pool.stats().peak_bytes_in_use >= 500_000


def test_a_closed_trace_leaves_nothing_live_and_replays_again():
    trace = bfc.Trace([0, 0, 1, 0, 0], [5, 1, 5, 5, 7], [1000, 300, 0, 256, 0]).closed()
    pool = allocator()
    first, second = trace.replay(pool), trace.replay(pool)
    assert pool.stats().bytes_in_use == 0
    assert first.addresses.tolist() == second.addresses.tolist()


def test_a_replay_equals_the_same_calls_one_by_one():
    rng = random.Random(3)
    op, ident, size, live = [], [], [], []
    for number in range(3000):
        if live and rng.random() < 0.45:
            op.append(1), ident.append(live.pop(rng.randrange(len(live)))), size.append(0)
        else:
            (
                op.append(0),
                ident.append(number),
                size.append(rng.randrange(0, 600_000)),
                live.append(number),
            )
    played, called = allocator("16 MiB", strict=True), allocator("16 MiB", strict=True)
    result = bfc.Trace(op, ident, size).replay(played)
    addresses: dict[int, int] = {}
    for event in range(len(op)):
        if op[event]:
            called.deallocate_raw(addresses[ident[event]])
            continue
        try:
            addresses[ident[event]] = called.allocate_raw(size[event])
        except bfc.OutOfMemoryError:
            addresses[ident[event]] = 0
        assert result.addresses[event] == addresses[ident[event]]
    assert played.snapshot() == called.snapshot()
    assert result.failed > 0
    played.check()


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
@pytest.mark.parametrize("growth", [False, True])
def test_every_recorded_trace_replays(path: Path, growth: bool):
    pool = allocator(allow_growth=growth)
    trace = bfc.Trace.load(path)
    result = trace.replay(pool)
    assert result.failed == 0
    pool.check()
    live = np.cumsum(np.where(trace.op == 0, trace.size, 0).astype(np.int64))
    assert result.peak_bytes_live <= live[-1]
    assert (
        trace[: trace.fullest_event() + 1].replay(allocator()).peak_bytes_live
        == result.peak_bytes_live
    )


def test_memory_of_a_real_host_holds_a_trace():
    with bfc.BFCAllocator(bfc.HostSubAllocator("8 GiB"), allow_growth=True) as pool:
        assert bfc.Trace.load(TRACES[3]).replay(pool).failed == 0


def test_events_on_other_streams_come_back_when_those_finish():
    device = bfc.SimulatedSubAllocator("1 MiB")
    pool = bfc.BFCAllocator(device)
    device.hold(7)
    trace = bfc.Trace([0, 1, 0], [0, 0, 1], [1000, 0, 1000], stream=[7, 7, 0])
    result = trace.replay(pool)
    assert result.addresses[2] != result.addresses[0]
    device.finish(7)
    pool.allocate_raw(1)
    assert pool.stats().bytes_waiting_for_streams == 0
    pool.check()


def test_what_a_replay_leaves_on_another_stream_is_held_back_by_it():
    device = bfc.SimulatedSubAllocator("1 MiB")
    pool = bfc.BFCAllocator(device)
    address = int(bfc.Trace([0], [0], [1000], stream=[7]).replay(pool).addresses[0])
    device.hold(7)
    pool.deallocate_raw(address)
    assert pool.stats().bytes_waiting_for_streams == 1024
    device.finish(7)


def test_a_sub_allocator_that_raises_frees_what_the_replay_had():
    device = Misbehaving("1 GiB")
    device.on("alloc", 2, raises=OSError("the driver went away"))
    pool = bfc.BFCAllocator(device, allow_growth=True)
    trace = bfc.Trace([0, 0, 0], [0, 1, 2], [1000, 1000, 8 << 20])
    with pytest.raises(bfc.SubAllocatorError, match="the driver went away"):
        trace.replay(pool)
    assert pool.stats().bytes_in_use == 0
    pool.check()
    pool.allocate_raw(1000)


def test_progress_is_told_and_its_errors_free_what_the_replay_had():
    seen: list[int] = []
    count = 600_000
    trace = bfc.Trace(np.zeros(count, np.uint8), np.arange(count), np.full(count, 256))
    trace.replay(allocator(), progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == count
    assert len(seen) > 1

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    pool = allocator()
    with pytest.raises(KeyboardInterrupt):
        trace.replay(pool, progress=stop)
    assert pool.stats().bytes_in_use == 0


def test_an_allocator_that_is_closed_refuses_a_replay():
    pool = allocator()
    pool.close()
    with pytest.raises(bfc.ClosedError):
        bfc.Trace([0], [0], [1]).replay(pool)


def test_what_is_not_an_allocator_replays_nothing():
    with pytest.raises(TypeError, match="a trace is replayed on an allocator, not SimulatedSub"):
        bfc.Trace([0], [0], [1]).replay(bfc.SimulatedSubAllocator("1 GiB"))  # type: ignore[arg-type]


def test_an_empty_trace_is_fine(tmp_path: Path):
    trace = bfc.Trace([], [], [])
    assert trace.replay(allocator()).events == 0
    assert len(trace.closed()) == 0
    trace.save(tmp_path / "empty.npz")
    assert len(bfc.Trace.load(tmp_path / "empty.npz")) == 0


@pytest.mark.parametrize(
    ("arrays", "fault"),
    [
        (([0, 3], [0, 1], [1, 1]), "event 1: op is 3"),
        (([1], [0], [0]), "event 0: it frees an id that is not live"),
        (([0, 1, 1], [0, 0, 0], [1, 0, 0]), "event 2: it frees an id that is not live"),
        (([0, 0], [4, 4], [1, 1]), "event 1: it allocates an id that is live already"),
        (([0], [0], [1 << 63]), "event 0: its size"),
        (([0], [0, 1], [1]), "differ in length"),
        (([0], [-1], [1]), "id holds numbers outside"),
        (([0], [1 << 32], [1]), "id holds numbers outside"),
        (([0], [0], [-1]), "size holds numbers outside"),
        (([0.5], [0], [1]), "op holds float64"),
        (([[0]], [[0]], [[1]]), "dimensions"),
    ],
)
def test_events_that_make_no_sense_are_refused(arrays, fault: str):
    with pytest.raises(bfc.TraceError, match=fault):
        bfc.Trace(*arrays)


def test_ids_far_apart_need_no_table_of_their_range():
    trace = bfc.Trace([0, 0, 1], [2**32 - 1, 7, 2**32 - 1], [10, 10, 0])
    assert trace.replay(allocator()).failed == 0
    assert trace.fullest_event() == 1


@pytest.mark.parametrize("far", [1, 10_000_000])
def test_what_becomes_of_the_callers_arrays_does_not_matter(far: int):
    op, ids = np.array([0, 0, 1], np.uint8), np.array([0, far, 0], np.uint32)
    size, stream = np.array([1000, 300, 0], np.uint64), np.zeros(3, np.uint16)
    trace = bfc.Trace(op, ids, size, stream)
    expected = trace.replay(allocator()).addresses.tolist()
    ids[:] = 2**31
    op[:] = 7
    size[:] = 2**63
    stream[:] = 9
    assert trace.id.tolist() == [0, far, 0]
    assert trace.replay(allocator()).addresses.tolist() == expected


@pytest.mark.parametrize("name", ["op", "id", "size", "stream"])
def test_the_arrays_of_a_trace_cannot_be_changed(name: str):
    trace = bfc.Trace([0, 0, 1], [0, 1, 0], [1000, 300, 0])
    copies = [trace, copy.copy(trace), copy.deepcopy(trace), pickle.loads(pickle.dumps(trace))]
    for one in [*copies, trace.closed(), trace[:2]]:
        column = getattr(one, name)
        assert column.flags.c_contiguous
        assert column.flags.aligned
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            column.flags.writeable = True
        with pytest.raises(AttributeError):
            setattr(one, name, column)
    assert not trace._numbers.flags.writeable
    assert not bfc.Trace([0], [2**32 - 1], [1])._numbers.flags.writeable


def test_a_copy_of_a_trace_has_its_meta():
    trace = bfc.Trace([0], [0], [1], meta={"source": ["a test"]})
    deep = copy.deepcopy(trace)
    assert deep.meta == trace.meta
    assert deep.meta is not trace.meta
    assert copy.copy(trace).meta is trace.meta


def test_a_trace_that_was_refused_a_second_life_keeps_its_first():
    trace = bfc.Trace([0], [0], [1])
    with pytest.raises(bfc.TraceError):
        trace.__init__([0, 0], [5, 5], [1, 1])
    assert len(trace) == len(trace._numbers) == 1


def circular() -> list[object]:
    meta: list[object] = []
    meta.append(meta)
    return meta


@pytest.mark.parametrize("before", [None, b"what was there"])
@pytest.mark.parametrize(
    ("meta", "error"),
    [
        ({1, 2}, TypeError),
        (circular(), ValueError),
        ("x" * (16 << 20), bfc.TraceError),
    ],
    ids=["a set", "a circle", "too long"],
)
def test_a_save_that_fails_changes_nothing(tmp_path: Path, before, meta, error):
    path = tmp_path / "one.npz"
    if before is not None:
        path.write_bytes(before)
    with pytest.raises(error):
        bfc.Trace([0], [0], [1], meta=meta).save(path)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == ([before] if before else [])


def test_a_disk_that_fills_up_changes_nothing(tmp_path: Path, monkeypatch):
    def full(file, **arrays):
        file.write(b"half of it")
        raise OSError("no space left on device")

    path = tmp_path / "one.npz"
    bfc.Trace([0], [0], [1]).save(path)
    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="no space left"):
        bfc.Trace([0, 1], [0, 0], [1, 0]).save(path)
    assert list(tmp_path.iterdir()) == [path]
    assert len(bfc.Trace.load(path)) == 1


def test_a_save_keeps_a_files_mode_and_a_links_target(tmp_path: Path):
    path, link = tmp_path / "one.npz", tmp_path / "link.npz"
    trace = bfc.Trace([0], [0], [1])
    trace.save(path)
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    path.chmod(0o640)
    link.symlink_to(path)
    trace.closed().save(link)
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert len(bfc.Trace.load(path)) == 2


def test_a_save_to_a_device_writes_to_it():
    bfc.Trace([0], [0], [1]).save(os.devnull)
    assert not Path(os.devnull).is_file()


def test_a_trace_survives_a_file(tmp_path: Path):
    trace = bfc.Trace([0, 1], [3, 3], [10, 0], stream=[2, 2], meta={"source": "a test"})
    trace.save(tmp_path / "one.npz")
    back = bfc.Trace.load(tmp_path / "one.npz")
    assert back.meta == {"source": "a test"}
    assert [back.op.tolist(), back.id.tolist(), back.size.tolist(), back.stream.tolist()] == [
        [0, 1], [3, 3], [10, 0], [2, 2],
    ]  # fmt: skip


def npz(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


def npy(array: np.ndarray, **options) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def promised(count: int, dtype: str) -> bytes:
    """The start of an array: a header for `count` numbers, and a MiB of zeros."""
    file = io.BytesIO()
    header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + bytes(1 << 20)


def bomb(path: Path, count: int, **dtypes: str) -> None:
    """A small archive whose directory and headers say that each member holds `count` numbers."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, dtype in dtypes.items():
            archive.writestr(f"{name}.npy", promised(count, dtype))
            archive.getinfo(f"{name}.npy").file_size = 128 + count * np.dtype(dtype).itemsize


def other_than_files(folder: Path) -> dict[str, Path]:
    """What a path may lead to that is no file, by what the error calls it."""
    os.mkfifo(folder / "fifo")
    os.symlink(folder / "fifo", folder / "link")
    return {
        "a FIFO": folder / "link",
        "a device": Path("/dev/null"),
        "a folder": folder,
    }


@pytest.mark.parametrize("kind", ["a FIFO", "a device", "a folder"])
@pytest.mark.parametrize("read", [bfc.Trace.load, bfc.Trace.from_torch], ids=["npz", "torch"])
def test_only_regular_files_are_read(tmp_path, kind: str, read) -> None:
    """/dev/zero was read until the host had no memory left."""
    path = other_than_files(tmp_path)[kind]
    writer = os.open(path, os.O_RDWR) if kind == "a FIFO" else None  # or a reader would hang here
    try:
        with pytest.raises(bfc.TraceError, match=f"it is {kind}, and only regular files") as error:
            read(path)
    finally:
        if writer is not None:
            os.close(writer)
    assert str(error.value).startswith(f"{path}: ")


def test_a_link_to_a_file_is_read(tmp_path) -> None:
    bfc.Trace([0], [0], [1000]).save(tmp_path / "trace.npz")
    os.symlink("trace.npz", tmp_path / "link")
    assert len(bfc.Trace.load(tmp_path / "link")) == 1


OWN = {"op": "u1", "id": "u4", "size": "u8", "stream": "u2"}
WIDE = dict.fromkeys(OWN, "i8")


@pytest.mark.parametrize(
    ("count", "dtypes", "fault"),
    [
        (2**28 + 2**20, OWN, "id unpacks to 1077936256 bytes"),
        (2**27 + 2**20, WIDE, "op unpacks to"),
        (2**30 + 2**20, dict.fromkeys(OWN, "u1"), "op unpacks to"),
        (2**28, OWN | {"op": "u4", "stream": "u4"}, "it unpacks to 5368709632 bytes"),
        (2**27, WIDE | {"meta": "u8"}, "meta unpacks to"),
    ],
)
def test_a_zip_bomb_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch, count: int, dtypes: dict[str, str], fault: str
):
    path = tmp_path / "bomb.npz"
    bomb(path, count, **dtypes)
    assert path.stat().st_size < 20_000
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *_: pytest.fail("it was unpacked"))
    tracemalloc.start()
    try:
        with pytest.raises(bfc.TraceError, match=fault):
            bfc.Trace.load(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("count", "dtypes"), [(2**28, OWN), (2**27, WIDE)])
def test_the_longest_traces_are_not_taken_for_bombs(
    tmp_path: Path, monkeypatch, count: int, dtypes
):
    path = tmp_path / "long.npz"
    bomb(path, count, **dtypes)
    opened: list[str] = []
    monkeypatch.setattr(
        files, "_array", lambda _, info, most: opened.append(info.filename) or np.zeros(0, np.uint8)
    )
    assert len(bfc.Trace.load(path)) == 0
    assert opened == [f"{name}.npy" for name in OWN]


def test_many_small_numbers_are_too_many_events(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(trace_module, "MOST_EVENTS", 3)
    path = tmp_path / "many.npz"
    path.write_bytes(npz(**dict.fromkeys(("op", "id", "size"), npy(np.zeros(4, np.uint8)))))
    with pytest.raises(bfc.TraceError, match=r"op.npy holds 4 numbers: at most 3"):
        bfc.Trace.load(path)
    with pytest.raises(bfc.TraceError, match="at most 3 events"):
        bfc.Trace([0] * 4, range(4), [1] * 4).save(path)


@pytest.mark.parametrize("dtype", ["u1", "i2", "<u4", ">u4", "i8", ">u8"])
def test_any_integer_type_is_read(tmp_path: Path, dtype: str):
    path = tmp_path / "wide.npz"
    columns = {"op": [0, 1], "id": [3, 3], "size": [100, 0], "stream": [2, 2]}
    np.savez(path, **{name: np.array(values, dtype) for name, values in columns.items()})
    trace = bfc.Trace.load(path)
    assert {name: getattr(trace, name).tolist() for name in columns} == columns
    assert trace.meta is None


GOOD = {name: npy(np.zeros(1, np.uint32)) for name in ("op", "id", "size")}
HOSTILE_HEADER = (
    b"\x93NUMPY\x01\x00"
    + struct.pack("<H", 118)
    + (b"{'descr': '<u8', 'fortran_order': False, 'shape': (99999999999999,)}".ljust(117) + b"\n")
)
HOSTILE = {
    "text": b"not an archive",
    "empty file": b"",
    "truncated": npz(**GOOD)[:-30],
    "no arrays": npz(),
    "one missing": npz(op=GOOD["op"], id=GOOD["id"]),
    "garbage inside": npz(**GOOD | {"op": b"garbage"}),
    "pickled objects": npz(**GOOD | {"op": npy(np.array([{}], dtype=object), allow_pickle=True)}),
    "a header that promises terabytes": npz(**GOOD | {"op": HOSTILE_HEADER}),
    "meta that is no JSON": npz(**GOOD | {"meta": npy(np.array("{"))}),
    "meta that is an array": npz(**GOOD | {"meta": npy(np.zeros(3))}),
    "strings for numbers": npz(**GOOD | {"op": npy(np.array(["0"]))}),
    "nonsense events": npz(**GOOD | {"op": npy(np.ones(1, np.uint8))}),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_files_are_refused_in_one_line_that_names_them(tmp_path: Path, content: bytes):
    path = tmp_path / "hostile.npz"
    path.write_bytes(content)
    with pytest.raises(bfc.TraceError) as raised:
        bfc.Trace.load(path)
    assert "hostile.npz: " in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("seed", range(60))
def test_damaged_files_are_refused_or_read(tmp_path: Path, seed: int):
    rng = random.Random(seed)
    content = bytearray(TRACES[3].read_bytes())
    for _ in range(rng.randrange(1, 20)):
        content[rng.randrange(len(content))] = rng.randrange(256)
    path = tmp_path / "damaged.npz"
    path.write_bytes(content[: rng.randrange(len(content))] if seed % 3 == 0 else content)
    refusal: str | None = None
    try:
        bfc.Trace.load(path).replay(allocator())
    except bfc.TraceError as error:
        refusal = str(error)
    if refusal is not None:
        assert "damaged.npz: " in refusal
        assert "\n" not in refusal
