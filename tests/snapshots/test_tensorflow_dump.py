"""TensorFlow's memory dump. `tests/peers/test_tensorflow.py` has TensorFlow itself read it."""

from __future__ import annotations

import json
from typing import Any

import pytest

import bfc

MIB = 1 << 20

#: The fields of bfc_memory_map.proto (TensorFlow's behaviour, 2.12): number, type.
MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "MemAllocatorStats": {
        "num_allocs": (1, "INT64"),
        "bytes_in_use": (2, "INT64"),
        "peak_bytes_in_use": (3, "INT64"),
        "largest_alloc_size": (4, "INT64"),
        "fragmentation_metric": (5, "FLOAT"),
    },
    "MemChunk": {
        "address": (1, "UINT64"),
        "size": (2, "INT64"),
        "requested_size": (3, "INT64"),
        "bin": (4, "INT32"),
        "op_name": (5, "STRING"),
        "freed_at_count": (6, "UINT64"),
        "action_count": (7, "UINT64"),
        "in_use": (8, "BOOL"),
        "step_id": (9, "UINT64"),
    },
    "BinSummary": {
        "bin": (1, "INT32"),
        "total_bytes_in_use": (2, "INT64"),
        "total_bytes_in_bin": (3, "INT64"),
        "total_chunks_in_use": (4, "INT64"),
        "total_chunks_in_bin": (5, "INT64"),
    },
    "SnapShot": {"action_count": (1, "UINT64"), "size": (2, "INT64")},
    "MemoryDump": {
        "allocator_name": (1, "STRING"),
        "bin_summary": (2, "BinSummary"),
        "chunk": (3, "MemChunk"),
        "snap_shot": (4, "SnapShot"),
        "stats": (5, "MemAllocatorStats"),
    },
}


@pytest.fixture(scope="module")
def message() -> Any:
    """The class of TensorFlow's message, made from the fields above."""
    pytest.importorskip("google.protobuf")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="a.proto", package="tensorflow", syntax="proto3")
    for name, fields in MESSAGES.items():
        made = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            added = made.field.add(name=field, number=number)
            repeated = name == "MemoryDump" and field in ("bin_summary", "chunk", "snap_shot")
            added.label = added.LABEL_REPEATED if repeated else added.LABEL_OPTIONAL
            if kind in MESSAGES:
                added.type, added.type_name = added.TYPE_MESSAGE, f".tensorflow.{kind}"
            else:
                added.type = getattr(added, f"TYPE_{kind}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindMessageTypeByName("tensorflow.MemoryDump")
    return message_factory.GetMessageClass(found)


def dumps() -> dict[str, bfc.Snapshot]:
    """Snapshots of both policies, empty ones and full ones."""
    recorded = bfc.BFCAllocator(bfc.SimulatedSubAllocator("4 MiB"), allow_growth=True)
    recorded.record_history()
    recorded.set_timing_counter(bfc.SharedCounter())
    with bfc.owner("dense/matmul", step=17):
        address = recorded.allocate_raw(1000)
    recorded.deallocate_raw(recorded.allocate_raw(2 * MIB))
    caching = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    caching.allocate_raw(30 * MIB)
    assert address
    made = {"recorded": recorded, "caching": caching}
    made["untouched"] = bfc.BFCAllocator(bfc.SimulatedSubAllocator("4 MiB"))
    return {name: allocator.snapshot() for name, allocator in made.items()}


@pytest.mark.parametrize("name", ["recorded", "caching", "untouched"])
def test_protobuf_reads_it_and_writes_the_same(name: str, message: Any) -> None:
    from google.protobuf import json_format

    dump = json.loads(json.dumps(dumps()[name].to_tensorflow(), allow_nan=False))
    read = json_format.ParseDict(dump, message())
    again = json_format.MessageToDict(read, always_print_fields_with_no_presence=True)
    exact, single = (float(it["stats"].pop("fragmentationMetric")) for it in (dump, again))
    assert single == pytest.approx(exact, nan_ok=True)
    assert again == dump
    assert [it["bin"] for it in dump["binSummary"]] == list(range(21))


def test_it_says_whose_memory_it_is_when_and_how_much_was_live() -> None:
    dump = dumps()["recorded"].to_tensorflow()
    used, *free = dump["chunk"]
    assert (used["opName"], used["stepId"], used["actionCount"]) == ("dense/matmul", "17", "1")
    assert (used["bin"], used["requestedSize"], used["freedAtCount"]) == (-1, "1000", "0")
    assert [(it["inUse"], it["freedAtCount"], it["actionCount"]) for it in free] == [
        (False, "0", "0"),
        (False, "1", "3"),
    ]
    assert dump["snapShot"] == [
        {"actionCount": "1", "size": "1000"},
        {"actionCount": "2", "size": str(1000 + 2 * MIB)},
        {"actionCount": "3", "size": "1000"},
    ]


def test_it_keeps_the_newest_4096_sizes_as_tensorflow_does() -> None:
    allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"))
    early = allocator.allocate_raw(100)
    allocator.record_history(context=None)
    for _ in range(2100):
        allocator.deallocate_raw(allocator.allocate_raw(1000))
    sizes = allocator.snapshot().to_tensorflow()["snapShot"]
    assert (len(sizes), sizes[-1]) == (4096, {"actionCount": "4200", "size": "100"})
    assert early
