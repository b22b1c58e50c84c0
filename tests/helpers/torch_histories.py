"""Random histories for PyTorch's policy, and the first answer in which two subjects differ.

A subject is `bench.peers.torch.TorchPeer`, `torch_model.TorchModel` or `caching_subject.Ours`: a
history is a list of the operations that all of them run. Its profile and seed repeat it, and
`BFC_SEED=n` makes `assert_they_agree` run the histories of this seed alone.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from bench.peers.server import OUT_OF_MEMORY, Failure, Operation
from bench.peers.torch import ACTIONS, NEWEST, Pool

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
GIVEN_SEED = [int(os.environ["BFC_SEED"])] if "BFC_SEED" in os.environ else []
#: Upstream goes through streams and private pools in the order of a hash table, which for these is
#: the order of their numbers (PyTorch's behaviour, 2.14).
STREAMS = (0, 2, 4, 6)
POOLS: tuple[Pool, ...] = ((0, 2), (0, 4), (0, 6), (0, 8))
UNKNOWN_POOL = (0, 9)
LAUNCH_FAILURE = 719
#: With expandable segments off, these two are never recorded.
SKIPPABLE = [action for action in ACTIONS if action not in ("segment_map", "segment_unmap")]


class Subject(Protocol):
    """What runs a history."""

    def run(self, operations: Iterable[Operation]) -> list[Any]: ...

    def close(self) -> None: ...


Make = Callable[..., Subject]


@dataclass(frozen=True)
class Profile:
    """What the histories of one name are like. Each number is a chance, or a weight among the
    operations."""

    sizes: Sequence[str] = ("tiny", "small", "medium", "border")
    streams: Sequence[int] = (0,)
    capacities: Sequence[int] = (80 * GIB,)
    limited: float = 0.0  # a memory fraction at the start
    settings: Sequence[str] = ()  # which are set at the start
    changes: float = 0.0  # of the settings
    fractions: float = 0.0  # set at run time
    uses: float = 0.0  # record_stream
    empties: float = 0.3
    failures: float = 0.0  # of the device
    pools: float = 0.0
    odd: float = 0.2  # wrong pointers, no bytes, far too many, resets, the trace switched
    lowers: bool = False  # changes the limit of splitting while blocks are live
    lends: bool = False  # starts with a pool that has something to lend
    expandable: float = 0.0  # starts with expandable segments
    toggles: float = 0.0  # of them, while running
    resizes: float = 0.0  # of the device
    fails: Sequence[str | None] = (None,)  # the kinds of call that fail; None: any that grows
    drains: bool = True  # frees all blocks before it releases a pool, with expandable segments
    captures: float = 0.0  # captures begin, end, work, and other streams join them
    inside: bool = False  # uses are recorded in captures, too, of what is freed there
    reuses: bool = False  # with graph_capture_record_stream_reuse: each capture has a pool


TIGHT = (60 * MIB, 100 * MIB, 150 * MIB, 220 * MIB, 300 * MIB, 301 * MIB + 7)
KEYS = ("max_split", "collection", "roundup", "large_segment")

PROFILES: dict[str, Profile] = {
    "plain": Profile(),
    "borders": Profile(sizes=("border",), streams=(0, 2)),
    "streams": Profile(streams=STREAMS, uses=1.5),
    "limits": Profile(streams=STREAMS, capacities=TIGHT, limited=0.5, fractions=0.2, uses=0.5),
    "failures": Profile(streams=(0, 2), failures=1.0, uses=0.5, capacities=(*TIGHT, 80 * GIB)),
    "max_split": Profile(
        sizes=("medium", "large", "large", "border"),
        streams=(0, 2),
        capacities=(160 * MIB, 300 * MIB, 500 * MIB, 80 * GIB),
        settings=("max_split",),
        uses=0.3,
    ),
    "lowered": Profile(
        sizes=("small", "medium", "large"),
        settings=("max_split",),
        changes=0.7,
        lowers=True,
    ),
    "collection": Profile(
        sizes=("small", "medium", "large", "large"),
        streams=(0, 2),
        capacities=(300 * MIB, 500 * MIB, 1 * GIB),
        limited=0.9,
        fractions=0.05,
        settings=("collection",),
        uses=0.3,
        empties=0.1,
    ),
    "roundup": Profile(
        sizes=("power", "power", "border", "small"), settings=("roundup",), changes=0.2
    ),
    "large_segment": Profile(
        sizes=("small", "medium", "medium", "border"),
        capacities=(*TIGHT, 80 * GIB),
        settings=("large_segment",),
        changes=0.3,
    ),
    "settings": Profile(
        sizes=("small", "medium", "large", "border", "power"),
        streams=(0, 2),
        capacities=(300 * MIB, 500 * MIB, 80 * GIB),
        limited=0.5,
        fractions=0.2,
        settings=KEYS,
        changes=0.3,
        uses=0.5,
    ),
    "pools": Profile(streams=(0, 2), pools=1.5),
    "pools_limits": Profile(
        streams=STREAMS, capacities=TIGHT, limited=0.3, fractions=0.1, pools=1.5, uses=0.7
    ),
    "lenders": Profile(
        sizes=("small", "medium", "medium", "border"),
        streams=(0, 2),
        capacities=(60 * MIB, 100 * MIB, 150 * MIB),
        pools=0.4,
        uses=0.5,
        lends=True,
    ),
    "pools_settings": Profile(
        sizes=("small", "medium", "large", "border"),
        streams=(0, 2),
        capacities=(300 * MIB, 500 * MIB),
        limited=0.5,
        settings=KEYS,
        pools=1.2,
        uses=0.3,
    ),
    "equals": Profile(  # which of many equal chunks is taken
        sizes=("equal",),
        streams=(0, 2),
        capacities=(100 * MIB, 300 * MIB, 1 * GIB),
        empties=1.0,
        pools=0.5,
    ),
    "equals_settings": Profile(
        sizes=("equal", "equal", "large"),
        capacities=(160 * MIB, 300 * MIB, 1 * GIB),
        limited=0.7,
        settings=("max_split", "collection"),
        empties=0.2,
    ),
    "everything": Profile(
        sizes=("tiny", "small", "medium", "large", "border", "power"),
        streams=STREAMS,
        capacities=(*TIGHT, 500 * MIB, 1 * GIB, 80 * GIB),
        limited=0.5,
        settings=KEYS,
        changes=0.15,
        fractions=0.1,
        uses=1.0,
        failures=0.3,
        pools=0.8,
    ),
}


#: With expandable segments.
EXPANDABLE: dict[str, Profile] = {
    "x_plain": Profile(
        sizes=("tiny", "small", "medium", "border", "large"), expandable=1.0, empties=1.0
    ),
    "x_streams": Profile(
        sizes=("small", "medium", "large"),
        streams=STREAMS,
        uses=1.5,
        expandable=1.0,
        empties=0.6,
    ),
    "x_limits": Profile(
        sizes=("small", "medium", "large", "border"),
        streams=(0, 2),
        capacities=(*TIGHT, 500 * MIB, 1 * GIB),
        limited=0.9,
        fractions=0.1,
        settings=("collection",),
        uses=0.5,
        expandable=1.0,
    ),
    "x_max_split": Profile(
        sizes=("medium", "large", "large", "border"),
        streams=(0, 2),
        capacities=(160 * MIB, 300 * MIB, 500 * MIB, 80 * GIB),
        settings=("max_split",),
        uses=0.3,
        expandable=1.0,
    ),
    "x_toggled": Profile(
        sizes=("small", "medium", "large", "border"),
        streams=(0, 2),
        capacities=(*TIGHT, 500 * MIB, 80 * GIB),
        limited=0.3,
        settings=("collection", "roundup", "large_segment"),
        changes=0.5,
        uses=0.5,
        expandable=0.5,
        toggles=1.5,
    ),
    "x_pools": Profile(
        sizes=("small", "medium", "large"),
        streams=(0, 2),
        capacities=(*TIGHT, 500 * MIB, 80 * GIB),
        limited=0.2,
        pools=1.5,
        uses=0.5,
        expandable=1.0,
        toggles=0.3,
    ),
    "x_lenders": Profile(
        sizes=("small", "medium", "medium", "border"),
        streams=(0, 2),
        capacities=(60 * MIB, 100 * MIB, 150 * MIB),
        pools=0.4,
        uses=0.5,
        lends=True,
        expandable=0.7,
        toggles=0.5,
    ),
    "x_failures": Profile(
        sizes=("small", "medium", "large", "border"),
        streams=(0, 2),
        capacities=(*TIGHT, 80 * GIB),
        failures=3.0,
        fails=("create", "create", "reserve", None),
        uses=0.5,
        expandable=1.0,
        toggles=0.2,
    ),
    "x_too_large": Profile(  # requests that no range is large enough for
        sizes=("medium", "large", "huge"),
        streams=(0, 2),
        capacities=TIGHT,
        expandable=1.0,
        toggles=0.3,
        uses=0.3,
        resizes=0.2,
        pools=0.3,
    ),
    "x_equals": Profile(
        sizes=("equal", "equal", "large"),
        capacities=(100 * MIB, 300 * MIB, 1 * GIB),
        empties=1.0,
        expandable=0.5,
        toggles=1.5,
    ),
    "x_resized": Profile(
        sizes=("small", "medium", "large"),
        streams=(0, 2),
        capacities=TIGHT,
        resizes=0.5,
        pools=0.3,
        expandable=1.0,
    ),
    "x_grown": Profile(  # a device that grows may fill a range with one block
        sizes=("medium", "large", "large", "large"),
        streams=STREAMS,
        capacities=(60 * MIB, 500 * MIB, 1 * GIB),
        limited=0.9,
        settings=("collection",),
        resizes=1.5,
        expandable=0.7,
        toggles=2.0,
    ),
    "x_everything": Profile(
        sizes=("tiny", "small", "medium", "large", "border", "power"),
        streams=STREAMS,
        capacities=(*TIGHT, 500 * MIB, 1 * GIB, 80 * GIB),
        limited=0.5,
        settings=("collection", "roundup", "large_segment"),
        changes=0.15,
        fractions=0.1,
        uses=1.0,
        failures=0.5,
        fails=("create", "reserve", None),
        pools=0.8,
        resizes=0.1,
        expandable=0.8,
        toggles=0.3,
    ),
}
#: What upstream does not survive: it leaves pages in their slots, and ends the process when it
#: gives such a range back; and it destroys a released pool under its live blocks. For ours and the
#: model that rolls back.
BROKEN: dict[str, Profile] = {
    "x_broken": Profile(
        sizes=("small", "medium", "large", "border"),
        streams=(0, 2),
        capacities=(*TIGHT, 80 * GIB),
        failures=3.0,
        fails=("create", "reserve", "map", "access", "malloc"),
        uses=0.5,
        expandable=1.0,
        toggles=0.2,
    ),
    "x_released": Profile(
        sizes=("small", "medium", "large"),
        streams=(0, 2),
        capacities=(*TIGHT, 500 * MIB, 80 * GIB),
        limited=0.2,
        pools=1.5,
        uses=0.5,
        empties=1.0,
        expandable=1.0,
        toggles=0.3,
        drains=False,
    ),
}
#: Of settings that 2.11 does not have.
NEWER: dict[str, Profile] = {
    "throws": Profile(
        sizes=("small", "medium", "large", "border"),
        streams=(0, 2),
        capacities=(*TIGHT, 500 * MIB),
        limited=0.3,
        fractions=0.2,
        settings=("throw", "collection", "max_split"),
        changes=0.3,
        uses=0.3,
        pools=0.5,
    ),
    "x_throws": Profile(
        sizes=("small", "medium", "large", "border"),
        capacities=(*TIGHT, 500 * MIB),
        fractions=0.2,
        settings=("throw",),
        changes=0.3,
        resizes=0.1,
        expandable=0.8,
        toggles=0.3,
    ),
    "x_reserve": Profile(
        sizes=("small", "medium", "large", "large", "huge"),
        streams=(0, 2),
        capacities=(*TIGHT, 500 * MIB, 2 * GIB),
        limited=0.6,
        settings=("reserve", "collection"),
        changes=0.2,
        resizes=0.1,
        uses=0.3,
        pools=0.3,
        expandable=0.9,
        toggles=0.3,
    ),
}
#: Captures of graphs: one or several at a time, which other streams join.
CAPTURES: dict[str, Profile] = {
    "captures": Profile(
        streams=STREAMS, uses=1.5, captures=2.0, inside=True, capacities=(*TIGHT, 80 * GIB)
    ),
    "captures_pools": Profile(
        streams=STREAMS,
        uses=1.0,
        captures=2.0,
        inside=True,
        pools=1.5,
        capacities=(*TIGHT, 80 * GIB),
    ),
    "captures_reuse": Profile(
        sizes=("small", "medium", "equal"),
        streams=STREAMS,
        uses=3.0,
        captures=4.0,
        inside=True,
        reuses=True,
        capacities=(*TIGHT, 80 * GIB),
    ),
    "x_captures": Profile(
        sizes=("small", "medium", "large"),
        streams=STREAMS,
        uses=1.0,
        captures=2.0,
        inside=True,
        capacities=(*TIGHT, 80 * GIB),
        expandable=0.8,
        toggles=0.3,
    ),
}
ALL = PROFILES | EXPANDABLE | BROKEN | NEWER | CAPTURES
HOMES = dict.fromkeys((*PROFILES, *CAPTURES), "test_caching_beside_pytorch.py") | dict.fromkeys(
    (*EXPANDABLE, *BROKEN, *NEWER), "test_expandable_beside_pytorch.py"
)


# Sizes and settings ----------------------------------------------------------------------------


def random_size(rng: random.Random, kind: str) -> int:
    """In bytes, from 1."""
    if kind == "tiny":
        return rng.randrange(1, 8 * KIB)
    if kind == "small":
        return rng.randrange(1, MIB)
    if kind == "medium":
        return rng.randrange(MIB, 12 * MIB)
    if kind == "large":
        return rng.randrange(10 * MIB, 70 * MIB)
    if kind == "huge":
        return rng.randrange(60 * MIB, 500 * MIB)
    if kind == "equal":
        return rng.choice((512 * KIB, 4 * MIB, 4 * MIB, 12 * MIB, 24 * MIB))
    if kind == "power":
        power = 1 << rng.randrange(9, 26)
        return power + power * rng.randrange(16) // 16 + rng.choice((-1, 0, 0, 1, 512))
    border = rng.choice(
        (512, KIB, MIB, 10 * MIB, 11 * MIB, 19 * MIB, 20 * MIB, rng.randrange(1, 20) * 2 * MIB)
    )
    return (
        border + rng.choice((-513, -512, -511, -1, 0, 0, 1, 511, 512, 513)) + 513 * (border < KIB)
    )


def random_divisions(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return str(1 << rng.randrange(7))
    keys = sorted(rng.sample([1 << power for power in range(9)], rng.randrange(1, 4)))
    items = [f"{key}:{rng.choice((0, 1, 2, 4, 8, 16))}" for key in keys]
    if rng.random() < 0.5:
        items.append(f">:{rng.choice((0, 1, 2, 8))}")
    return f"[{','.join(items)}]"


def random_settings(rng: random.Random, keys: Sequence[str], large: int) -> tuple[str, int]:
    """A text that is accepted, and the size of a large segment then in force, in MiB.

    Where a text is refused, upstream is left with a part of it (PyTorch's behaviour, 2.18).
    """
    chosen = [key for key in keys if len(keys) == 1 or rng.random() < 0.5]
    words = []
    if "large_segment" in chosen:
        large = rng.choice((11, 12, 15, 20, 20, 32, 40))
        words.append(f"large_segment_size_mb:{large}")
    if "max_split" in chosen:
        words.append(f"max_split_size_mb:{large + rng.choice((0, 1, 4, 12, 20, 44))}")
        if rng.random() < 0.4:
            words.append(f"max_non_split_rounding_mb:{large + rng.choice((0, 1, 10, 80))}")
    if "collection" in chosen:
        words.append(f"garbage_collection_threshold:{rng.choice((0.05, 0.3, 0.5, 0.8, 0.95))}")
    if "throw" in chosen:
        words.append(f"throw_on_cudamalloc_oom:{rng.random() < 0.8}")
        if rng.random() < 0.3:
            words.append(f"per_process_memory_fraction:{rng.choice((0.3, 0.6, 1.0))}")
    if "reserve" in chosen:
        words.append(f"expandable_segments_reserve:{rng.choice(('0.1', '0.25', '0.5', '1', '1G'))}")
    if "roundup" in chosen:
        words.append(f"roundup_power2_divisions:{random_divisions(rng)}")
    rng.shuffle(words)
    return ",".join(words), large


# Histories -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class History:
    """`options` make the subject, with the version `torch`, `capacity` and `settings`."""

    profile: str
    seed: int
    options: dict[str, Any]
    operations: list[Operation]


@dataclass
class PoolState:
    """What the generator knows of a private pool."""

    references: int = 0
    is_open: bool = False
    lends: bool = False
    was_released: bool = False


@dataclass
class Writer:
    """Writes one history, for a version."""

    profile: Profile
    rng: random.Random
    torch: str
    operations: list[Operation] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)
    slots: int = 0
    large: int = 20
    deferred: int = 0  # freed while gated, since events were last polled
    current: int = 0  # the stream
    capturing: dict[int, int] = field(default_factory=dict)  # stream -> the first of its capture
    made_on: dict[int, int] = field(default_factory=dict)  # slot -> stream
    inside: set[int] = field(default_factory=set)  # slots whose use was recorded in a capture
    pools: dict[Pool, PoolState] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        rng, profile = self.rng, self.profile
        text, self.large = random_settings(rng, profile.settings, self.large)
        if profile.reuses:
            text = f"{text},graph_capture_record_stream_reuse:True".lstrip(",")
        if profile.expandable:
            on = rng.random() < profile.expandable
            text = f"{text},expandable_segments:{on}".lstrip(",")
        if rng.random() < profile.limited and "per_process" not in text:
            fraction = rng.choice((0.3, 0.5, 0.71, 0.9, 1.0))
            text = f"{text},per_process_memory_fraction:{fraction}".lstrip(",")
        capacity = rng.choice(profile.capacities)
        # Ranges from low addresses up must not reach the blocks, which begin at 1 TiB.
        bases = (1 << 44, 1 << 36) if capacity <= 2 * GIB else (1 << 44,)
        return {
            "capacity": capacity,
            "settings": text or None,
            "gap": rng.choice((0, 0, 512, 2 * MIB)),
            "placement": rng.choice(("rise", "reuse", "fall")),
            "reserve_base": rng.choice(bases),
            "torch": self.torch,
        }

    def write(self, steps: int) -> None:
        profile = self.profile
        weights: dict[Callable[[], None], float] = {
            self.allocate: 5,
            self.free: 4.2,
            self.use: profile.uses,
            self.steer: profile.uses,
            self.empty: profile.empties * 0.3,
            self.fail: profile.failures * 0.3,
            self.change_settings: profile.changes * 0.3,
            self.change_fraction: profile.fractions,
            self.change_pools: profile.pools,
            self.change_capture: profile.captures,
            self.toggle: profile.toggles * 0.3,
            self.resize: profile.resizes,
            self.do_odd: profile.odd,
        }
        every = self.rng.choice((1, 3, 10))
        self.record_history()
        if profile.lends:
            self.fill_lender()
        for step in range(steps):
            self.rng.choices(list(weights), list(weights.values()))[0]()
            if step % every == 0:
                self.operations += [("stats",), ("snapshot",)]
        self.drain()
        self.operations += [("stats",), ("snapshot",), ("calls",), ("trace",)]

    def do(self, *operation: Any) -> None:
        self.operations.append(operation)

    # Blocks

    @property
    def in_scope(self) -> bool:
        return any(pool.is_open for pool in self.pools.values())

    @property
    def is_gated(self) -> bool:
        """Whether events are put off: with 2.15 by captures alone."""
        return self.in_scope if self.torch == "2.11" else self.current in self.capturing

    def allocate(self) -> None:
        self.slots += 1
        nbytes = random_size(self.rng, self.rng.choice(self.profile.sizes))
        name = self.rng.choice(("malloc", "malloc", "allocate"))
        stream = self.rng.choice(self.profile.streams)
        self.do(name, nbytes, stream, self.slots)
        self.live.append(self.slots)
        self.made_on[self.slots] = stream
        if name == "allocate":
            self.current = stream
        if not self.is_gated:
            self.deferred = 0

    def free(self) -> None:
        if not self.live:
            return
        at = self.rng.choice((self.rng.randrange(len(self.live)), len(self.live) - 1, 0))
        if not self.must_stay(self.live[at]):
            self.free_slot(self.live.pop(at))

    def must_stay(self, slot: int) -> bool:
        """Upstream records the events of what was freed in a scope in the hash order of its
        records' addresses (PyTorch's behaviour, 2.15), so that there is one at most."""
        if slot in self.inside:
            return not self.is_gated
        return slot in self.recorded and self.is_gated and not self.may_defer

    @property
    def may_defer(self) -> bool:
        return not self.deferred and not self.inside

    def free_slot(self, slot: int) -> None:
        if slot in self.recorded and self.is_gated:
            self.deferred += 1
        self.recorded.discard(slot)
        self.inside.discard(slot)
        self.do("free_slot", slot)

    def use(self) -> None:
        # Upstream forgets a use that is recorded there and freed there (row 34b). One that is freed
        # later, or reused in its capture, stays in a table by the record's address, where a later
        # block may find it.
        if not self.live or (self.torch == "2.11" and self.in_scope and not self.profile.reuses):
            return
        slots, streams = self.live, list(STREAMS)
        if self.profile.reuses:
            if not self.is_gated:
                return
            if self.rng.random() < 0.8:  # what a graph can prove
                streams = sorted(self.capturing)
                slots = [slot for slot in slots if self.made_on[slot] in streams] or slots
        slot = self.rng.choice(slots)
        if self.is_gated and slot not in self.inside:
            if not (self.profile.inside and self.may_defer):
                return
            self.inside.add(slot)
        self.recorded.add(slot)
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            self.do("record_stream_slot", slot, self.rng.choice(streams))

    def steer(self) -> None:
        name = self.rng.choice(("hold", "hold", "finish", "finish_events"))
        count = (self.rng.randrange(1, 4),) if name == "finish_events" else ()
        self.do(name, self.rng.choice(STREAMS), *count)

    def drain(self) -> None:
        """Leaves no live block and no cache but that of private pools."""
        for first in sorted(set(self.capturing.values())):
            self.end_capture(first)
        for pool in self.pools:
            self.close_scope(pool)
        for slot in self.live:
            self.free_slot(slot)
        self.live.clear()
        self.do("empty_cache")

    def change_capture(self) -> None:
        """Begins a capture, ends it, gives it work, or lets a stream join it or be the current."""
        firsts = sorted(set(self.capturing.values()))
        most = 1 if self.profile.reuses else 2
        if not firsts or (len(firsts) < most and self.rng.random() < 0.1):
            self.begin_capture()
        elif self.rng.random() < 0.2:
            self.end_capture(self.rng.choice(firsts))
        else:
            steps = [self.work, self.work, self.join, self.switch]
            self.rng.choice([*steps, *[self.fork] * 4] if self.profile.reuses else steps)()

    def begin_capture(self) -> None:
        free = [stream for stream in STREAMS if stream not in self.capturing]
        if not free:
            return
        first = self.rng.choice(free)
        if self.profile.reuses:
            self.open_scope_of_capture()
        self.capturing[first] = first
        if self.torch != "2.11":
            self.do("mark_capture", True)
        self.do("capture", first, True)
        self.current = first

    def open_scope_of_capture(self) -> None:
        """Of a new pool, or of one that others share. To release one twice is an internal error."""
        new = [pool for pool in POOLS if pool not in self.pools]
        pool = self.rng.choice(new + self.usable())
        self.pools.setdefault(pool, PoolState())
        self.do("begin_pool", pool, "all")
        self.pools[pool].references += 1
        self.pools[pool].is_open = True

    def end_capture(self, first: int) -> None:
        """Also frees what must be freed in it."""
        self.do("capture", first, True)
        self.current = first
        for slot in sorted(self.inside):
            self.live.remove(slot)
            self.free_slot(slot)
        self.do("capture", first, False)
        self.capturing = {one: other for one, other in self.capturing.items() if other != first}
        if self.torch != "2.11":
            self.do("mark_capture", False)
        if self.profile.reuses:
            self.leave_scope()
            if len(self.usable()) > 1 or sum(state.references for state in self.pools.values()) > 1:
                self.release_pool()

    def work(self) -> None:
        self.do("capture_work", self.rng.choice(sorted(self.capturing)))

    def join(self) -> None:
        """A stream waits for one that captures; of another capture, CUDA refuses that."""
        on = self.rng.choice(sorted(self.capturing))
        first = self.capturing[on]
        stream = self.rng.choice(
            [one for one in STREAMS if self.capturing.get(one, first) == first]
        )
        self.capturing[stream] = first
        self.do("capture_wait", stream, on)

    def fork(self) -> None:
        """Another stream uses a block, which is freed; most often its own stream then waits for
        that, and may have the block again."""
        mine = sorted(self.capturing)
        fresh = [slot for slot in self.live if slot not in self.recorded]
        slots = [slot for slot in fresh if self.made_on[slot] in mine]
        if not (slots and self.is_gated and self.may_defer):
            return
        slot, other = self.rng.choice(slots), self.rng.choice(STREAMS)
        if other not in mine:
            self.do("capture_wait", other, self.made_on[slot])
            self.capturing[other] = self.capturing[self.made_on[slot]]
        self.recorded.add(slot)
        self.do("record_stream_slot", slot, other)
        self.do("capture_work", other)
        self.live.remove(slot)
        self.free_slot(slot)
        if self.rng.random() < 0.7:
            self.do("capture_wait", self.made_on[slot], other)
            self.deferred = 0  # from the allocation on
        self.slots += 1
        self.do("malloc", random_size(self.rng, "medium"), self.made_on[slot], self.slots)
        self.live.append(self.slots)
        self.made_on[self.slots] = self.made_on[slot]

    def switch(self) -> None:
        self.current = self.rng.choice(STREAMS)
        self.do("capture", self.current, self.current in self.capturing)

    def empty(self) -> None:
        self.do("empty_cache")

    def fail(self) -> None:
        codes = (OUT_OF_MEMORY, OUT_OF_MEMORY, LAUNCH_FAILURE)
        if self.profile.expandable:
            self.fail_mapping()
        else:
            self.do("fail_at", self.rng.randrange(1, 4), self.rng.choice(codes))

    def fail_mapping(self) -> None:
        kind = self.rng.choice(self.profile.fails)
        code = self.rng.choice((OUT_OF_MEMORY, LAUNCH_FAILURE))
        if kind in (None, "create") and self.profile not in BROKEN.values():
            code = OUT_OF_MEMORY  # any other leaves pages behind, upstream
        self.do("fail_at", self.rng.randrange(1, 6), code, kind)

    def do_odd(self) -> None:
        self.rng.choice(
            (
                # Only the way that a tensor takes refuses this at once (row 20); ours always does.
                self.ask_too_much,
                lambda: self.do("malloc", 0),
                lambda: self.do("free", 0),
                lambda: self.do("free", 12345),
                lambda: self.do("reset_peak_stats"),
                lambda: self.do("reset_accumulated_stats"),
                lambda: self.do("memory_fraction"),
                lambda: self.do("trace"),
                self.record_history,
            )
        )()

    def ask_too_much(self) -> None:
        self.do("allocate", 1 << 60)
        self.current = 0

    def record_history(self) -> None:
        # Off first: upstream would go on with the entries it has, ours starts anew.
        self.do("record_history", False, 1)
        known = ACTIONS if self.profile.expandable else SKIPPABLE
        skipped = self.rng.sample(known, self.rng.choice((0, 0, 1, 2)))
        if self.profile.pools and "snapshot" not in skipped:
            skipped.append("snapshot")  # ours takes one pool's out of that of all
        self.do("record_history", True, self.rng.choice((1 << 20, 1 << 20, 50, 1)), skipped)

    # Settings

    def change_settings(self) -> None:
        text, self.large = random_settings(self.rng, self.profile.settings, self.large)
        # With the limit of splitting lowered, upstream offers a part of a segment to the device
        # (row 45d), but only where the device is full.
        if "max_split" in text and not self.profile.lowers:
            self.drain()
        self.do("set_settings", text)

    def toggle(self) -> None:
        on = f"expandable_segments:{self.rng.random() < 0.5}"
        # Alone, it also puts the settings that are not sticky back to their defaults.
        keys = [key for key in self.profile.settings if key != "max_split"]
        text, self.large = random_settings(self.rng, keys, self.large)
        self.do("set_settings", f"{text},{on}".lstrip(",") if self.rng.random() < 0.7 else on)

    def resize(self) -> None:
        self.do("resize", self.rng.choice(TIGHT))

    def change_fraction(self) -> None:
        fraction = self.rng.choice((0.0, 0.2, 0.4, 0.5, 0.6, 0.77, 0.9, 1.0, 1.0, 1.5))
        self.do("set_memory_fraction", fraction)

    # Private pools

    def change_pools(self) -> None:
        self.rng.choice(
            (
                self.open_scope,
                self.open_scope,
                self.leave_scope,
                self.leave_scope,
                self.release_pool,
                self.lend,
                self.refuse_splits,
                self.ask_pool,
            )
        )()

    def usable(self) -> list[Pool]:
        return [pool for pool, state in self.pools.items() if state.references]

    def open_scope(self) -> None:
        fresh = [pool for pool in POOLS if pool not in self.pools]
        closed = [pool for pool in self.usable() if not self.pools[pool].is_open]
        if fresh and (not closed or self.rng.random() < 0.3):
            pool = self.rng.choice(fresh)
            self.pools[pool] = PoolState()
            if self.rng.random() < 0.7:  # or the scope makes it
                self.pools[pool].references += 1
                self.do("create_pool", pool)
        elif closed:
            pool = self.rng.choice(closed)
        else:
            return
        state = self.pools[pool]
        streams: list[str | int] = ["all", "none", *self.profile.streams]
        # A lender whose scope is open for others is an internal error upstream (row 60d).
        self.do("begin_pool", pool, "all" if state.lends else self.rng.choice(streams))
        state.references += 1
        state.is_open = True

    def leave_scope(self) -> None:
        opened = [pool for pool, state in self.pools.items() if state.is_open]
        if opened:
            self.close_scope(self.rng.choice(opened))

    def close_scope(self, pool: Pool) -> None:
        if self.pools[pool].is_open:
            self.pools[pool].is_open = False
            self.do("end_pool", pool)

    def release_pool(self) -> None:
        pools = self.usable()
        if not pools:
            return
        pool = self.rng.choice(pools)
        state = self.pools[pool]
        if state.references == 1 and self.profile.expandable and self.profile.drains:
            # Upstream counts a released pool's mappings and unmappings apart, and destroys a pool
            # under its live blocks (PyTorch's behaviour, 2.16).
            self.drain()
        if state.references == 1:
            # A scope of a pool that nobody refers to, and a lender that is gone, are internal
            # errors upstream (PyTorch's behaviour, 2.14).
            self.close_scope(pool)
            if state.lends:
                state.lends = False
                self.do("set_use_on_oom", pool, False)
            state.was_released = True
        state.references -= 1
        self.do("release_pool", pool)
        if state.was_released and not self.is_gated and self.rng.random() < 0.5:
            self.do("empty_cache", pool)

    def lend(self) -> None:
        pools = [pool for pool in self.usable() if not self.pools[pool].is_open]
        if pools:
            pool = self.rng.choice(pools)
            self.pools[pool].lends = self.rng.random() < 0.8
            self.do("set_use_on_oom", pool, self.pools[pool].lends)

    def fill_lender(self) -> None:
        pool = POOLS[0]
        self.pools[pool] = PoolState(references=2, lends=True)
        self.do("create_pool", pool)
        self.do("set_use_on_oom", pool, True)
        self.do("begin_pool", pool)
        for _ in range(4):
            self.allocate()
        while self.live:
            self.free_slot(self.live.pop())
        self.do("end_pool", pool)

    def refuse_splits(self) -> None:
        pools = self.usable()
        if pools and self.rng.random() < 0.3:
            self.do("set_no_split", self.rng.choice(pools))

    def ask_pool(self) -> None:
        for pool in self.usable():
            self.do("pool_use_count", pool)
        pool = self.rng.choice([*self.pools, UNKNOWN_POOL])
        self.do("snapshot", pool)
        # By the id of a released pool: an internal error upstream while a scope is open (row 56b).
        # With expandable segments upstream may know such a pool for ever, though it holds nothing
        # (PyTorch's behaviour, 2.16), and counts a wait for it each time.
        released = pool in self.pools and self.pools[pool].was_released
        miscounted = self.profile.expandable and self.profile.drains
        if not (released and (self.is_gated or miscounted)):
            self.do("empty_cache", pool)


def make_history(profile: str, seed: int, steps: int | None = None, torch: str = NEWEST) -> History:
    """The history of this profile and seed, of 60 to 400 steps or as many as are given."""
    rng = random.Random(f"{profile} {seed}")
    writer = Writer(ALL[profile], rng, torch)
    options = writer.options()
    chosen = rng.choice((60, 150, 400))
    writer.write(chosen if steps is None else steps)
    return History(profile, seed, options, writer.operations)


# Comparing -------------------------------------------------------------------------------------


def plain(answer: Any) -> Any:
    """Of a failure only its kind counts."""
    return f"a failure: {answer.kind}" if isinstance(answer, Failure) else answer


def run_alone(make: Make, history: History, operations: list[Operation]) -> list[Any]:
    subject = make(**history.options)
    try:
        return [plain(answer) for answer in subject.run(operations)]
    finally:
        subject.close()


def first_index(history: History, operations: list[Operation], a: Make, b: Make) -> int | None:
    """The first operation that is answered differently."""
    answers = run_alone(a, history, operations), run_alone(b, history, operations)
    for index, (first, second) in enumerate(zip(*answers, strict=True)):
        if first != second:
            return index
    return None


def first_difference(history: History, a: Make, b: Make) -> str | None:
    """What the two subjects answer differently first, as a text that names the operation and how to
    repeat it; None where they agree.

    Once they differ, both are run again and asked everything after every operation, so that the
    operation is the one that went wrong.
    """
    index = first_index(history, history.operations, a, b)
    if index is None:
        return None
    probes: list[Operation] = [("calls",), ("stats",), ("snapshot",)]
    probed = [
        probe for operation in history.operations[: index + 1] for probe in (operation, *probes)
    ]
    index = first_index(history, probed, a, b)
    if index is None:
        return f"{history.profile} {history.seed}: only where nothing else is asked"
    answers = [run_alone(make, history, probed[: index + 1])[-1] for make in (a, b)]
    step = index - index % 4
    own = [operation for operation in probed[: step + 1] if operation not in probes]
    before = "\n  ".join(map(repr, own[-6:]))
    return (
        f"{history.profile}, seed {history.seed}, {history.options}\n"
        f"operation {len(own)} is answered differently to {probed[index]!r}; the last ones:\n"
        f"  {before}\n{describe(*answers)}\n"
        f"repeat with BFC_SEED={history.seed} pytest tests/policies/{HOMES[history.profile]} "
        f"-m 'peers or not peers' -k '{history.profile} and {history.options['torch']}'"
    )


def assert_they_agree(profile: str, torch: str, seeds: Iterable[int], a: Make, b: Make) -> None:
    """Both subjects answer alike in the histories of these seeds, or of BFC_SEED."""
    for seed in GIVEN_SEED or seeds:
        difference = first_difference(make_history(profile, seed, torch=torch), a, b)
        assert difference is None, difference


def describe(first: Any, second: Any) -> str:
    """The parts of two answers that differ, a few of them."""
    if isinstance(first, dict) and isinstance(second, dict):
        parts = [
            f"{key}: {first.get(key)!r} against {second.get(key)!r}"
            for key in {**first, **second}
            if first.get(key) != second.get(key)
        ]
    elif isinstance(first, list) and isinstance(second, list):
        longest = max(len(first), len(second))
        padded = [[*items, *[None] * (longest - len(items))] for items in (first, second)]
        different = ((at, one, two) for at, (one, two) in enumerate(zip(*padded, strict=True)))
        parts = [
            f"[{at}] {describe(one, two)}"
            for at, one, two in islice((row for row in different if row[1] != row[2]), 3)
        ]
    else:
        parts = [f"{first!r} against {second!r}"]
    return "; ".join(parts[:12])
