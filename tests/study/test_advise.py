"""`bfc.advise`: what is said of recorded runs, and over which executors."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import pytest

import bfc
from bfc_tools.predicting.memory import simulated_driver
from bfc_tools.study import candidates, recorded_settings, workers
from bfc_tools.study.advise import prove
from bfc_tools.study.candidates import EXPANDABLE
from bfc_tools.study.counting import CountedSimulated
from bfc_tools.study.file_formats import read
from bfc_tools.study.search import SAVES

MIB, GIB = 1 << 20, 1 << 30
ROOT = Path(__file__).parents[2]
TRACES = ROOT / "bench" / "traces"
RECORDINGS = sorted((ROOT / "tests" / "recordings").glob("*.npz"))
DECOMFL = bfc.Trace.load(TRACES / "gpu_decomfl.npz")
SIZE = 1783664516 * 103 // 100


@pytest.fixture(scope="module")
def advice() -> bfc.Advice:
    return bfc.advise(DECOMFL, SIZE, jobs=1)


def allocator_of(row: bfc.AdviceRow, device: CountedSimulated) -> bfc.Allocator:
    """As a reader of the row would make it."""
    if row.policy == "caching":
        return bfc.CachingAllocator(device, settings=row.settings, strict=True)
    if row.policy == "caching+stitch":
        return bfc.CachingAllocator(device, settings=row.settings, stitch=True)
    options: dict[str, Any] = {}
    if row.settings:
        key, _, value = row.settings.partition("=")
        options[key] = value if key == "page_size" else value == "True"
    if row.policy == "bfc":
        return bfc.BFCAllocator(device, strict=True, **options)
    assert row.policy == "bfc+virtual_memory"
    return bfc.BFCAllocator(device, virtual_memory=True, **options)


def replayed(row: bfc.AdviceRow, size: int) -> tuple[int, int, int]:
    device = CountedSimulated(size)
    with allocator_of(row, device) as allocator:
        result = DECOMFL.replay(allocator)
        return result.failed, result.peak_bytes_reserved, device.driver_calls


def test_each_row_says_what_a_replay_on_the_device_gives(advice: bfc.Advice):
    assert len(advice.rows) > 20
    for row in advice.rows:
        figures = (row.refused, row.peak_reserved, row.driver_calls)
        assert replayed(row, SIZE) == figures, row.name
        assert row.fits == (row.refused == 0)


def test_on_the_smallest_device_nothing_is_refused(advice: bfc.Advice):
    searched = [row for row in advice.rows if row.smallest_device is not None]
    assert {row.is_pytorch for row in searched} == {True, False}
    assert any(row.smallest_device > SIZE for row in searched)  # the defaults
    for row in searched:
        assert row.smallest_device >= advice.live_peak
        assert replayed(row, row.smallest_device)[0] == 0, row.name
        for size in row.refused_above:
            assert replayed(row, size)[0] > 0, row.name


def test_the_best_row_is_what_the_contract_says(advice: bfc.Advice):
    fitting = [row for row in advice.rows if row.fits and row.smallest_device is not None]
    fitting = [row for row in fitting if row.is_pytorch] or fitting
    least = min(row.smallest_device for row in fitting)
    near = [row for row in fitting if row.smallest_device <= 1.01 * least]
    wanted = min((row.driver_calls, row.smallest_device) for row in near)
    best = advice.rows[advice.best]
    assert best.is_pytorch
    assert (best.driver_calls, best.smallest_device) == wanted


def test_rows_of_pytorch_come_first_and_each_once(advice: bfc.Advice):
    kinds = [row.is_pytorch for row in advice.rows]
    assert kinds == sorted(kinds, reverse=True)
    assert len({(row.policy, row.settings) for row in advice.rows}) == len(advice.rows)
    assert {"", "expandable_segments:True"} <= {row.settings for row in advice.rows}
    assert "bfc+virtual_memory" in {row.policy for row in advice.rows}


def test_json_has_what_the_text_says(advice: bfc.Advice):
    content = json.loads(advice.to_json())
    assert (content["live_peak"], content["device"]) == (advice.live_peak, SIZE)
    assert content["recorded"]["settings"] is None
    assert content["recorded"]["peak_reserved"] is None
    assert content["best"] == advice.best
    assert content["rows"][0].keys() >= {
        *("policy", "settings", "fits", "refused"),
        *("peak_reserved", "driver_calls", "smallest_device"),
    }
    text = str(advice)
    assert text.splitlines()[0] == advice.answer == content["answer"]
    assert advice.proof[1:] in text.splitlines()[2]
    best = advice.rows[advice.best].settings
    assert f" with {best}: " in advice.answer
    assert advice.to_copy == f"export PYTORCH_CUDA_ALLOC_CONF={best}" == str(advice).splitlines()[1]
    assert "as recorded: under other settings" in text.splitlines()[-1]
    assert all(row.name in advice.text(every_row=True) for row in advice.rows)


def table_of(advice: bfc.Advice) -> list[str]:
    """The first cells of the rows that `print` shows."""
    table = str(advice).split("\n\n")[1].splitlines()[1:]
    return [line.split("  ")[0] for line in table if not line.startswith("and ")]


def test_five_rows_differ_in_kind(advice: bfc.Advice):
    shown = table_of(advice)
    assert shown[:2] == ["(the defaults)", "expandable_segments:True"]
    assert len(shown) == 5
    kinds = {row.name: row.policy for row in advice.rows}
    assert [kinds[name] for name in shown[:3]] == ["caching"] * 3
    assert kinds[shown[3]] in ("caching+stitch", "bfc+virtual_memory")
    assert kinds[shown[4]] == "bfc"
    assert advice.rows[advice.best].name in shown


def test_allocations_of_private_pools_are_counted():
    run = bfc.Trace([0, 0, 1], [0, 1, 1], [1000, 1000, 0], pool=[0, 1, 0], pools=[(0, 0), (1, 0)])
    found = bfc.advise(run, "1 GiB", jobs=1)
    assert found.private_allocations == found.as_dict()["private_allocations"] == 1
    assert "1 allocations are from private pools" in found.text()
    assert "private pools" not in bfc.advise(bfc.Trace([0], [0], [1000]), "1 GiB", jobs=1).text()


def test_what_fits_already_needs_no_change():
    advice = bfc.advise(DECOMFL, "4 GiB", jobs=1)
    now = advice.rows[advice.in_force]
    spare = bfc.units.format_bytes((4 << 30) - now.peak_reserved)
    assert (now.settings, now.fits) == ("", True)
    first = f"PyTorch {advice.recorded.torch}: It fits on 4.00 GiB as it is: under PyTorch's "
    assert advice.answer.startswith(f"{first}defaults it ")
    assert f"which leaves {spare}. Nothing has to change." in advice.answer
    assert "PYTORCH_CUDA_ALLOC_CONF" not in advice.answer


def test_the_answer_says_what_the_change_costs(advice: bfc.Advice):
    best, usual = advice.rows[advice.best], advice.usual_calls
    device = CountedSimulated(1 << 40)
    with bfc.CachingAllocator(device, strict=True) as allocator:
        DECOMFL.replay(allocator)
        assert device.driver_calls == usual
    change = abs(best.driver_calls - usual)
    kind = "more" if best.driver_calls > usual else "fewer"
    assert (
        f"costs {best.driver_calls} calls of the driver, {change} {kind} than now" in advice.answer
    )


def test_settings_with_half_the_calls_are_named(advice: bfc.Advice):
    defaults, plain, other = (
        bfc.AdviceRow("caching", settings, settings != "", 0, GIB, calls, GIB)
        for settings, calls in (("", 9), (EXPANDABLE, 100), (f"a:1,{EXPANDABLE}", 50))
    )
    ours = dataclasses.replace(other, policy="bfc", driver_calls=1)
    found = dataclasses.replace(advice, rows=(defaults, plain, other, ours), best=1, in_force=0)
    assert found.fewer_calls is other
    assert f"; {other.settings} would cost 50." in found.answer
    assert found.to_copy.endswith(f"={EXPANDABLE}")
    assert other.settings in str(found)
    more = dataclasses.replace(other, driver_calls=51)
    found = dataclasses.replace(found, rows=(defaults, plain, more, ours))
    assert found.fewer_calls is None
    assert found.answer.endswith("than now.")
    fits = dataclasses.replace(defaults, fits=True)
    assert dataclasses.replace(found, rows=(fits, plain, other, ours)).fewer_calls is None


def test_a_recording_that_began_in_mid_run_says_where_its_beginning_lies():
    trace = bfc.Trace.load(RECORDINGS[0])
    large = bfc.advise(trace, "40 GiB", jobs=1)
    small = bfc.advise(trace, trace.beginning.reserved - 1, jobs=1)
    assert large.live_peak == small.live_peak == trace.peak_bytes_live()
    assert "In the first row, what was live then lies where it lay" in str(large)
    assert "each policy places anew what was live then" in str(small)
    assert {row.beginning for row in small.rows} == {"as placed"}
    assert {row.beginning for row in large.rows} == {"as recorded", "as placed"}


# What nothing fits on --------------------------------------------------------------------------


def test_where_nothing_fits_the_floor_is_named():
    trace = bfc.Trace([0, 0], [0, 1], [64 * MIB, 64 * MIB])
    advice = bfc.advise(trace, "100 MiB", jobs=1)
    assert (advice.best, advice.fits, advice.live_peak) == (None, False, 128 * MIB)
    assert advice.answer == (
        "PyTorch 2.15: Nothing makes it fit on 100.00 MiB: 128.00 MiB are live at once, "
        "28.00 MiB too many."
    )
    (default,) = (row for row in advice.rows if (row.policy, row.settings) == ("caching", ""))
    assert (default.refused, default.smallest_device) == (1, 128 * MIB)


def test_where_pytorch_has_nothing_ours_is_best():
    """Twelve blocks, of which every other one is freed: only pages serve the last request."""
    sizes = [5 * MIB] * 12 + [0] * 6 + [30 * MIB]
    trace = bfc.Trace([0] * 12 + [1] * 6 + [0], [*range(12), *range(0, 12, 2), 12], sizes)
    advice = bfc.advise(trace, 76 * MIB, jobs=1)
    best = advice.rows[advice.best]
    assert not best.is_pytorch
    assert not any(row.fits for row in advice.rows if row.is_pytorch)
    assert "virtual_memory=True" in str(advice) or "stitch=True" in str(advice)


@pytest.mark.parametrize("events", [0, 1])
def test_a_trace_without_memory_fits_everywhere(events: int):
    trace = bfc.Trace([0] * events, [0] * events, [0] * events)
    advice = bfc.advise(trace, 1, jobs=1)
    assert (advice.live_peak, advice.fits) == (0, True)


@pytest.mark.parametrize("device", [0, -1, "much", 1.5])
def test_a_device_that_is_no_size_is_refused(device):
    with pytest.raises((TypeError, ValueError)):
        bfc.advise(DECOMFL, device, jobs=1)


def test_jobs_are_at_least_one():
    with pytest.raises(ValueError, match="jobs is at least 1, not 0"):
        bfc.advise(DECOMFL, SIZE, jobs=0)


# The recorded run ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_recorded_settings_give_the_recorded_peak(path: Path):
    trace = read(path)
    proof = prove(trace, recorded_settings.read(trace))
    assert proof.is_exact, str(proof)
    assert str(proof).startswith("replayed under ")
    assert f"it reserves {proof.peak_reserved} bytes, as recorded" in str(proof)


def recording(settings: str, run: bfc.Trace, capacity: int) -> tuple[bfc.Trace, int]:
    """A run recorded under some settings, as a file has it, and what it reserved."""
    recorder = bfc.CachingAllocator(bfc.SimulatedSubAllocator(capacity), settings=settings)
    recorder.record_history(context=None)
    run.replay(recorder)
    file = io.BytesIO(pickle.dumps(recorder.snapshot().to_torch(), protocol=4))
    return bfc.Trace.from_torch(file), recorder.memory_stats()["reserved_bytes.all.peak"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("settings", "capacity"),
    [
        ("", 80 * GIB),
        ("", SIZE * 11 // 10),
        ("max_split_size_mb:64,roundup_power2_divisions:4", 80 * GIB),
        ("expandable_segments:True", 80 * GIB),
    ],
)
def test_a_recording_of_ours_is_repeated(settings: str, capacity: int):
    trace, peak = recording(settings, DECOMFL, capacity)
    proof = prove(trace, recorded_settings.read(trace))
    assert (proof.settings, proof.peak_reserved) == (settings, peak)
    assert proof.is_exact, str(proof)


def test_a_run_that_met_a_limit_is_repeated_on_a_device_of_that_size():
    """40 MiB are given back for lack of room, which a larger device would keep."""
    run = bfc.Trace([0, 1, 0], [0, 0, 1], [40 * MIB, 0, 42 * MIB])
    trace, peak = recording("", run, 50 * MIB)
    assert peak == 42 * MIB
    proof = prove(trace, recorded_settings.read(trace))
    assert (proof.is_exact, proof.capacity) == (True, 42 * MIB)
    assert "on a device of 42.00 MiB, it reserves" in str(proof)


def test_a_difference_is_said_with_its_causes():
    trace, peak = recording("", DECOMFL, 80 * GIB)
    trace.meta["torch"]["segments"].insert(0, [0, 1 << 50, 20 * MIB])
    trace.meta["torch"]["private_pool_allocations"] = 3
    proof = prove(trace, recorded_settings.read(trace))
    assert not proof.is_exact
    assert f"reserves {peak} bytes, but {peak + 20 * MIB} were recorded (-" in str(proof)
    assert str(proof).endswith("; 3 allocations were in private pools, which it does not name")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda torch: torch.pop("segments"), "the recording has no segments"),
        (lambda torch: torch.update(segments=[["x"]]), "the recording has no segments"),
        (lambda torch: torch.update(segments=[[0, 0, float("inf")]]), "the recording has no"),
        (
            lambda torch: torch["segments"].insert(0, [0, 0, 1 << 80]),
            "the recording has no segments",
        ),
        (
            lambda torch: torch["settings"].update(PYTORCH_CUDA_ALLOC_CONF="novel_key:1"),
            "bfc cannot have its settings",
        ),
    ],
)
def test_what_cannot_be_compared_is_said(change, why: str):
    trace, _ = recording("", DECOMFL[:200], 80 * GIB)
    change(trace.meta["torch"])
    proof = prove(trace, recorded_settings.read(trace))
    assert not proof.is_exact
    assert str(proof).startswith(f"not compared with the recorded run: {why}")


def test_recorded_settings_are_a_row_that_is_compared():
    settings = "max_split_size_mb:96, roundup_power2_divisions:[64:8,>:1]"
    trace, _ = recording(settings, DECOMFL, 80 * GIB)
    advice = bfc.advise(trace, SIZE, jobs=1)
    assert advice.recorded.is_exact
    (row,) = (row for row in advice.rows if row.settings == settings)
    assert row.smallest_device is not None
    assert advice.rows[advice.in_force] == row
    assert settings in table_of(advice)


def test_a_line_shows_no_control_characters():
    trace, _ = recording("", DECOMFL[:200], 80 * GIB)
    trace.meta["torch"]["settings"]["PYTORCH_CUDA_ALLOC_CONF"] = "\n max_split_size_mb:64 \n"
    advice = bfc.advise(trace, SIZE, jobs=1)
    assert advice.proof.startswith(r"replayed under '\n max_split_size_mb:64 \n'")
    assert "\n" not in advice.proof
    said = recorded_settings.Recorded("\x1b[2J" * 100, 1, 1)
    assert str(said).isprintable()
    assert len(str(said)) < 400


@pytest.mark.parametrize("oom", [[], [[]], [["x", 1, 2]], [[0, float("nan"), 0]], [[-1, 5, 0]], 3])
def test_refusals_that_make_no_sense_are_left_out(oom):
    trace = bfc.Trace([0], [0], [5], meta={"torch": {"oom": oom}})
    assert recorded_settings.with_the_last_refusal(trace) == (trace, 0)


def test_the_request_that_ended_a_run_must_fit_too():
    """8 MiB of 32 are live when 40 are asked for."""
    run = bfc.Trace([0, 0, 1, 0], [0, 1, 0, 2], [24 * MIB, 8 * MIB, 0, 40 * MIB])
    trace, _ = recording("", run, 44 * MIB)
    assert trace.meta["torch"]["oom"]
    advice = bfc.advise(trace, 80 * MIB, jobs=1)
    assert (advice.refused_at_the_end, advice.live_peak) == (40 * MIB, 48 * MIB)
    assert not bfc.advise(trace, 44 * MIB, jobs=1).fits
    first, second, *_ = str(advice).splitlines()
    assert first == str(advice.ran_out)
    assert first.startswith("It ran out of memory: 40.00 MiB were refused")
    assert second == advice.answer
    assert "The request that was refused at the end is replayed, too" in str(advice)


def test_a_refusal_that_the_run_survived_is_left_out():
    run = bfc.Trace([0, 0, 0], [0, 1, 2], [24 * MIB, 400 * MIB, 8 * MIB])
    trace, _ = recording("", run, 64 * MIB)
    assert trace.meta["torch"]["oom"]
    whole, refused = recorded_settings.with_the_last_refusal(trace)
    assert (whole is trace, refused) == (True, 0)


# Executors -------------------------------------------------------------------------------------


@pytest.mark.long
def test_processes_and_threads_say_the_same(advice: bfc.Advice):
    assert bfc.advise(DECOMFL, SIZE, jobs=2) == advice
    with ThreadPoolExecutor(2) as threads:
        assert bfc.advise(DECOMFL, SIZE, threads) == advice
        assert threads.submit(int).result() == 0  # it is not shut down
    assert workers._read == {}, "nothing is kept"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as given:
        assert bfc.advise(DECOMFL, SIZE, given) == advice
        assert given.submit(int).result() == 0


def test_a_path_is_read(advice: bfc.Advice):
    assert bfc.advise(TRACES / "gpu_decomfl.npz", SIZE, jobs=1) == advice


def test_progress_counts_the_replays(advice: bfc.Advice):
    told: list[tuple[str, int]] = []
    bfc.advise(DECOMFL, SIZE, jobs=1, progress=lambda text, done: told.append((text, done)))
    assert sum(done for _, done in told) == advice.replays
    assert list(dict.fromkeys(text for text, _ in told))[-1] == "the smallest devices"


@pytest.mark.long
def test_the_full_grid_is_no_worse(advice: bfc.Advice):
    trace = bfc.Trace.load(TRACES / "gpu_lm_small.npz")
    device = 3249143816 * 103 // 100
    quick = bfc.advise(trace, device, jobs=1)
    whole = bfc.advise(trace, device, jobs=1, thorough=True)
    assert len(whole.rows) > 1300
    least = [
        min(row.smallest_device for row in one.rows if row.is_pytorch and row.smallest_device)
        for one in (quick, whole)
    ]
    assert least[0] <= 1.01 * least[1]
    assert quick.rows[quick.best].smallest_device <= SAVES * least[1]


SCRIPT = f"""
import bfc
trace = bfc.Trace.load({str(TRACES / "gpu_lm_small.npz")!r})
"""
CALL = "advice = bfc.advise(trace, '4 GiB', jobs=2)\nprint(advice.best)"


def script(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + code)
    command = [sys.executable, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_script_without_a_guard_is_told_so(tmp_path: Path):
    done = script(tmp_path, CALL)
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError: ")
    assert "if __name__ == '__main__':" in last


def test_a_script_with_a_guard_runs(tmp_path: Path):
    done = script(tmp_path, "if __name__ == '__main__':\n" + textwrap.indent(CALL, "    "))
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


# Ended early -----------------------------------------------------------------------------------

LONG = [
    *(sys.executable, "-m", "bfc", "advise", str(TRACES / "unet_buckets.npz")),
    *("--device", "80GiB", "--thorough", "--jobs", "2"),
]


def children(pid: int) -> list[int]:
    """The processes that a process has started, by what the kernel says."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def started() -> tuple[subprocess.Popen[str], list[int]]:
    """The command in a process group of its own, and its workers."""
    command = subprocess.Popen(
        LONG, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0, cwd=ROOT
    )
    deadline = time.monotonic() + 60
    while len(children(command.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)  # two workers, and the one that cleans up behind them
    return command, children(command.pid)


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def all_end(pids: list[int]) -> bool:
    deadline = time.monotonic() + 20
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_running, pids))


pytestmark_linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc")


@pytest.mark.sampled(1)
@pytestmark_linux
@pytest.mark.parametrize("pause", [0.0, 0.3, 1.5])
def test_an_interrupt_ends_it_with_its_workers(pause: float):
    command, workers = started()
    time.sleep(pause)
    begun = time.monotonic()
    os.killpg(command.pid, signal.SIGINT)  # as a terminal does
    out, err = command.communicate(timeout=60)
    assert time.monotonic() - begun < 20
    assert (command.returncode, out) == (130, ""), err
    assert err.splitlines()[-1] == "bfc: interrupted"
    assert all(line.startswith("bfc advise: ") for line in err.splitlines()[:-1])
    assert len(workers) >= 3
    assert all_end(workers)


@pytestmark_linux
def test_workers_end_where_the_command_is_killed():
    command, workers = started()
    command.kill()
    command.communicate(timeout=60)
    assert len(workers) >= 3
    assert all_end(workers)


def test_a_row_can_be_copied(advice: bfc.Advice):
    row = dataclasses.replace(advice.rows[0], refused=7)
    assert row.refused == 7
    assert row != advice.rows[0]


def repeating(*, growing: bool) -> bfc.Trace:
    """Five steps, each of blocks that come one after the other: without a plan each needs its own
    segment. Or of one block, of which nothing is to be saved."""
    sizes = [step * 4 << 20 for step in range(6, 40)] if growing else [64 << 20] * 34
    ids = [number for number in range(5 * len(sizes)) for _ in range(2)]
    return bfc.Trace([0, 1] * len(sizes) * 5, ids, [n for s in sizes for n in (s, 0)] * 5)


def test_a_run_that_repeats_has_a_row_of_a_plan():
    """The plan needs the largest block, 156 MiB."""
    marks = [[68 * step, "train"] for step in range(5)]
    trace = repeating(growing=True)._with_meta({"marks": marks})
    advice = bfc.advise(trace, "160 MiB", jobs=1)
    assert advice.no_plan == ""
    [row] = [row for row in advice.rows if row.policy == "caching+plan"]
    assert (row.fits, row.refused, row.peak_reserved) == (True, 0, 156 << 20)
    assert row.smallest_device == row.peak_reserved
    assert row.name in str(advice)
    assert "serves a plan of it" in advice.text(every_row=True)
    small = bfc.advise(trace, "150 MiB", jobs=1)
    [row] = [row for row in small.rows if row.policy == "caching+plan"]
    assert (row.fits, row.smallest_device) == (False, 156 << 20)
    assert row.refused > 0


def test_where_a_plan_is_no_help_the_advice_says_why():
    advice = bfc.advise(repeating(growing=False), "100 MiB", jobs=1)
    assert all(row.policy != "caching+plan" for row in advice.rows)
    assert "A plan of it is no help: " in advice.text(every_row=True)
    assert "plan" not in str(advice)
    marked = repeating(growing=False)._with_meta({"marks": [[0, "train"], [68, "train"]]})
    advice = bfc.advise(marked, "100 MiB", jobs=1)
    assert "would not have paid" in advice.no_plan
    assert advice.as_dict()["no_plan"] == advice.no_plan


def random_run(seed: int, **meta: Any) -> bfc.Trace:
    """Requests of 1 to 8 MiB, at most some 40 of them live."""
    random = Random(seed)
    events: list[tuple[int, int, int]] = []
    live: list[int] = []
    for number in range(1500):
        if live and (random.random() < 0.5 or len(live) > 40):
            events.append((1, live.pop(random.randrange(len(live))), 0))
        else:
            events.append((0, number, random.randrange(1, 9) * MIB))
            live.append(number)
    op, ids, sizes = zip(*events, strict=True)
    return bfc.Trace(op, ids, sizes, meta={"torch_version": "2.11", **meta})


def test_a_predicted_run_has_the_addresses_of_the_prediction():
    """They fall, and PyTorch took the lowest of free blocks until 2.13: the advice says what the
    prediction said, and so does a replay."""
    differ = 0
    for seed in range(20):
        run, predicted = random_run(seed), random_run(seed, predicted={"torch": "2.11.0"})
        allocator = bfc.CachingAllocator(simulated_driver(GIB), torch="2.11")
        expected = predicted.replay(allocator).peak_bytes_reserved
        point = candidates.Point(candidates.CACHING, "")
        assert candidates.replay(predicted, point, GIB).peak_reserved == expected
        rising = candidates.replay(run, point, GIB).peak_reserved
        if rising != expected and not differ:
            rows = bfc.advise(predicted, GIB, jobs=1).rows
            assert expected in {row.peak_reserved for row in rows if not row.settings}
        differ += rising != expected
    assert differ
