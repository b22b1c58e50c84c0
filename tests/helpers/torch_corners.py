"""What the tests of PyTorch's corner cases share: whom they test, and how they read it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from caching_subject import Ours

from bench.peers.torch import TorchPeer
from bfc.pytorch.rules import VERSIONS
from bfc_slow_models.torch_model import TorchModel

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BASE = 1 << 40
SIDE, OTHER = 2, 4
POOL, SECOND_POOL = (0, 1), (0, 2)
Start = Callable[..., Any]
#: The subjects: all have the methods of `TorchPeer`.
CLASSES: dict[str, Start] = {"original": TorchPeer, "model": TorchModel, "ours": Ours}


def subjects(names: Iterable[str], versions: Iterable[str] = VERSIONS) -> list[Any]:
    """Parameters for `start`: each of these subjects, under the rules of each version."""
    return [
        pytest.param(
            (name, version),
            marks=[pytest.mark.peers] if name == "original" else [],
            id=f"{name}-{version}",
        )
        for version in versions
        for name in names
    ]


EVERYONE = subjects(CLASSES)
#: For rows where ours does otherwise on purpose.
upstream = pytest.mark.parametrize("start", subjects(["original", "model"]), indirect=True)
#: For what the model leaves out as well, and ours does otherwise.
original = pytest.mark.parametrize("start", subjects(["original"]), indirect=True)
#: For rows that hold of one version alone.
of_2_11 = pytest.mark.parametrize("start", subjects(CLASSES, ["2.11"]), indirect=True)
of_2_15 = pytest.mark.parametrize("start", subjects(CLASSES, ["2.15"]), indirect=True)
upstream_of_2_11 = pytest.mark.parametrize(
    "start", subjects(["original", "model"], ["2.11"]), indirect=True
)
upstream_of_2_15 = pytest.mark.parametrize(
    "start", subjects(["original", "model"], ["2.15"]), indirect=True
)
original_of_2_11 = pytest.mark.parametrize("start", subjects(["original"], ["2.11"]), indirect=True)
original_of_2_15 = pytest.mark.parametrize("start", subjects(["original"], ["2.15"]), indirect=True)


def started(which: tuple[str, str]) -> Iterator[Start]:
    """Starts subjects of one kind, and ends them with the test: the body of a fixture."""
    name, version = which
    running = []

    def start(**options: object) -> Any:
        running.append(CLASSES[name](torch=version, **options))
        return running[-1]

    yield start
    for subject in running:
        subject.close()


def take(subject: Any, nbytes: int, stream: int = 0) -> int:
    address = subject.malloc(nbytes, stream)
    assert isinstance(address, int), address
    return address


def release(subject: Any, *addresses: int) -> None:
    for address in addresses:
        assert subject.free(address) is None


def cache(subject: Any, *sizes: int, stream: int = 0) -> list[int]:
    """Blocks of these sizes that are free again."""
    addresses = [take(subject, size, stream) for size in sizes]
    release(subject, *addresses)
    return addresses


def free_after(subject: Any, address: int, *streams: int) -> None:
    """Free a block that these streams use."""
    for stream in streams:
        assert subject.record_stream(address, stream) is None
    release(subject, address)


def failed(answer: object, kind: str) -> bool:
    return getattr(answer, "kind", None) == kind


def refused_at_start(start: Start, settings: str) -> bool:
    try:
        start(settings=settings)
    except ValueError:
        return True
    return False


def current(subject: Any, *groups: str) -> list[int]:
    stats = subject.stats()
    return [stats[f"{group}.all.current"] for group in groups]


def reserved(subject: Any) -> int:
    return current(subject, "reserved_bytes")[0]


def counters(subject: Any) -> dict[str, int]:
    """What a failing request, a wait or a return to the device has counted."""
    stats = subject.stats()
    names = {
        "retries": "num_alloc_retries",
        "ooms": "num_ooms",
        "waits": "num_sync_all_streams",
    }
    return {short: stats[name] for short, name in names.items()}


def costs(subject: Any, *, retries: int = 0, ooms: int = 0, waits: int = 0) -> bool:
    return counters(subject) == {"retries": retries, "ooms": ooms, "waits": waits}


def layout(subject: Any) -> list[list[int]]:
    return [[block["size"] for block in segment["blocks"]] for segment in subject.snapshot()]


def states(subject: Any) -> list[str]:
    return [block["state"] for segment in subject.snapshot() for block in segment["blocks"]]


def pending(subject: Any) -> int:
    return states(subject).count("active_pending_free")


def pools(subject: Any) -> list[tuple[int, int]]:
    return [segment["segment_pool_id"] for segment in subject.snapshot()]


def sizes_of(subject: Any, call: str) -> list[int]:
    """Of each call of that name to the device, refused ones too."""
    return [nbytes for name, nbytes, _ in subject.calls if name == call]


def recorded(subject: Any) -> list[int | None]:
    """The stream of each event recorded. The original names the event before it."""
    records = [call[1:] for call in subject.calls if call[0] == "event_record"]
    return [first if second is None else second for first, second in records]


def polled(subject: Any) -> int:
    return sum(name == "event_query" for name, _, _ in subject.calls)


def actions(subject: Any) -> list[str]:
    return [entry["action"] for entry in subject.trace() if entry["action"] != "snapshot"]


def scope(subject: Any, pool: tuple[int, int] = POOL, streams: str | int = "all") -> None:
    """Create the pool and open a scope."""
    assert subject.create_pool(pool) is None
    assert subject.begin_pool(pool, streams) is None


def pool_with(subject: Any, *sizes: int, pool: tuple[int, int] = POOL) -> list[int]:
    """A pool that holds free blocks of these sizes, and whose scope is closed again."""
    scope(subject, pool)
    addresses = cache(subject, *sizes)
    assert subject.end_pool(pool) is None
    return addresses


def drop(subject: Any, pool: tuple[int, int] = POOL) -> None:
    """Give up the two references that `scope` took."""
    for _ in range(2):
        assert subject.release_pool(pool) is None


def sums(segments: list[Any]) -> dict[str, int]:
    """What the layout of these segments says that the counters must be. The holes of expandable
    segments do not count as inactive splits."""
    blocks = [block for segment in segments for block in segment["blocks"]]
    plain = [segment["blocks"] for segment in segments if not segment["is_expandable"]]
    holes = [
        block["size"]
        for chain in plain
        if len(chain) > 1
        for block in chain
        if block["state"] == "inactive"
    ]
    return {
        "reserved_bytes": sum(segment["total_size"] for segment in segments),
        "allocated_bytes": sum(segment["allocated_size"] for segment in segments),
        "active_bytes": sum(segment["active_size"] for segment in segments),
        "requested_bytes": sum(segment["requested_size"] for segment in segments),
        "segment": len(plain),
        "allocation": sum(block["state"] == "active_allocated" for block in blocks),
        "active": sum(block["state"] != "inactive" for block in blocks),
        "inactive_split": len(holes),
        "inactive_split_bytes": sum(holes),
    }


def check_sums(stats: dict[str, int], segments: list[Any]) -> None:
    """The counters and the layout agree, over all and in each pool."""
    for pool in ("all", "small_pool", "large_pool"):
        chosen = [one for one in segments if pool in ("all", f"{one['segment_type']}_pool")]
        for group, value in sums(chosen).items():
            assert stats[f"{group}.{pool}.current"] == value, (group, pool)
