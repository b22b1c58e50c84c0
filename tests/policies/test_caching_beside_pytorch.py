"""PyTorch's compiled caching allocators of 2.11 and 2.15, our strict one, and the model: told the
same, they answer the same.

Compared are every address and refusal, all statistics and snapshots on the way, and at the end the
driver's log, with events recorded, asked and waited for, and the trace. `BFC_SEED=n` repeats the
histories of one seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from caching_subject import CommonPeer, KeepingPeer, Ours, Peer
from torch_histories import (
    CAPTURES,
    PROFILES,
    Subject,
    assert_they_agree,
    first_difference,
    first_index,
    make_history,
    run_alone,
)

from bench.peers.server import Operation
from bench.peers.torch import TorchPeer
from bfc.pytorch.rules import VERSIONS
from bfc_slow_models.torch_events import Events
from bfc_slow_models.torch_model import TorchModel

MIB = 1 << 20

profiles = pytest.mark.parametrize("profile", PROFILES)
versions = pytest.mark.parametrize("torch", VERSIONS)


@pytest.mark.sampled(2)
@versions
@profiles
def test_ours_is_the_model(profile: str, torch: str) -> None:
    assert_they_agree(profile, torch, range(8), TorchModel, Ours)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("profile", CAPTURES)
def test_ours_captures_as_the_model_does(profile: str) -> None:
    assert_they_agree(profile, "2.15", range(200, 208), TorchModel, Ours)


@pytest.mark.peers
@pytest.mark.usefixtures("torch_peer")
@pytest.mark.sampled(12)  # all of ours are beside the peer
@versions
@profiles
def test_the_model_is_the_peer(profile: str, torch: str) -> None:
    assert_they_agree(profile, torch, range(30), TorchModel, Peer)


@pytest.mark.peers
@pytest.mark.usefixtures("torch_peer")
@versions
@profiles
def test_ours_is_the_peer(profile: str, torch: str) -> None:
    assert_they_agree(profile, torch, range(100, 150), Peer, Ours)


@pytest.mark.peers
@pytest.mark.usefixtures("torch_peer")
@versions
@pytest.mark.parametrize("profile", CAPTURES)
def test_the_model_captures_as_the_peer_does(profile: str, torch: str) -> None:
    assert_they_agree(profile, torch, range(30), TorchModel, KeepingPeer)


@pytest.mark.peers
@pytest.mark.usefixtures("torch_peer")
@pytest.mark.parametrize(
    ("profile", "torch"),
    [
        (profile, torch)
        for profile in CAPTURES
        for torch in VERSIONS
        if (profile, torch) != ("captures_reuse", "2.11")  # ours waits for what that forgets: 34b
    ],
)
def test_ours_captures_as_the_peer_does(profile: str, torch: str) -> None:
    assert_they_agree(profile, torch, range(100, 150), CommonPeer, Ours)


@pytest.mark.peers
@pytest.mark.usefixtures("torch_peer")
@pytest.mark.parametrize("recorded", ["before", "inside"])
@pytest.mark.parametrize("freed", ["inside", "after"])
def test_the_model_forgets_what_the_peer_forgets(recorded: str, freed: str) -> None:
    # (row 34b) Ours does not, so that no random history gets here.
    record, free = ("record_stream_slot", 1, 2), ("free_slot", 1)
    operations: list[Operation] = [
        ("malloc", 30 * MIB, 0, 1),
        ("hold", 2),
        *([record] if recorded == "before" else []),
        ("begin_pool", (0, 2)),
        *([record] if recorded == "inside" else []),
        *([free] if freed == "inside" else []),
        ("malloc", 30 * MIB, 0, 2),
        ("end_pool", (0, 2)),
        *([free] if freed == "after" else []),
        ("malloc", 30 * MIB, 0, 3),
        ("snapshot",),
        ("stats",),
        ("calls",),
    ]
    subjects = TorchModel(torch="2.11"), Peer(torch="2.11")
    first, second = (subject.run(operations) for subject in subjects)
    subjects[1].close()
    assert first == second


def test_graphs_prove_frees_in_the_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    proved = 0
    free_what_the_graph_orders = Events.free_what_the_graph_orders

    def counting(self: Events, stream: int) -> None:
        nonlocal proved
        before = len(self.deferred)
        free_what_the_graph_orders(self, stream)
        proved += before - len(self.deferred)

    monkeypatch.setattr(Events, "free_what_the_graph_orders", counting)
    for seed in range(20):
        history = make_history("captures_reuse", seed)
        run_alone(TorchModel, history, history.operations)
    assert proved >= 10


# The histories themselves ------------------------------------------------------------------------


def test_a_seed_repeats_its_history() -> None:
    assert make_history("everything", 3) == make_history("everything", 3)
    assert make_history("everything", 3) != make_history("everything", 4)


class Refusing(TorchModel):
    """A model that answers one size wrongly."""

    def segment_size(self, size: int) -> int:
        return super().segment_size(size) + (2 * MIB if size == 20 * MIB else 0)


def test_a_difference_is_told_with_its_operation() -> None:
    for seed in range(100):
        history = make_history("borders", seed)
        told = first_difference(history, TorchModel, Refusing)
        if told is not None:
            break
    assert told is not None
    assert f"BFC_SEED={seed} pytest" in told
    assert f"{22 * MIB}" in told
    index = first_index(history, history.operations, TorchModel, Refusing)
    assert index is not None


def what_happened(profile: str, seeds: Iterable[int]) -> Counter[str]:
    """How often each of a history's notable things happened."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        history = make_history(profile, seed)
        answers = run_alone(TorchModel, history, history.operations)
        seen.update(str(answer) for answer in answers if isinstance(answer, str))
        stats = [answer for answer in answers if isinstance(answer, dict)]
        for name in ("num_alloc_retries", "num_sync_all_streams", "num_device_free"):
            seen[name] += max(one[name] for one in stats)
        seen["oversize"] += max(one["oversize_allocations.peak"] for one in stats)
        log = Counter(call[0] for call in answers[-2])
        seen.update({name: count for name, count in log.items() if name.startswith("event_")})
    return seen


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("profile", "things"),
    [
        ("plain", ["num_device_free"]),
        ("streams", ["event_record", "event_query", "event_synchronize"]),
        ("limits", ["a failure: oom", "num_alloc_retries", "num_sync_all_streams"]),
        ("failures", ["a failure: oom", "a failure: driver", "num_alloc_retries"]),
        ("max_split", ["oversize", "num_device_free", "num_alloc_retries"]),
        ("everything", ["a failure: oom", "event_synchronize", "oversize"]),
    ],
)
def test_the_histories_get_to_the_corners(profile: str, things: list[str]) -> None:
    seen = what_happened(profile, range(10))
    assert all(seen[thing] >= 5 for thing in things), seen


def test_a_subject_has_the_peers_methods() -> None:
    methods = {
        "malloc allocate free record_stream empty_cache set_settings set_memory_fraction",
        "memory_fraction create_pool begin_pool end_pool release_pool pool_use_count",
        "set_use_on_oom set_no_split stats snapshot record_history trace calls live_bytes",
        "reset_peak_stats reset_accumulated_stats hold finish finish_events fail_at run close",
    }
    subjects: list[Subject] = [TorchModel(), Ours()]
    for name in " ".join(methods).split():
        assert hasattr(TorchPeer, name), name
        assert all(hasattr(subject, name) for subject in subjects), name
