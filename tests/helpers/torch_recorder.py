"""PyTorch's policy in a few slow lines, which records what it does as a memory snapshot does.

Settings are the default ones, or another rounding; there are no limits and no private pools.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20


@dataclass
class Piece:
    address: int
    size: int
    requested: int = 0
    state: str = "inactive"


@dataclass
class Segment:
    address: int
    size: int
    stream: int
    is_small: bool
    pieces: list[Piece]


def plain_rounding(size: int) -> int:
    return max(512, -(-size // 512) * 512)


@dataclass
class Recorder:
    """`next_address(size)` says where a new segment stands."""

    next_address: Callable[[int], int]
    rounding: Callable[[int], int] = plain_rounding
    settings: dict[str, Any] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    trace: list[dict[str, Any]] = field(default_factory=list)

    def note(self, action: str, address: int, size: int, stream: int) -> None:
        time_us = 1_700_000_000_000_000 + len(self.trace)
        self.trace.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": stream,
                "time_us": time_us,
                "compile_context": "N/A",
                "user_metadata": "",
            }
        )

    def allocate(self, size: int, stream: int = 0) -> int:
        rounded = self.rounding(size)
        is_small = rounded <= MIB
        found = self._best_fit(rounded, stream, is_small) or self._grow(rounded, stream, is_small)
        segment, piece = found
        left = piece.size - rounded
        if left >= (512 if is_small else MIB + 1):
            rest = Piece(piece.address + rounded, left, piece.requested)
            segment.pieces.insert(segment.pieces.index(piece) + 1, rest)
            piece.size = rounded
        piece.requested, piece.state = size, "active_allocated"
        self.note("alloc", piece.address, size, stream)
        return piece.address

    def _best_fit(self, size: int, stream: int, is_small: bool) -> tuple[Segment, Piece] | None:
        fits = [
            (piece.size, piece.address, segment, piece)
            for segment in self.segments
            if segment.stream == stream and segment.is_small == is_small
            for piece in segment.pieces
            if piece.state == "inactive" and piece.size >= size
        ]
        return min(fits, key=lambda fit: fit[:2])[2:] if fits else None

    def _grow(self, size: int, stream: int, is_small: bool) -> tuple[Segment, Piece]:
        large = 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        nbytes = 2 * MIB if is_small else large
        address = self.next_address(nbytes)
        segment = Segment(address, nbytes, stream, is_small, [Piece(address, nbytes)])
        self.segments.append(segment)
        self.note("segment_alloc", address, nbytes, stream)
        return segment, segment.pieces[0]

    def find(self, address: int) -> tuple[Segment, Piece]:
        return next(
            (segment, piece)
            for segment in self.segments
            for piece in segment.pieces
            if piece.address == address
        )

    def free(self, address: int, waits: bool = False) -> None:
        segment, piece = self.find(address)
        assert piece.state == "active_allocated"
        piece.state = "active_pending_free"
        self.note("free_requested", address, piece.requested, segment.stream)
        if not waits:
            self.complete(address)

    def complete(self, address: int) -> None:
        segment, piece = self.find(address)
        assert piece.state == "active_pending_free"
        piece.state = "inactive"
        self.note("free_completed", address, piece.requested, segment.stream)
        at = segment.pieces.index(piece)
        for first, second in ((at, at + 1), (at - 1, at)):
            if first >= 0 and second < len(segment.pieces):
                low, high = segment.pieces[first], segment.pieces[second]
                if low.state == high.state == "inactive":
                    low.size += high.size
                    segment.pieces.remove(high)

    def release(self, address: int) -> None:
        segment = next(segment for segment in self.segments if segment.address == address)
        assert [piece.state for piece in segment.pieces] == ["inactive"]
        self.segments.remove(segment)
        self.note("segment_free", address, segment.size, segment.stream)

    def empty_cache(self) -> None:
        for segment in list(self.segments):
            if [piece.state for piece in segment.pieces] == ["inactive"]:
                self.release(segment.address)

    def live(self, state: str = "active_allocated") -> list[int]:
        return [
            piece.address
            for segment in self.segments
            for piece in segment.pieces
            if piece.state == state
        ]

    def layout(self) -> list[tuple[int, int, list[tuple[int, int, int]]]]:
        """(address, stream, [(address, size, requested or -1)]) of every segment."""
        return sorted(
            (
                segment.address,
                segment.stream,
                [
                    (
                        piece.address,
                        piece.size,
                        -1 if piece.state == "inactive" else piece.requested,
                    )
                    for piece in segment.pieces
                ],
            )
            for segment in self.segments
        )

    def snapshot(self, last: int | None = None) -> dict[str, Any]:
        """What `_snapshot()` gives, with only the last entries of the history."""
        trace = self.trace if last is None else self.trace[len(self.trace) - last :]
        return {
            "segments": [
                _segment(segment) for segment in sorted(self.segments, key=lambda s: s.address)
            ],
            "device_traces": [[dict(entry) for entry in trace]],
            "allocator_settings": self.settings,
            "external_annotations": [],
        }


def _segment(segment: Segment) -> dict[str, Any]:
    active = [piece for piece in segment.pieces if piece.state != "inactive"]
    return {
        "device": 0,
        "address": segment.address,
        "total_size": segment.size,
        "allocated_size": sum(p.size for p in active if p.state == "active_allocated"),
        "active_size": sum(piece.size for piece in active),
        "requested_size": sum(piece.requested for piece in active),
        "stream": segment.stream,
        "segment_type": "small" if segment.is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [
            {
                "address": piece.address,
                "size": piece.size,
                "requested_size": piece.requested,
                "state": piece.state,
                "frames": [],
            }
            for piece in segment.pieces
        ],
    }


def random_places(dice: random.Random) -> Callable[[int], int]:
    """Addresses that were never given before, in no order."""
    free = list(range(1 << 40, (1 << 40) + (4096 << 28), 1 << 28))
    dice.shuffle(free)
    return lambda size: free.pop()


def random_run(dice: random.Random, recorder: Recorder, steps: int) -> None:
    """Allocations of many sizes on three streams, frees of which some wait, and emptied caches."""
    for _ in range(steps):
        live, waiting = recorder.live(), recorder.live("active_pending_free")
        roll = dice.random()
        if roll < 0.5 or not live:
            recorder.allocate(random_size(dice), dice.choice([0, 0, 0, 0x7F01, 94]))
        elif roll < 0.85:
            recorder.free(dice.choice(live), waits=dice.random() < 0.2)
        elif roll < 0.97 and waiting:
            recorder.complete(dice.choice(waiting))
        elif roll > 0.98:
            recorder.empty_cache()


def random_size(dice: random.Random) -> int:
    top = dice.choice([600, 9000, 300_000, 1 << 20, 3 << 20, 12 << 20, 40 << 20])
    return dice.randint(1, top)


def replayed(trace: Any, recorder: Recorder) -> Iterator[tuple[int, int]]:
    """Runs a trace through a recorder: (its address, the recorded one) of each allocation.

    What gave memory back to the device is no request, and so no event: segments go when they went.
    """
    facts = trace.meta["torch"]
    gone = [entry for entry in facts["segment_events"] if entry[0] == "segment_free"]
    held: dict[int, int] = {}
    for number in range(len(trace) + 1):
        while gone and gone[0][1] == number:
            recorder.release(gone.pop(0)[2])
        if number == len(trace):
            return
        name = int(trace.id[number])
        if trace.op[number] == 1:
            recorder.free(held.pop(name))
        elif trace.op[number] == 0:
            stream = facts["streams"][trace.stream[number]]
            held[name] = recorder.allocate(int(trace.size[number]), stream)
            yield held[name], facts["addresses"][number]
