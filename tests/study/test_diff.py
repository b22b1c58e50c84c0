"""`bfc.diff` against a recount of every event, one by one."""

from __future__ import annotations

import json
import pickle
import random
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given

import bfc
import bfc.testing
from bfc.pytorch.owners import is_the_users
from bfc_tools.study.file_formats import read
from bfc_tools.study.growth import KINDS, signed

MIB = 1 << 20
RUNS = Path(__file__).parents[2] / "bench" / "traces"
FRAMES = [
    ("/home/me/train.py", 7, "main"),
    ("/usr/lib/python3.11/site-packages/torch/nn/modules/linear.py", 9, "forward"),
    ("/home/me/model.py", 12, "forward"),
    ("??", 0, "torch::unwind::unwind()"),
    ("??", 0, "torch::autograd::generated::BmmBackward0::apply()"),
]
STACKS = [(0, 0), (0, 0), (1, 1), (1, 2), (3, 1), (4, 3), (0, 3), (6, 1), (0, 4), (8, 3), (1, 4)]
OWNERS = ["", "weights", "kv cache", "weights"]


def lived_through(trace: bfc.Trace) -> list[dict[int, int]]:
    """After each event, the events that allocated what is live, by the allocation's number."""
    live: dict[int, int] = {}
    after = []
    for event, (op, number) in enumerate(zip(trace.op.tolist(), trace.id.tolist(), strict=True)):
        if op == 0:
            live[number] = event
        elif op == 1:
            del live[number]
        after.append(dict(live))
    return after


def line_of(trace: bfc.Trace, event: int) -> str:
    frames = trace.frames_of(event)
    best = [
        *(frame for frame in frames if is_the_users(frame.filename)),
        *(frame for frame in frames if frame.filename.endswith(".py")),
        *(frame for frame in frames if frame.name.startswith("torch::autograd::generated::")),
        *frames,
    ]
    if not best:
        return ""
    file, line, name = best[0]
    return f"{file}:{line} in {name}" if line else name


def recount(trace: bfc.Trace, at_peak: bool) -> dict[str, dict[str, tuple[int, int]]]:
    """Bytes and allocations by owner, line and size."""
    after = lived_through(trace) or [{}]
    sums = [sum(int(trace.size[event]) for event in live.values()) for live in after]
    live = after[sums.index(max(sums)) if at_peak else -1]
    found = {kind: defaultdict(lambda: (0, 0)) for kind in KINDS}
    for event in live.values():
        size = int(trace.size[event])
        owner = "" if trace.owner is None else trace.owners[int(trace.owner[event])]
        names = {"owner": owner, "line": line_of(trace, event), "size": str(size)}
        for kind, name in names.items():
            held, count = found[kind][name]
            found[kind][name] = held + size, count + 1
    return found


def check(a: bfc.Trace, b: bfc.Trace) -> bfc.Diff:
    """All that a diff says, against the recount."""
    found = bfc.diff(a, b)
    for moment, at_peak in ((found.peak, True), (found.end, False)):
        first, second = recount(a, at_peak), recount(b, at_peak)
        for kind in KINDS:
            parts = {part.name: part for part in moment.parts(kind)}
            assert set(parts) == set(first[kind]) | set(second[kind])
            assert len(parts) == len(moment.parts(kind))
            for name, part in parts.items():
                assert (part.bytes_a, part.count_a) == first[kind][name]
                assert (part.bytes_b, part.count_b) == second[kind][name]
            total = moment.total
            for field in ("bytes_a", "bytes_b", "count_a", "count_b", "bytes", "count"):
                assert getattr(total, field) == sum(getattr(it, field) for it in parts.values())
            growths = [part.bytes for part in moment.parts(kind)]
            assert growths == sorted(growths, reverse=True)
    assert bfc.diff(b, a).peak == -found.peak
    assert bfc.diff(b, a).end == -found.end
    return found


def random_trace(seed: int, *, owners: bool = True, stacks: bool = True) -> bfc.Trace:
    rng = random.Random(seed)
    op, number, size, live = [], [], [], []
    for _ in range(rng.randrange(200)):
        choice = rng.random()
        if choice < 0.05:
            event = 2, 0, 0
        elif live and choice < 0.45:
            event = 1, live.pop(rng.randrange(len(live))), rng.randrange(9)
        else:
            free = next(it for it in range(300) if it not in live)
            live.append(free)
            event = 0, free, rng.choice([0, 256, 512, 4096, rng.randrange(1 << 40)])
        for values, value in zip((op, number, size), event, strict=True):
            values.append(value)
    extra = {}
    if owners:
        extra |= {"owner": rng.choices(range(len(OWNERS)), k=len(op)), "owners": OWNERS}
    if stacks:
        extra |= {"stack": rng.choices(range(len(STACKS)), k=len(op))}
        extra |= {"frames": FRAMES, "stacks": STACKS}
    return bfc.Trace(op, number, size, **extra)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(40))
def test_a_diff_is_what_a_recount_finds(seed: int) -> None:
    plain = {"owners": seed % 4 != 1, "stacks": seed % 4 != 2}
    check(random_trace(seed, **plain), random_trace(seed + 1000))


@pytest.mark.long
@given(bfc.testing.traces(releases=True), bfc.testing.traces())
def test_any_two_traces_compare(a: bfc.Trace, b: bfc.Trace) -> None:
    check(a, b)


def test_an_iteration_is_compared_with_another() -> None:
    """Each keeps a block more than the one before."""
    ops, ids, sizes, marks = [], [], [], []
    for number in range(4):
        marks.append([len(ops), "train"])
        ops += [0, 0, 1]
        ids += [2 * number, 2 * number + 1, 2 * number]
        sizes += [1000, 10 + number, 0]
    trace = bfc.Trace(ops, ids, sizes, meta={"marks": marks})
    found = bfc.diff(trace, trace, iterations=(1, -1))
    assert (found.name_a, found.name_b) == ("a, iteration 1", "b, iteration -1")
    assert (found.peak.event_a, found.peak.event_b) == (4, 10)
    assert (found.end.total.bytes_a, found.end.total.bytes_b) == (21, 46)
    for wrong, of in ((4, trace), (0, bfc.Trace([0], [0], [10]))):
        with pytest.raises(ValueError, match="iteration"):
            bfc.diff(of, of, iterations=(0, wrong))


def test_nothing_differs_from_itself() -> None:
    trace = random_trace(3)
    found = check(trace, trace)
    assert (found.peak, found.end) == (-found.peak, -found.end)
    assert found.peak.total.bytes == 0
    assert "at the peak: nothing changed" in str(found)


def test_an_empty_run_holds_nothing() -> None:
    found = check(bfc.Trace([], [], []), bfc.Trace([0], [0], [512]))
    assert (found.peak.event_a, found.peak.event_b) == (-1, 0)
    assert str(found).splitlines()[0] == "peak, live bytes: 0 B -> 512 B, +512 B"


def test_the_peak_is_the_first_of_equals() -> None:
    trace = bfc.Trace([0, 1, 0], [0, 0, 1], [512, 0, 512])
    assert bfc.diff(trace, trace).peak.event_a == 0


def test_what_rebuilds_a_start_is_no_peak() -> None:
    """`Trace.from_torch` allocates the gaps of the first segments, too, and frees them."""
    op, number = [0, 0, 1, 0, 1], [0, 1, 1, 2, 2]
    size = [3 * MIB, 9 * MIB, 0, MIB, 0]
    recorded = {"torch": {"first_recorded_event": 3}}
    found = bfc.diff(bfc.Trace(op, number, size), bfc.Trace(op, number, size, meta=recorded))
    assert (found.peak.total.bytes_a, found.peak.total.bytes_b) == (12 * MIB, 4 * MIB)
    assert (found.peak.event_a, found.peak.event_b) == (1, 3)
    for wrong in (None, "x", -1, 6, 1 << 70, True, [3]):
        meta = {"torch": {"first_recorded_event": wrong}}
        again = bfc.diff(bfc.Trace(op, number, size, meta=meta), bfc.Trace([], [], []))
        assert again.peak.event_a == 1
    state = {"torch": {"first_recorded_event": 3}}
    only = bfc.Trace(op[:3], number[:3], size[:3], meta=state)
    assert bfc.diff(only, only).peak.total.bytes_a == 3 * MIB


def test_sums_beyond_64_bits_are_exact() -> None:
    size = (1 << 63) - 1
    a = bfc.Trace([0] * 5, range(5), [size, size - 1, size, 0, 7])
    found = check(a, bfc.Trace([0] * 3 + [1], [0, 1, 2, 0], [size, 3, 5, 0]))
    assert found.peak.total.bytes_a == 3 * size + 6
    assert found.peak.event_b == 2


def test_an_owner_in_one_run_only() -> None:
    a = bfc.Trace([0, 0], [0, 1], [MIB, 512], owner=[0, 1], owners=["weights", "old"])
    b = bfc.Trace([0, 0], [0, 1], [MIB, 2 * MIB], owner=[0, 1], owners=["weights", "new"])
    found = check(a, b)
    assert [(part.name, part.bytes) for part in found.peak.by_owner] == [
        ("new", 2 * MIB),
        ("weights", 0),
        ("old", -512),
    ]
    text = str(found)
    assert "  old" in text
    assert "weights" not in text


def test_two_owners_of_one_name_count_together() -> None:
    trace = bfc.Trace([0, 0], [0, 1], [512, 1024], owner=[0, 1], owners=["same", "same"])
    (part,) = check(trace, trace).peak.by_owner
    assert (part.bytes_a, part.count_a) == (1536, 2)


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        (2, "/home/me/train.py:7 in main"),
        (5, "/home/me/model.py:12 in forward"),
        (6, "torch::unwind::unwind()"),
        (9, "torch::autograd::generated::BmmBackward0::apply()"),
        (10, "/home/me/train.py:7 in main"),
        (7, f"{FRAMES[1][0]}:9 in forward"),
        (0, ""),
    ],
)
def test_a_line_is_the_users_innermost(stack: int, line: str) -> None:
    trace = bfc.Trace([0], [0], [512], stack=[stack], frames=FRAMES, stacks=STACKS)
    (part,) = bfc.diff(trace, trace).peak.by_line
    assert part.name == line == line_of(trace, 0)


@pytest.mark.long
def test_a_stack_of_a_million_frames_takes_no_time() -> None:
    deep = 1_000_000
    stacks = [(0, 0), *((at, 3) for at in range(deep))]
    trace = bfc.Trace([0], [0], [512], stack=[deep], frames=FRAMES, stacks=stacks)
    (part,) = bfc.diff(trace, trace).peak.by_line
    assert part.name == "torch::unwind::unwind()"


def in_folder(folder: str, sizes: dict[str, int]) -> bfc.Trace:
    """An allocation by each file, below a folder."""
    count = len(sizes)
    frames = [(f"{folder}/{name}", 7, "f") for name in sizes]
    stacks = [(0, 0), *((0, at) for at in range(count))]
    return bfc.Trace(
        [0] * count,
        range(count),
        list(sizes.values()),
        stack=range(1, count + 1),
        frames=frames,
        stacks=stacks,
    )


def test_two_checkouts_have_the_same_lines() -> None:
    sizes = {"train.py": 512, "model/__init__.py": 1024, "data/__init__.py": 256}
    a = in_folder("/home/me/project", sizes)
    b = in_folder("/tmp/ray/session_7/project", sizes | {"model/__init__.py": 4096})
    found = bfc.diff(a, b)
    assert [(part.name, part.bytes) for part in found.peak.by_line] == [
        (".../project/model/__init__.py:7 in f", 3072),
        (".../project/data/__init__.py:7 in f", 0),
        (".../project/train.py:7 in f", 0),
    ]
    assert bfc.diff(b, a).peak == -found.peak


def test_a_path_that_is_relative_in_one_run() -> None:
    trace = bfc.Trace([0], [0], [8], stack=[1], frames=[("run.py", 7, "f")], stacks=[(0, 0)] * 2)
    (part,) = bfc.diff(trace, in_folder("/a", {"run.py": 9})).peak.by_line
    assert (part.name, part.bytes) == (".../run.py:7 in f", 1)


def test_files_that_may_be_several_are_not_guessed() -> None:
    a = in_folder("/a", {"x/run.py": 512})
    b = in_folder("/b", {"y/run.py": 512, "z/run.py": 256})
    names = {part.name.partition(":")[0] for part in bfc.diff(a, b).peak.by_line}
    assert names == {"/a/x/run.py", "/b/y/run.py", "/b/z/run.py"}


def test_a_file_in_both_runs_keeps_its_name() -> None:
    a = in_folder("", {"a/run.py": 512, "b/run.py": 256})
    b = in_folder("", {"a/run.py": 512})
    names = {part.name.partition(":")[0] for part in bfc.diff(a, b).peak.by_line}
    assert names == {"/a/run.py", "/b/run.py"}


def test_thousands_of_files_of_one_name_take_no_time() -> None:
    pair = [in_folder(top, {f"{at}/run.py": 512 for at in range(5000)}) for top in ("/a", "/b")]
    assert len(bfc.diff(*pair).peak.by_line) == 10_000


def test_what_cannot_be_compared_is_said() -> None:
    found = bfc.diff(bfc.Trace([0], [0], [512]), random_trace(5))
    assert found.remarks == ("a: it has no stacks, so no lines", "a: it names no owners")
    assert "a: it names no owners" in str(found)


def test_names_cannot_write_to_the_terminal() -> None:
    bad = "\x1b[2J\nkv"
    trace = bfc.Trace([0], [0], [512], owner=[0], owners=[bad])
    text = str(bfc.diff(bfc.Trace([], [], []), trace))
    assert "\x1b" not in text
    assert "\\x1b[2J\\nkv" in text


def test_a_table_says_what_it_leaves_out() -> None:
    sizes = [256 * (at + 1) for at in range(30)]
    found = bfc.diff(bfc.Trace([], [], []), bfc.Trace([0] * 30, range(30), sizes))
    lines = found.text(most=10).splitlines()
    assert f"  and 20 more, {signed(sum(sizes[:20]))} together" in lines
    assert sum(line.endswith("0 -> 1") for line in lines) == 20  # at the peak, and at the end


def test_small_changes_of_large_sums_are_exact() -> None:
    a, b = (bfc.Trace([0], [0], [(1 << 34) + more]) for more in (0, 1))
    first = str(bfc.diff(a, b)).splitlines()[0]
    assert first == "peak, live bytes: 17179869184 B -> 17179869185 B, +1 B (+0.0%)"


def test_a_notebook_shows_the_peaks() -> None:
    name = "<script>alert(1)</script>"
    trace = bfc.Trace([0], [0], [3 << 20], owner=[0], owners=[name])
    html = bfc.diff(bfc.Trace([], [], []), trace)._repr_html_()
    assert "peak of live bytes: 0 B -&gt; 3.00 MiB, +3.00 MiB" in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "<script>" not in html
    assert html.count("<table>") == 2  # no lines are known


@pytest.mark.parametrize("seed", range(60))
def test_a_changed_file_compares_or_is_named_in_one_line(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / f"run.{rng.choice(['npz', 'csv', 'pickle'])}"
    if path.suffix == ".pickle":
        allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("64 MiB"))
        allocator.record_history()
        allocator.deallocate_raw(allocator.allocate_raw(MIB))
        allocator.dump(path)
    elif path.suffix == ".csv":
        random_trace(seed).log_csv(path)
    else:
        random_trace(seed).save(path)
    content = bytearray(path.read_bytes())
    if rng.random() < 0.3:
        del content[rng.randrange(len(content)) :]
    for _ in range(rng.randrange(1, 20)):
        if content:
            content[rng.randrange(len(content))] = rng.randrange(256)
    path.write_bytes(content)
    fault = str(path)
    try:
        trace = read(path, frames=True)
        check(trace, trace)
    except bfc.TraceError as error:
        fault = str(error)
    assert str(path) in fault
    assert len(fault.splitlines()) == 1


def test_json_is_the_value() -> None:
    found = bfc.diff(random_trace(1), random_trace(2))
    value = json.loads(found.to_json())
    assert (
        value["peak"]["growth"] == found.peak.total.bytes == value["peak"]["b"] - value["peak"]["a"]
    )
    for kind in KINDS:
        rows = value["end"][f"by_{kind}"]
        assert [row["growth"] for row in rows] == [part.bytes for part in found.end.parts(kind)]
    cut = found.as_dict(most=3)["peak"]
    assert len(cut["by_size"]) == 3
    assert cut["left_out"]["size"] == len(found.peak.by_size) - 3
    kept = {abs(row["growth"]) for row in cut["by_size"]}
    assert min(kept) >= sorted((abs(part.bytes) for part in found.peak.by_size), reverse=True)[2]


def test_recorded_runs_compare() -> None:
    paths = RUNS / "gpu_decomfl.npz", RUNS / "unet_buckets.npz"
    found = bfc.diff(*paths)
    a, b = map(bfc.Trace.load, paths)
    closed = [
        trace.replay(bfc.CachingAllocator(bfc.SimulatedSubAllocator("80 GiB"))) for trace in (a, b)
    ]
    assert found.peak.total.bytes_a == closed[0].peak_bytes_live
    assert found.peak.total.bytes_b == closed[1].peak_bytes_live
    assert found.peak.event_a == a.fullest_event()
    assert (found.name_a, found.name_b) == tuple(map(str, paths))
    assert len(str(found)) < 8000


def test_allocators_compare_by_what_is_live() -> None:
    with (
        bfc.BFCAllocator(bfc.SimulatedSubAllocator("64 MiB")) as a,
        bfc.BFCAllocator(bfc.SimulatedSubAllocator("64 MiB")) as b,
    ):
        for allocator, count in ((a, 1), (b, 3)):
            with bfc.owner("kv cache"):
                kept = [allocator.allocate_raw(1000) for _ in range(count)]
            allocator.deallocate_raw(allocator.allocate_raw(MIB))
        found = bfc.diff(a, b)
        assert [(part.name, part.bytes_a, part.bytes_b) for part in found.end.by_owner] == [
            ("kv cache", 1000, 3000)
        ]
        assert found.peak.total == found.end.total
        b.deallocate_raw(kept[0])
        assert bfc.diff(a.snapshot(), b).end.total.bytes == 1000


def test_allocators_with_a_history_compare_by_it() -> None:
    made = []
    for count in (1, 2):
        allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("64 MiB"))
        allocator.record_history()
        with bfc.owner("batch"):
            ptrs = [allocator.allocate_raw(3 * MIB) for _ in range(count)]
        for ptr in ptrs:
            allocator.deallocate_raw(ptr)
        made.append(allocator)
    found = bfc.diff(*made)
    assert (found.peak.total.bytes_a, found.peak.total.bytes_b) == (3 * MIB, 6 * MIB)
    assert found.end.total.bytes_b == 0
    (part,) = found.peak.by_owner
    assert part.name == "batch"
    (line,) = found.peak.by_line
    assert line.name.startswith(f"{__file__}:")


def test_files_of_every_kind_compare(tmp_path: Path) -> None:
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("64 MiB"))
    allocator.record_history()
    with bfc.owner("weights"):
        allocator.allocate_raw(3 * MIB)
    pickled, log, npz = (tmp_path / f"run.{ending}" for ending in ("pickle", "csv", "npz"))
    allocator.snapshot().dump(pickled)
    trace = bfc.Trace.from_torch(pickled)
    trace.log_csv(log)
    trace.save(npz)
    for path in (pickled, log, npz):
        found = bfc.diff(path, str(npz))
        assert found.end.total.bytes == 0
        assert found.end.total.bytes_b == 3 * MIB
        assert [part.name for part in found.end.by_owner] == ["weights"]
    assert bfc.diff(pickled, npz).end.by_line[0].name.startswith(f"{__file__}:")


@pytest.mark.parametrize("ending", ["npz", "pickle", "csv"])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x04cos\nsystem\n", b"a,b\n1,2\n"])
def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, ending: str, content: bytes) -> None:
    bad = tmp_path / f"bad.{ending}"
    bad.write_bytes(content)
    good = RUNS / "gpu_decomfl.npz"
    for pair in ((bad, good), (good, bad)):
        with pytest.raises(bfc.TraceError) as raised:
            bfc.diff(*pair)
        assert str(bad) in str(raised.value)
        assert "\n" not in str(raised.value)


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    whole = (RUNS / "gpu_decomfl.npz").read_bytes()
    cut = tmp_path / "cut.npz"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(bfc.TraceError, match=r"cut\.npz: "):
        bfc.diff(cut, cut)
    state = tmp_path / "state.pickle"
    state.write_bytes(pickle.dumps({"segments": 3, "device_traces": []}, protocol=4)[:-4])
    with pytest.raises(bfc.TraceError, match=r"state\.pickle: "):
        bfc.diff(state, state)


def test_what_is_no_run_is_refused() -> None:
    with pytest.raises(TypeError, match="a run is a Trace, a path, an Allocator or a Snapshot"):
        bfc.diff(7, 8)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        bfc.diff("no such file", "no such file")


def test_memory_that_waits_for_a_stream_is_live() -> None:
    device = bfc.SimulatedSubAllocator("1 GiB")
    with (
        bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")) as empty,
        bfc.CachingAllocator(device) as allocator,
    ):
        ptr = allocator.allocate_raw(7 << 20)
        device.hold(5)
        allocator.record_stream(ptr, 5)
        allocator.deallocate_raw(ptr)
        assert bfc.diff(empty, allocator).end.total.bytes == 7 << 20
        device.finish(5)


def test_a_stack_of_one_frame_has_its_line() -> None:
    """Without a history, as with one."""
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")) as allocator:
        before = allocator.snapshot()
        allocator.record_history()
        names = {"allocate": allocator.allocate_raw}
        exec(compile("ptr = allocate(3 << 20)", "/home/me/train.py", "exec"), names)
        snapshots = allocator.snapshot(), allocator.snapshot(history=False)
        with_history, without = (bfc.diff(before, snapshot) for snapshot in snapshots)
        (line,) = without.end.by_line
        assert (line.bytes, [line.name]) == (
            3 << 20,
            [growth.name for growth in with_history.end.by_line],
        )


def test_a_device_is_chosen_of_the_file_that_has_several(tmp_path: Path) -> None:
    path = tmp_path / "two.pickle"
    block = {"size": 2 << 20, "requested_size": 1 << 20, "state": "active_allocated"}
    segments = [
        {"address": 1 << 40, "total_size": 2 << 20, "device": device, "blocks": [block]}
        for device in (0, 1, -1)  # -1: the host
    ]
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [[], []]}, protocol=4))
    one = RUNS / "gpu_decomfl.npz"
    with pytest.raises(bfc.TraceError, match=r"holds the devices 0 and 1|holds the devices \[0, 1"):
        bfc.diff(one, path)
    assert bfc.diff(one, path, device=1).end.total.bytes_b == 1 << 20
    with pytest.raises(ValueError, match="no devices to choose"):
        bfc.diff(one, one, device=1)
    with pytest.raises(bfc.TraceError, match="nothing of device -1"):
        bfc.diff(one, path, device=-1)


def test_odd_facts_about_segments_are_no_facts(tmp_path: Path) -> None:
    odd: list[object] = [[], 0, 0, 0, 0]
    meta = {"torch": {"segments": [], "segment_events": [odd]}}
    path = tmp_path / "odd.npz"
    bfc.Trace([0], [0], [512], meta=meta).save(path)
    assert bfc.diff(path, path).end.total.bytes == 0
