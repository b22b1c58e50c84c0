"""`bfc anonymise`: what can be shared."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_dumps import recorded

import bfc
from bfc_tools.cli import main

SECRETS = ("alice", "Secret", "/home/", "kv cache", "N/A", "1700000000")
CONF = "max_split_size_mb:64"


def snapshot() -> dict[str, Any]:
    recorder = recorded(3, 200)
    content = recorder.snapshot()
    frames = [{"filename": "/home/alice/SecretModel.py", "line": 7, "name": "alice"}]
    for entry in content["device_traces"][0]:
        entry |= {"frames": frames, "user_metadata": "kv cache of alice"}
    content["device_traces"][0].append({"action": "alice was here"})
    content["allocator_settings"] = {
        "PYTORCH_CUDA_ALLOC_CONF": CONF,
        "max_split_size": 64 << 20,
        "alice": "Secret",
        "roundup_power2_divisions": {"1": 0, "alice": 5},
    }
    return content


def all_text(path: Path) -> str:
    """Everything that the file holds, unpacked, with numbers as they stand."""
    with zipfile.ZipFile(path) as archive:
        text = repr([(info.filename, info.date_time, info.comment) for info in archive.infolist()])
    with np.load(path) as arrays:
        for name in arrays.files:
            array = arrays[name]
            text += name + (str(array.item()) if array.dtype.kind == "U" else str(array.tolist()))
    return text


def make(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / f"in.{kind}"
    if kind == "pickle":
        path.write_bytes(pickle.dumps(snapshot(), 4))
        return path
    (tmp_path / "first.pickle").write_bytes(pickle.dumps(snapshot(), 4))
    trace = bfc.Trace.from_torch(tmp_path / "first.pickle")
    if kind == "csv":
        trace.log_csv(path)
        return path
    trace.meta["torch"]["alice"] = "Secret"
    trace.meta["Secret"] = {"alice": ["/home/"]}
    trace.meta["torch"]["segment_events"].append(["segment_free", 1, "alice"])
    trace.save(path)
    return path


def load(path: Path) -> bfc.Trace:
    if path.suffix == ".csv":
        return bfc.Trace.from_rmm_log(path)
    return (bfc.Trace.load if path.suffix == ".npz" else bfc.Trace.from_torch)(path)


@pytest.mark.parametrize("kind", ["pickle", "npz", "csv"])
def test_no_text_of_the_input_is_left_and_the_replay_is_the_same(tmp_path: Path, kind: str, capsys):
    source, target = make(tmp_path, kind), tmp_path / "out.npz"
    before = load(source)
    assert before.owner is not None
    assert before.time_us is not None
    assert main(["anonymise", str(source), str(target)]) == 0
    assert f"{len(before)} events" in capsys.readouterr().out
    text = all_text(target)
    assert [secret for secret in SECRETS if secret in text] == []
    after = bfc.Trace.load(target)
    assert (after.time_us, after.owner, after.stack, len(after.frames)) == (None, None, None, 0)
    for settings in ("", CONF):
        addresses = [
            trace.replay(
                bfc.CachingAllocator(bfc.SimulatedSubAllocator("80 GiB"), settings=settings)
            ).addresses.tolist()
            for trace in (before, after)
        ]
        assert addresses[0] == addresses[1]


def test_the_numbers_of_a_recording_and_its_settings_stay(tmp_path: Path):
    source, target = make(tmp_path, "pickle"), tmp_path / "out.npz"
    assert main(["anonymise", str(source), str(target)]) == 0
    before, after = (trace.meta["torch"] for trace in (load(source), bfc.Trace.load(target)))
    for name in ("first_recorded_event", "addresses", "segments", "segment_events", "streams"):
        assert after[name] == before[name]
    assert after["releases_unsure"] == before["releases_unsure"]
    assert after["settings"] == {
        "PYTORCH_CUDA_ALLOC_CONF": CONF,
        "max_split_size": 64 << 20,
        "roundup_power2_divisions": {"1": 0},
    }
    assert json.dumps(after)


@pytest.mark.parametrize("kind", ["pickle", "npz"])
def test_when_tags_slept_stays_without_their_names(tmp_path: Path, kind: str):
    """Their bytes count as reserved no more, as in the report of the original."""
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), stitch=True)
    allocator.record_history()
    kept = []
    for tag in ("alice", "Secret"):
        with allocator.tag(tag):
            kept.append(allocator.allocate("40 MiB"))
    allocator.sleep(drop=["Secret"])
    allocator.sleep()
    allocator.wake("alice")
    allocator.snapshot().dump(tmp_path / "in.pickle")
    target = tmp_path / f"out.{kind}"
    assert main(["anonymise", str(tmp_path / "in.pickle"), str(target)]) == 0
    said = [row[1:] for row in load(target).meta["torch"]["asleep"]]
    size = 40 << 20
    assert said == [[size, "tag 1"], [size, "tag 2"], [-size, "tag 2"]]
    assert b"alice" not in target.read_bytes()


def test_a_trace_of_another_kind_keeps_no_meta():
    trace = bfc.Trace([0], [0], [1], meta={"torch": "alice", "name": "Secret"})
    assert trace.anonymised().meta is None
    odd = bfc.Trace([0], [0], [1], meta={"torch": {"device": "alice", "settings": ["Secret"]}})
    assert odd.anonymised().meta["torch"] == {"settings": {}}


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["in.npz", "out.pickle"], "OUT ends in .npz, or like IN"),
        (["in.npz", "out.csv"], "OUT ends in .npz, or like IN"),
        (["in.npz", "out.npz", "--snapshot-device", "0"], "an option for a memory snapshot"),
        (["bad.pickle", "out.pickle", "--snapshot-device", "0"], "an option for a memory"),
        (["bad.pickle", "out.pickle"], "bad.pickle: byte 2: it names os.system"),
        (["none.npz", "out.npz"], "No such file"),
        (["bad.pickle", "out.npz"], "bad.pickle: "),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, monkeypatch, capsys, arguments, fault):
    monkeypatch.chdir(tmp_path)
    make(tmp_path, "npz").rename(tmp_path / "in.npz") if "in.npz" in arguments else None
    (tmp_path / "bad.pickle").write_bytes(b"\x80\x04cos\nsystem\n.")
    assert main(["anonymise", *arguments]) == 2
    said = capsys.readouterr().err
    assert fault in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out.npz").exists()


def test_a_device_is_chosen(tmp_path: Path, capsys):
    content = snapshot()
    content["device_traces"].append(content["device_traces"][0])
    (tmp_path / "two.pickle").write_bytes(pickle.dumps(content, 4))
    out = tmp_path / "out.npz"
    assert main(["anonymise", str(tmp_path / "two.pickle"), str(out)]) == 2
    assert "--snapshot-device" in capsys.readouterr().err
    command = ["anonymise", str(tmp_path / "two.pickle"), str(out), "--snapshot-device", "0"]
    assert main(command) == 0
    assert len(bfc.Trace.load(out)) > 0


def test_a_snapshot_may_stay_one(tmp_path: Path):
    """Its trace is the same, releases included, though the frames that named them are gone."""
    source, target = make(tmp_path, "pickle"), tmp_path / "out.pickle"
    assert main(["anonymise", str(source), str(target)]) == 0
    content = target.read_bytes()
    assert [secret for secret in SECRETS if secret.encode() in content] == []
    assert set(pickle.loads(content)) == {
        "segments",
        "device_traces",
        "allocator_settings",
        "external_annotations",
    }
    before, after = load(source), load(target)
    for name in ("op", "id", "size", "stream"):
        assert getattr(after, name).tolist() == getattr(before, name).tolist()
    assert (after.time_us, after.owner) == (None, None)
    assert {frame.filename for frame in after.frames} <= {"bfc"}  # what says it was a release
    for name in ("addresses", "segments", "segment_events", "releases_unsure", "repairs"):
        assert after.meta["torch"][name] == before.meta["torch"][name]


def test_what_frames_said_of_releases_is_kept(tmp_path: Path):
    path, out = tmp_path / "own.pickle", tmp_path / "out.pickle"
    pool = bfc.CachingAllocator(bfc.SimulatedSubAllocator("64 MiB"))
    pool.record_history(context="all")
    live = pool.allocate_raw(1000)
    for _ in range(3):
        pool.deallocate_raw(pool.allocate_raw(40 << 20))
        pool.allocate_raw(100 << 10)
        pool.empty_cache()
        pool.deallocate_raw(pool.allocate_raw(30 << 20))
        pool.deallocate_raw(pool.allocate_raw(45 << 20))  # which tries again
    pool.deallocate_raw(live)
    pool.dump(path)
    assert main(["anonymise", str(path), str(out)]) == 0
    before, after = load(path), load(out)
    assert (before.op == 2).sum() == 3
    assert after.op.tolist() == before.op.tolist()
    assert after.meta["torch"]["releases_unsure"] == 0


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"segments": 5},
        {"segments": [5]},
        {"device_traces": [5]},
        {"device_traces": [[5]]},
        {"segments": [{"blocks": 7}]},
        {"device_traces": [[{}] * 100_000]},
        "alice",
    ],
)
def test_an_odd_snapshot_is_stripped_or_refused(tmp_path: Path, capsys, content: Any):
    path, out = tmp_path / "odd.pickle", tmp_path / "out.pickle"
    path.write_bytes(pickle.dumps(content, 4))
    code = main(["anonymise", str(path), str(out)])
    said = capsys.readouterr().err
    assert (code, said.count("\n")) in ((0, 0), (2, 1))
    assert out.exists() == (code == 0)
    assert code == 2 or content == []
