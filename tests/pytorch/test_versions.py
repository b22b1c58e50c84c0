"""The version of PyTorch that a snapshot is written for, and that it is told to be of."""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest

import bfc
from bfc.pytorch import version
from bfc.pytorch.stripped import strip

MIB = 1 << 20
LIMITS = {"max_round_threshold": -1, "max_cached_size": -1}
HOST: dict[str, Any] = {"host_segments": [], "host_traces": []}


def content(settings: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A snapshot with one entry."""
    entry = {"action": "segment_alloc", "addr": 1 << 40, "size": 2 * MIB, "stream": 0}
    block = {"size": 2 * MIB, "requested_size": 0, "state": "inactive"}
    segment = {"address": 1 << 40, "total_size": 2 * MIB, "blocks": [block]}
    return {
        "segments": [segment],
        "device_traces": [[entry | more.pop("entry", {})]],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ""} if settings is None else settings,
        "external_annotations": [],
        **more,
    }


def read(snapshot: Any) -> bfc.Trace:
    return bfc.Trace.from_torch(io.BytesIO(pickle.dumps(snapshot, protocol=4)))


@pytest.mark.parametrize(
    ("snapshot", "rules", "sign"),
    [
        (content(), None, "nothing tells 2.11 from 2.12"),
        (content({}), None, "nothing in the file says"),
        (content()["segments"], None, "nothing in the file says"),
        (
            content({"PYTORCH_CUDA_ALLOC_CONF": "throw_on_cudamalloc_oom:True"}),
            None,
            "throw_on_cudamalloc_oom, which 2.12 has first",
        ),
        (content(LIMITS), "2.15", "max_round_threshold and max_cached_size, as in 2.13 and later"),
        (content(LIMITS, **HOST), "2.15", "host_segments and host_traces, as in 2.14 and later"),
        (
            content(LIMITS, **HOST, entry={"internal_metadata": "mallocWithAddress"}),
            "2.15",
            "an entry has internal_metadata, as in 2.15",
        ),
        (
            content(
                {**LIMITS, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments_reserve:0.5"}, **HOST
            ),
            "2.15",
            "expandable_segments_reserve, as in 2.15",
        ),
    ],
)
def test_the_keys_of_a_snapshot_say_its_version(snapshot: Any, rules: str | None, sign: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = read(snapshot)
    assert trace.torch == trace.meta["torch_version"] == rules
    assert sign in trace.meta["torch_version_sign"]


@pytest.mark.parametrize(
    ("snapshot", "said"),
    [
        (content(**HOST), "but its settings have no max_round_threshold"),
        (content(LIMITS, entry={"internal_metadata": "x"}), "but it has no host_segments"),
        (content(entry={"internal_metadata": "x"}), "but its settings have no max_round_threshold"),
    ],
)
def test_signs_that_contradict_each_other_are_told(snapshot: Any, said: str):
    with pytest.warns(UserWarning, match="contradict each other") as caught:
        trace = read(snapshot)
    assert said in str(caught[0].message)
    assert said in trace.meta["torch_version_sign"]
    assert trace.torch == "2.15"


@pytest.mark.parametrize(
    "snapshot",
    [
        content(LIMITS, **HOST, graph_pools=[]),
        content({**LIMITS, "graph_pools": 1}, **HOST),
    ],
)
def test_a_file_of_a_newer_version_is_read_as_one_of_the_newest(snapshot: Any):
    with pytest.warns(UserWarning, match=r"read as one of PyTorch 2\.15.*'graph_pools'"):
        trace = read(snapshot)
    assert trace.torch == "2.15"
    assert "newer version" in trace.meta["torch_version_sign"]


def test_a_key_of_the_users_own_says_nothing():
    assert read(content(remark="mine")).torch is None


def recorded(torch: str, settings: str = "") -> bfc.Snapshot:
    device = bfc.SimulatedSubAllocator("1 GiB", reuse=True)
    allocator = bfc.CachingAllocator(device, torch=torch, settings=settings)
    allocator.record_history()
    addresses = [allocator.allocate_raw(size * MIB) for size in (12, 4, 30)]
    allocator.deallocate_raw(addresses[0])
    return allocator.snapshot()


@pytest.mark.parametrize(("torch", "rules"), [("2.11", None), ("2.15", "2.15")])
def test_a_dump_has_the_form_of_its_version(torch: str, rules: str | None, tmp_path: Path):
    snapshot = recorded(torch)
    assert snapshot.torch == torch
    shown = snapshot.to_torch()
    assert (set(HOST) <= set(shown)) == (set(LIMITS) <= set(shown["allocator_settings"]))
    assert (set(HOST) <= set(shown)) == (torch == "2.15")
    snapshot.dump(tmp_path / "memory.pickle")
    written = (tmp_path / "memory.pickle").read_bytes()
    assert pickle.loads(written) == shown
    assert bfc.Trace.from_torch(tmp_path / "memory.pickle").torch == rules
    assert bfc.Trace.from_snapshot(snapshot).torch == torch
    assert pickle.loads(pickle.dumps(snapshot)).torch == torch
    strip(tmp_path / "memory.pickle", tmp_path / "bare.pickle")
    assert bfc.Trace.from_torch(tmp_path / "bare.pickle").torch == rules


def test_another_policy_writes_the_newest_form():
    snapshot = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB")).snapshot()
    assert snapshot.torch is None
    assert set(snapshot.to_torch()) == version.TOP_KEYS
    assert set(snapshot.to_torch()["allocator_settings"]) == version.SETTINGS_KEYS


def test_a_trace_keeps_its_version(tmp_path: Path):
    trace = read(content(LIMITS, **HOST))
    trace.save(tmp_path / "run.npz")
    assert bfc.Trace.load(tmp_path / "run.npz").torch == "2.15"
    bare = trace.anonymised()
    assert bare.torch == "2.15"
    assert "said so" in bare.meta["torch_version_sign"]
    assert bfc.Trace([0], [0], [512], meta={"torch_version": "7"}).torch is None
    assert bfc.Trace([0], [0], [512]).torch is None


def test_segments_are_listed_in_the_order_in_which_they_came():
    """The driver hands lower addresses out later."""

    def entry(action: str, address: int, size: int, stream: int = 0) -> dict[str, Any]:
        return {"action": action, "addr": address, "size": size, "stream": stream}

    def segment(address: int, size: int, **more: Any) -> dict[str, Any]:
        block = {"size": size, "requested_size": 0, "state": "inactive"}
        return {"address": address, "total_size": size, "blocks": [block], **more}

    ranges = {"is_expandable": True}
    old, late, low = 64 * MIB, 32 * MIB, 16 * MIB
    history = [
        entry("segment_alloc", late, 2 * MIB),
        entry("segment_map", 128 * MIB, 2 * MIB),
        entry("segment_map", 130 * MIB, 4 * MIB),
        entry("segment_unmap", 128 * MIB, 2 * MIB),
        entry("segment_alloc", low, 2 * MIB),
        entry("segment_map", 128 * MIB, 2 * MIB),
        entry("segment_map", 256 * MIB, 2 * MIB, stream=5),
    ]
    final = [
        *(segment(address, 2 * MIB) for address in (low, late, old, old + 2 * MIB)),
        segment(128 * MIB, 6 * MIB, **ranges),
        segment(256 * MIB, 2 * MIB, stream=5, **ranges),
    ]
    trace = read({"segments": final, "device_traces": [history]})
    assert trace.meta["torch"]["registered"] == [
        *([old, 2 * MIB], [old + 2 * MIB, 2 * MIB], [late, 2 * MIB], [128 * MIB, 2 * MIB]),
        *([low, 2 * MIB], [256 * MIB, 2 * MIB]),
    ]
