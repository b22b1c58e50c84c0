"""`bfc replay --policy`, and PyTorch's snapshots as traces: which allocator each row is about, and
what is said where a policy, a setting or a snapshot is wrong."""

from __future__ import annotations

import json
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from torch_recorder import Recorder, random_places, random_run

import bfc
from bfc_tools.cli import main, replay

TRACES = Path(__file__).parents[2] / "bench" / "traces"
SMALL = str(TRACES / "gpu_lm_small.npz")
THREE_STREAMS = TRACES / "llama7b_zero3_lro.npz"
MIB = 1 << 20


@pytest.fixture
def five(tmp_path: Path) -> str:
    """A trace of one allocation, of 5 MiB, in three runs of one stream each."""
    path = tmp_path / "five.npz"
    bfc.Trace([0, 1] * 3, [0] * 6, [5 * MIB, 0] * 3, [0, 0, 1, 1, 2, 2]).save(path)
    return str(path)


def rows(
    capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0
) -> list[dict[str, Any]]:
    """The rows of the JSON, on 1 GiB where no other device is given."""
    words = ["--json", "--passes", "1", "--device", "simulated:1GiB", *arguments]
    assert main(["replay", *words]) == code
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["traces"]
    return found


def test_each_policy_takes_what_is_its_own(capsys, five):
    asked = [
        "bfc",
        "caching",
        "caching:large_segment_size_mb:64",
        "caching:roundup_power2_divisions:1",
        "caching:roundup_power2_divisions:2",
    ]
    words = [word for policy in asked for word in ("--policy", policy)]
    found = rows(capsys, five, *words)
    assert [row["policy"] for row in found] == asked
    assert {row["peak_bytes_live"] for row in found} == {5 * MIB}
    # All of the device at once; a large segment for each stream; the same, but larger.
    assert [row["peak_bytes_reserved"] // MIB for row in found] == [1024, 60, 192, 60, 60]
    assert [row["regions_taken"] for row in found] == [1, 3, 3, 3, 3]
    # Between 4 and 8 MiB two divisions leave 6 alone; one is none.
    assert [row["peak_bytes_in_use"] // MIB for row in found] == [5, 5, 5, 5, 6]


EXPANDABLE = "caching:expandable_segments:True"


def test_expandable_segments_complete_where_the_default_refuses(capsys):
    """The run uses 32.0 GiB."""
    words = ["--policy", "caching", "--policy", EXPANDABLE, "--device", "simulated:34GiB"]
    trace = str(TRACES / "gpt2s_varlen.npz")
    plain, mapped = rows(capsys, trace, *words, "--strict", "--no-picture", code=1)
    assert (plain["refused"], mapped["refused"]) == (1, 0)
    assert mapped["regions_taken"] == 0 < plain["regions_taken"]
    assert set(plain["driver_calls_by_kind"]) == {"alloc", "free"}
    assert set(mapped["driver_calls_by_kind"]) == {"reserve", "create", "map", "access"}
    for row in (plain, mapped):
        assert sum(row["driver_calls_by_kind"].values()) == row["driver_calls"]


STITCHED = "bfc:virtual_memory"


def test_stitching_completes_where_expandable_segments_refuse(capsys):
    """The run uses 10.75 GiB at most."""
    trace = str(THREE_STREAMS)
    asked = ["caching", EXPANDABLE, f"{STITCHED}, page_size = 2 MiB"]
    words = [word for policy in asked for word in ("--policy", policy)]
    words += ["--device", "simulated:10.85GiB", "--strict", "--no-picture"]
    plain, mapped, stitched = rows(capsys, trace, *words, code=1)
    assert plain["refused"] > 0
    assert mapped["refused"] > 0
    assert stitched["policy"] == f"{STITCHED},page_size=2MiB"
    assert (stitched["refused"], stitched["regions_taken"]) == (0, 0)
    calls = stitched["driver_calls_by_kind"]
    assert calls["create"] * 2 * MIB == stitched["peak_bytes_reserved"]
    assert calls["map"] > calls["create"]  # some pages have two addresses


def test_the_options_of_virtual_memory(capsys, five):
    """One allocation of 5 MiB on each of three streams, one after the other."""
    asked = [STITCHED, f"{STITCHED},page_size=4MiB", f"{STITCHED},headroom=0.5,page_size=1GiB"]
    words = [word for policy in asked for word in ("--policy", policy)]
    found = rows(capsys, five, *words, "--memory-limit", "1 GiB")
    assert [row["policy"] for row in found] == asked
    assert [row["peak_bytes_reserved"] // MIB for row in found] == [18, 24, 1024]
    assert {row["peak_bytes_in_use"] for row in found} == {5 * MIB}
    (tight,) = rows(capsys, five, "--policy", STITCHED, "--memory-limit", "6 MiB")
    assert (tight["refused"], tight["peak_bytes_reserved"]) == (0, 6 * MIB)


def test_pytorch_s_policy_that_stitches(capsys, five):
    """Commas within a setting are its own. Two divisions round 5 MiB up to 6."""
    settings = "roundup_power2_divisions:[256:2,512:4,>:8]"
    asked = [
        "caching:stitch",
        "caching:stitch,page_size=4MiB",
        f"caching:stitch,{settings}",
        f"caching:stitch,page_size=4MiB,{settings}",
    ]
    words = [word for policy in asked for word in ("--policy", policy)]
    found = rows(capsys, five, *words, "--policy", "caching", "--strict")
    assert [row["policy"] for row in found[:-1]] == asked
    assert [row["peak_bytes_reserved"] // MIB for row in found] == [18, 24, 18, 24, 60]
    assert [row["peak_bytes_in_use"] // MIB for row in found] == [5, 5, 6, 6, 5]
    assert [row["regions_taken"] for row in found] == [0, 0, 0, 0, 3]


def test_pytorch_s_policy_stitches_where_it_would_refuse(capsys):
    """The run uses 10.75 GiB at most."""
    words = ["--policy", "caching", "--policy", "caching:stitch,page_size=2MiB"]
    words += ["--device", "simulated:10.85GiB", "--no-picture"]
    plain, stitched = rows(capsys, str(THREE_STREAMS), *words, code=1)
    assert (plain["refused"] > 0, stitched["refused"]) == (True, 0)
    assert stitched["driver_calls_by_kind"]["create"] * 2 * MIB == stitched["peak_bytes_reserved"]


def test_what_is_for_the_originals_is_not_for_virtual_memory_beside_them(capsys, five):
    words = ["--policy", "bfc", "--policy", STITCHED, "--strict", "--allow-growth"]
    grown, stitched = rows(capsys, five, *words)
    assert [row["peak_bytes_reserved"] // MIB for row in (grown, stitched)] == [8, 18]


def test_headroom_saves_calls(capsys):
    words = ["--policy", STITCHED, "--policy", f"{STITCHED},headroom=0.05", "--no-picture"]
    trace = str(TRACES / "llm_decode_kv.npz")
    tight, roomy = rows(capsys, trace, *words, "--device", "simulated:8GiB")
    assert tight["peak_bytes_reserved"] < roomy["peak_bytes_reserved"]
    assert tight["driver_calls"] > roomy["driver_calls"]


def test_expandable_segments_of_host_memory(capsys):
    words = ["--policy", EXPANDABLE, "--device", "host:4GiB", "--no-picture"]
    (row,) = rows(capsys, SMALL, *words)
    by_kind = row["driver_calls_by_kind"]
    assert (row["refused"], row["regions_taken"]) == (0, 0)
    assert by_kind["create"] == by_kind["map"] >= by_kind["access"] > 1


def test_growth_is_for_bfc_beside_caching_too(capsys, five):
    bare, beside = (
        rows(capsys, five, "--allow-growth", *words)
        for words in ([], ["--policy", "caching", "--policy", "bfc"])
    )
    assert [row["peak_bytes_reserved"] // MIB for row in bare] == [8]
    assert [row["peak_bytes_reserved"] // MIB for row in beside] == [60, 8]


def test_a_limit_and_strict_are_for_every_policy(capsys, five):
    both = ("--policy", "bfc", "--policy", "caching")
    found = rows(capsys, five, *both, "--memory-limit", "32 MiB")
    # The caching policy gives the first stream's segment back for the second stream's.
    assert [row["peak_bytes_reserved"] // MIB for row in found] == [32, 20]
    assert [row["regions_taken"] for row in found] == [1, 3]
    found = rows(capsys, five, *both, "--memory-limit", "4 MiB", code=1)
    assert [row["refused"] for row in found] == [3, 3]
    tiny = ("--policy", "caching:per_process_memory_fraction:0.002")
    assert rows(capsys, five, *tiny, code=1)[0]["refused"] == 3
    assert rows(capsys, five, *tiny, "--memory-limit", "0.5")[0]["refused"] == 0
    # PyTorch reads a number as far as it goes; by itself bfc does not.
    sloppy = (five, "--policy", "caching:large_segment_size_mb:64abc")
    assert rows(capsys, *sloppy, "--strict")[0]["peak_bytes_reserved"] == 192 * MIB
    assert main(["replay", *sloppy]) == 2


def test_one_refusal_of_one_policy_is_exit_code_1(capsys, five):
    both = ("--policy", "bfc", "--policy", "caching")
    found = rows(capsys, five, *both, "--memory-limit", "6 MiB", code=1)
    assert [row["refused"] for row in found] == [0, 3]


def test_the_table_names_the_policies_and_each_picture_its_own(capsys, five):
    policies = ["bfc", "caching: max_split_size_mb : 40", "caching"]
    words = [word for policy in policies for word in ("--policy", policy)]
    assert main(["replay", five, SMALL, *words, "--device", "simulated:4GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("five: PyTorch 2.15, the newest: ")
    assert lines[1].startswith("gpu_lm_small: PyTorch 2.1")
    lines = lines[2:]
    pictures, headings, table = lines[:-7], lines[-7], lines[-6:]
    assert headings.split()[-1] == "policy"
    names = ["bfc", "caching:max_split_size_mb:40", "caching"]
    assert [(row.split()[0], row.split()[-1]) for row in table] == [
        (trace, policy) for trace in ("five", "gpu_lm_small") for policy in names
    ]
    assert [line for line in pictures if line.endswith(", when most is live")] == [
        f"{trace} under {policy}, when most is live"
        for trace in ("five", "gpu_lm_small")
        for policy in names
    ]
    bfcs, cachings = (pictures[at + 1] for at in (0, pictures.index("") + 1))
    assert bfcs.endswith("4.00 GiB reserved, limit 4.00 GiB")
    assert cachings.endswith("20.00 MiB reserved, limit 4.00 GiB")


def test_a_policy_that_nobody_asked_for_has_no_column(capsys, five):
    assert main(["replay", five, "--no-picture"]) == 0
    assert "policy" not in capsys.readouterr().out
    assert main(["replay", five, "--no-picture", "--policy", "caching"]) == 0
    version, headings, row = capsys.readouterr().out.splitlines()
    assert version.startswith("PyTorch 2.15, the newest: ")
    assert (headings.split()[-1], row.split()[-1]) == ("policy", "caching")


def test_a_version_that_is_asked_for_is_that_of_the_policy(capsys, five):
    assert main(["replay", five, "--no-picture", "--torch", "2.11"]) == 0
    assert capsys.readouterr().out.startswith("PyTorch 2.11, as asked for\n")
    later = ("--policy", "caching:expandable_segments_reserve:0.5")
    assert main(["replay", five, *later]) == 0
    assert main(["replay", five, *later, "--torch", "2.11"]) == 2
    assert "PyTorch 2.15 and later have it, PyTorch 2.11 does not" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["replay", five, "--torch", "2.14"])
    assert [row["policy"] for row in rows(capsys, five)] == ["bfc"]


def test_a_policy_asked_for_twice_has_two_rows_of_equal_figures(capsys):
    words = ["--policy", "caching", "--policy", "caching"]
    one, two = rows(capsys, SMALL, *words, "--device", "simulated:4GiB")
    for row in (one, two):
        del row["ns_per_event"]
    assert one == two
    assert one["policy"] == "caching"


def test_streams_have_pools_of_their_own_under_caching(capsys, tmp_path):
    trace = bfc.Trace.load(THREE_STREAMS)
    one_stream = tmp_path / "one_stream.npz"
    bfc.Trace(trace.op, trace.id, trace.size).save(one_stream)
    paths = [str(THREE_STREAMS), str(one_stream)]
    words = ["--policy", "caching", "--policy", "bfc", "--json", "--passes", "1"]
    assert main(["replay", *paths, *words, "--no-picture"]) == 0
    apart, bfc_apart, together, bfc_together = json.loads(capsys.readouterr().out)["traces"]
    assert apart["peak_bytes_reserved"] > together["peak_bytes_reserved"]
    assert bfc_apart["peak_bytes_in_use"] == bfc_together["peak_bytes_in_use"]


def test_regions_are_counted_on_host_memory_too(capsys, five):
    words = ["--policy", "caching", "--device", "host:1GiB", "--json", "--passes", "1"]
    assert main(["replay", five, *words]) == 0
    (row,) = json.loads(capsys.readouterr().out)["traces"]
    assert (row["regions_taken"], row["peak_bytes_reserved"]) == (3, 60 * MIB)


def test_the_bar_says_which_policy_it_is_about(monkeypatch, five):
    made: list[tuple[str, int]] = []

    def no_bar(*, desc: str, total: int, **options: object) -> None:
        made.append((desc, total))

    monkeypatch.setattr(replay, "bar", no_bar)
    monkeypatch.setattr(replay, "LONG_TRACE", 1)
    words = ["--policy", "bfc", "--policy", "caching", "--passes", "2", "--no-picture"]
    assert main(["replay", five, *words]) == 0
    assert made == [("five under bfc", 18), ("five under caching", 18)]


MINE = """
from bfc.study import PythonPolicy
class Each(PythonPolicy):
    def allocate(self, size, stream):
        region = self.take(size)
        return region and region[0]
    def free(self, address):
        self.give_back(address)
class Greedy(Each):
    def free(self, address):
        pass
    def allocate(self, size, stream):
        return list(self.regions)[0] if self.regions else super().allocate(size, stream)
class NoOptions(Each):
    def __init__(self, source):
        super().__init__(source)
number = 7
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with policies in the current folder."""
    (tmp_path / "of_mine_alone.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "of_mine_alone", raising=False)
    return "of_mine_alone"


def test_a_policy_of_the_user_s_own(capsys, five, mine, tmp_path):
    asked = ["--policy", "caching", "--policy", f"{mine}:Each"]
    caching, each = rows(capsys, five, *asked)
    assert each["policy"] == f"{mine}:Each"
    assert (each["peak_bytes_reserved"], each["regions_taken"]) == (5 * MIB, 3)
    assert each["driver_calls_by_kind"] == {"alloc": 3, "free": 3}
    assert caching.keys() == each.keys()
    (limited,) = rows(capsys, five, *asked[2:], "--memory-limit", "4MiB", code=1)
    assert limited["refused"] == 3
    page = tmp_path / "report.html"
    assert main(["report", five, "-o", str(page), *asked]) == 0
    assert f"{mine}:Each" in page.read_text()


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("Nothing", [], "of_mine_alone cannot be imported so (AttributeError: module 'of_mine_al"),
        ("number", [], "number is not a class with the base PythonPolicy"),
        ("NoOptions", ["--memory-limit", "1GiB"], "its __init__ takes sub_allocator, and **opti"),
        ("Each", ["--strict"], "for the policies that have an original: your own has none"),
        ("Greedy", [], "event 3: Greedy.allocate(10, 0): the answer is 0x10000000000: its 10 b"),
    ],
)
def test_what_is_wrong_with_a_policy_of_one_s_own_is_said(capsys, mine, tmp_path, name, more, said):
    path = str(tmp_path / "run.npz")
    bfc.Trace([0, 1, 0, 0], [0, 0, 0, 1], [10, 0, 10, 10]).save(path)
    assert main(["replay", path, "--policy", f"{mine}:{name}", *more]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert "Traceback" not in printed.err + printed.out


@pytest.mark.parametrize(
    ("arguments", "faults"),
    [
        (["--policy", "lru"], ["--policy lru: it is bfc[:virtual_memory[,OPTIONS]] or caching["]),
        (["--policy", ""], ["it is bfc[:virtual_memory[,OPTIONS]] or caching[:[stitch[,"]),
        (["--policy", "max_split_size_mb:40"], ["it is bfc[:virtual_memory[,OPTIONS]] or"]),
        (
            ["--policy", "bfc:max_split_size_mb:40"],
            ["after bfc: comes virtual_memory, with page_size=SIZE", "--allow-growth"],
        ),
        (["--policy", "bfc:"], ["--policy bfc:: after bfc: comes virtual_memory"]),
        (
            ["--policy", f"{STITCHED},pages=4"],
            ["has the options page_size and headroom", "and not 'pages=4'\n"],
        ),
        (["--policy", f"{STITCHED},headroom"], ["and not 'headroom'\n"]),
        (["--policy", f"{STITCHED},"], ["and not ''\n"]),
        (["--policy", f"{STITCHED}:page_size=4MiB"], ["after bfc: comes virtual_memory"]),
        (
            ["--policy", f"{STITCHED},page_size=4MiB,page_size=8MiB"],
            [f"--policy {STITCHED},page_size=4MiB,page_size=8MiB: page_size is given twice\n"],
        ),
        (
            ["--policy", f"{STITCHED},headroom=five"],
            ["headroom: 'five' is not a fraction such as 0.05\n"],
        ),
        (["--policy", f"{STITCHED},headroom=-1"], ["headroom is a fraction from 0 on", "not -1.0"]),
        (["--policy", f"{STITCHED},headroom=nan"], ["headroom is a fraction from 0 on"]),
        (["--policy", f"{STITCHED},page_size=4MB"], ["page_size is a power of two", "not '4MB'"]),
        (["--policy", f"{STITCHED},page_size=big"], ["'big' is not a size"]),
        (
            ["--policy", STITCHED, "--device", "simulated:1MiB"],
            ["memory_limit is 1.00 MiB, less than a page of 2.00 MiB"],
        ),
        (
            ["--policy", STITCHED, "--device", "opencl"],
            ["virtual_memory needs a sub-allocator that maps memory: OpenCL has no calls"],
        ),
        (
            ["--policy", "caching:stitch,page_size=3MiB"],
            ["page_size is a power of two", "not '3MiB'"],
        ),
        (["--policy", "caching:stitch,page_size=big"], ["'big' is not a size"]),
        (
            ["--policy", "caching:stitch,headroom=0.5"],
            ["there is no setting 'headroom=0.5'"],
        ),
        (["--policy", "caching:stitched"], ["there is no setting 'stitched'"]),
        (
            ["--policy", "caching:stitch", "--device", "opencl"],
            ["stitch needs a sub-allocator that maps memory: OpenCL has no calls"],
        ),
        (
            ["--policy", STITCHED, "--policy", "caching:stitch", "--strict"],
            ["--strict is for the policies that have an original"],
        ),
        (
            ["--policy", STITCHED, "--allow-growth"],
            ["--allow-growth is an option of --policy bfc: the caching policy and virtual_memory"],
        ),
        (
            ["--policy", "caching", "--allow-growth"],
            ["--allow-growth is an option of --policy bfc"],
        ),
        (
            ["--policy", "bfc", "--policy", "caching:max_split_size_mb:2"],
            [
                "--policy caching: max_split_size_mb: '2' is too small\n",
                "allowed: a whole number of MiB, at least large_segment_size_mb, here 20\n",
            ],
        ),
        (
            ["--policy", "caching:max_split:40"],
            [
                "there is no setting 'max_split'\n",
                "roundup_power2_divisions",
                "try: max_split_size",
            ],
        ),
        (["--policy", "caching:roundup_power2_divisions"], ["roundup_power2_divisions: a colon"]),
        (
            ["--policy", "caching:expandable_segments:yes"],
            ["expandable_segments: 'yes' is neither True nor False"],
        ),
        (
            ["--policy", EXPANDABLE, "--device", "opencl"],
            ["expandable segments need a sub-allocator that maps memory: OpenCL has no calls"],
        ),
    ],
)
def test_what_is_wrong_with_a_policy_is_said_before_anything_is_read(capsys, arguments, faults):
    if "opencl" in arguments:
        pytest.importorskip("pyopencl")
    assert main(["replay", "nowhere.npz", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("bfc: ")
    assert captured.out == ""
    for fault in faults:
        assert fault in captured.err


# PyTorch's memory snapshots ------------------------------------------------------------------


def recording(seed: int = 0, steps: int = 300) -> Recorder:
    dice = random.Random(seed)
    recorder = Recorder(random_places(dice))
    random_run(dice, recorder, steps)
    return recorder


def write(path: Path, content: object) -> str:
    path.write_bytes(pickle.dumps(content, protocol=4))
    return str(path)


@pytest.mark.parametrize("ending", [".pickle", ".pkl", ".PKL"])
def test_a_snapshot_is_a_trace(capsys, tmp_path, ending):
    path = write(tmp_path / f"run{ending}", recording().snapshot())
    trace = bfc.Trace.from_torch(path)
    words = ["--policy", "caching", "--policy", "bfc", "--device", "simulated:8GiB", "--json"]
    assert main(["replay", path, *words]) == 0
    found = json.loads(capsys.readouterr().out)["traces"]
    assert [(row["trace"], row["policy"]) for row in found] == [("run", "caching"), ("run", "bfc")]
    for row in found:
        assert (row["events"], row["refused"]) == (len(trace), 0)
    replayed = trace.replay(bfc.CachingAllocator(bfc.SimulatedSubAllocator("8 GiB")))
    assert found[0]["peak_bytes_reserved"] == replayed.peak_bytes_reserved
    assert len(set(trace.stream.tolist())) == 3


def test_a_folder_is_its_traces_and_its_snapshots(capsys, tmp_path, five):
    write(tmp_path / "run.pickle", recording().snapshot())
    write(tmp_path / "again.pkl", recording().snapshot())
    (tmp_path / "notes.txt").write_text("no trace")
    words = ("--policy", "caching", "--device", "simulated:8GiB")
    found = rows(capsys, str(tmp_path), *words)
    assert [row["trace"] for row in found] == ["again", "five", "run"]


def test_a_snapshot_of_two_devices_needs_a_choice(capsys, tmp_path):
    one, two = recording(1).snapshot(), recording(2).snapshot()
    for segment in two["segments"]:
        segment["device"] = 1
    both = {
        "segments": one["segments"] + two["segments"],
        "device_traces": one["device_traces"] + two["device_traces"],
    }
    path = write(tmp_path / "two.pickle", both)
    assert main(["replay", path]) == 2
    fault = "it holds the devices [0, 1]: choose one with --snapshot-device\n"
    assert capsys.readouterr().err == f"bfc: {path}: {fault}"
    for device in (0, 1):
        words = ["--snapshot-device", str(device), "--device", "simulated:8GiB"]
        assert main(["replay", path, *words, "--json", "--no-picture"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["traces"]
        assert row["events"] == len(bfc.Trace.from_torch(path, device=device))
    assert main(["replay", path, "--snapshot-device", "7"]) == 2
    assert "it holds nothing of device 7" in capsys.readouterr().err


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("import bfc; bfc.was_run = True",)


WHOLE = pickle.dumps(recording().snapshot(), protocol=4)
BROKEN = {
    "hostile": (pickle.dumps({"segments": [Hostile()]}, protocol=4), "exec"),
    "cut": (WHOLE[: len(WHOLE) // 2], "it ends in the middle"),
    "empty": (b"", "it is not a pickle of protocol 2 to 5"),
    "text": (b"no pickle at all", "it is not a pickle of protocol 2 to 5"),
    "other": (pickle.dumps({"weights": [1, 2]}, protocol=4), "it is not a memory snapshot"),
    "gzip": (b"\x1f\x8b" + WHOLE, "it is compressed (gzip)"),
}


@pytest.mark.parametrize(("content", "fault"), BROKEN.values(), ids=BROKEN)
def test_a_broken_snapshot_is_one_line_and_exit_code_2(capsys, tmp_path, content, fault):
    path = tmp_path / "run.pickle"
    path.write_bytes(content)
    assert main(["replay", str(path), "--policy", "caching"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"bfc: {path}: ")
    assert captured.err.count("\n") == 1
    assert fault in captured.err
    assert captured.out == ""
    assert not hasattr(bfc, "was_run")


# -- what PyTorch recorded -------------------------------------------------------------------------


def recorded_with(settings: str, path: Path) -> str:
    recorder = Recorder(random_places(random.Random(3)))
    recorder.settings = {"PYTORCH_CUDA_ALLOC_CONF": settings}
    random_run(random.Random(3), recorder, 40)
    path.write_bytes(pickle.dumps(recorder.snapshot(), protocol=4))
    return str(path)


@pytest.mark.parametrize(
    ("settings", "policy", "why"),
    [
        ("", "caching", "PyTorch's policy (--policy takes others)"),
        ("max_split_size_mb:64, ", "caching:max_split_size_mb:64,", "with the recorded settings"),
        ("backend:other", "caching", "its defaults; of the recorded settings, "),
    ],
)
def test_what_pytorch_recorded_is_replayed_under_its_policy(
    capsys, tmp_path, five, settings, policy, why
):
    path = recorded_with(settings, tmp_path / "run.pickle")
    npz = str(tmp_path / "run.npz")
    bfc.Trace.from_torch(path).save(npz)
    for run in (path, npz):
        assert [row["policy"] for row in rows(capsys, run, five)] == [policy, "bfc"]
    assert [row["policy"] for row in rows(capsys, path, "--policy", "bfc")] == ["bfc"]
    assert [row["policy"] for row in rows(capsys, path, "--allow-growth")] == ["bfc"]
    assert main(["replay", path, five, "--no-picture"]) == 0
    version, first, headings, row, other = capsys.readouterr().out.splitlines()
    assert version.startswith("PyTorch 2.15, the newest: ")
    assert first.startswith("run was recorded by PyTorch: PyTorch's policy")
    assert why in first
    assert (row.split()[-1], other.split()[-1]) == (policy, "bfc")
    assert headings.split()[-1] == "policy"


@pytest.fixture
def planned(tmp_path: Path) -> tuple[str, str, str]:
    """A run that repeats, without marks, and plans of it for both policies."""
    sizes = [(7 * i % 23 + 1) * MIB for i in range(40)]
    ops = [0] * 40 + [1] * 40
    ids = [*range(40), *range(40)]
    run = bfc.Trace(
        ops * 5, [number + 40 * i for i in range(5) for number in ids], (sizes + [0] * 40) * 5
    )
    run.save(tmp_path / "run.npz")
    files = [str(tmp_path / "run.npz")]
    for fallback in ("caching", "bfc"):
        plan = bfc.Plan.from_trace(run, marks="auto", fallback=fallback)
        assert plan.kinds == ("train",)
        plan.save(tmp_path / f"a plan of {fallback}.npz")
        files.append(str(tmp_path / f"a plan of {fallback}.npz"))
    return files[0], files[1], files[2]


def test_a_policy_may_have_a_plan(capsys, planned):
    run, of_caching, of_bfc = planned
    words = ["--policy", f"caching:plan={of_caching}", "--policy", f"bfc:plan={of_bfc}"]
    found = rows(capsys, run, *words, "--device", "4 GiB", "--no-picture")
    for row, file in zip(found, (of_caching, of_bfc), strict=True):
        assert row["peak_bytes_reserved"] == bfc.Plan.load(file).span == row["peak_bytes_in_use"]
        assert row["regions_taken"] == 1


def test_a_plan_may_lie_in_pages(capsys, planned):
    run, of_caching, of_bfc = planned
    words = ["--policy", f"caching:plan={of_caching},stitch"]
    words += ["--policy", f"bfc:plan={of_bfc},virtual_memory,page_size=4MiB"]
    found = rows(capsys, run, *words, "--device", "4 GiB", "--no-picture")
    for row, file, page in zip(found, (of_caching, of_bfc), (2 << 20, 4 << 20), strict=True):
        span = bfc.Plan.load(file).span
        assert row["peak_bytes_reserved"] in (span, -(-span // page) * page)
        assert row["regions_taken"] == 0


@pytest.mark.parametrize(
    ("policy", "fault"),
    [
        ("caching:plan={bfc}", "the plan is for the policy 'bfc'"),
        ("bfc:plan={bfc},headroom=2", "comes nothing"),
        ("bfc:plan=nowhere.npz", "nowhere.npz"),
        ("caching:plan={caching}", "the plan needs"),
        ("caching:plan={run}", "it holds no array 'plan'"),
    ],
)
def test_a_plan_that_cannot_be_served_is_an_error_in_one_line(capsys, planned, policy, fault):
    files = dict(zip(("run", "caching", "bfc"), planned, strict=True))
    words = ["--policy", policy.format(**files), "--device", "100 MiB"]
    assert main(["replay", planned[0], *words]) == 2
    err = capsys.readouterr().err
    assert fault in err
    assert err.count("\n") == 1


def test_a_plan_has_no_original(capsys, planned):
    run, of_caching, _ = planned
    assert main(["replay", run, "--policy", f"caching:plan={of_caching}", "--strict"]) == 2
    assert "neither TensorFlow nor PyTorch has plans" in capsys.readouterr().err
