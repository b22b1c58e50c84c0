"""What TensorFlow's nightly build answered to random histories, kept, so that ours can be compared
with it where its wheel is not at hand. Nightly builds go from the index after some time.
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
from tensorflow_pairs import DEVICE_OPTIONS, arguments_of, options_of, play

import bfc
from bench.peers.tensorflow import NIGHTLY, TensorFlowBFC

FILE = Path(__file__).parents[1] / "recordings" / "answers" / "tensorflow_nightly.npz"
#: The answers where requests come from two ends.
ENDS_FILE = FILE.with_name("tensorflow_nightly_ends.npz")
HISTORIES = 300
ALIGNMENTS = (64, 64, 256, 512, 4096, 65536, 2 << 20)
FIGURES = (
    *("num_allocs", "bytes_in_use", "peak_bytes_in_use", "largest_alloc_size"),
    *("bytes_limit", "pool_bytes", "peak_pool_bytes", "largest_free_block_bytes"),
)


class Alone:
    """One allocator, and what it has answered: the place of each allocation, in units of 256 bytes
    from 1 on (0: refused), and a digest of the figures, the chunks and the calls of its device."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self.seen = hashlib.sha256()

    def noted(self, address: int) -> int:
        self.places.append((address - (1 << 40)) // 256 + 1 if address else 0)
        return address

    def see(self, figures: list[int], chunks: list[Any], calls: list[Any]) -> None:
        self.seen.update(repr((figures, chunks, calls)).encode())


class NightlyAlone(Alone):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.theirs = TensorFlowBFC(version=NIGHTLY, **options)
        self.deallocate = self.theirs.deallocate_raw
        self.fail_at = self.theirs.fail_at
        self.set_safe_frontier = self.theirs.set_safe_frontier

    def allocate(
        self, nbytes: int, freed_before: int = 0, alignment: int = 64, upper: bool = False
    ) -> int:
        place = self.theirs.allocate_raw(nbytes, freed_before, alignment=alignment, upper=upper)
        return self.noted(place)

    def compare(self) -> None:
        figures = self.theirs.stats()
        rows = self.theirs.memory_map()
        chunks = [(row["address"], row["size"], row["in_use"], row["bin"]) for row in rows]
        self.see([figures[name] for name in FIGURES], chunks, self.theirs.calls)


class OursAlone(Alone):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        device = {name: options[name] for name in DEVICE_OPTIONS if name in options}
        rest = arguments_of(options)
        self.device = bfc.SimulatedSubAllocator(device.pop("capacity"), **device)
        self.ours = bfc.BFCAllocator(self.device, strict=True, tensorflow="2.23", **rest)
        if options["timing_counter"]:
            self.ours.set_timing_counter(bfc.SharedCounter())
        self.deallocate = self.ours.deallocate_raw
        self.fail_at = self.device.fail_at
        self.set_safe_frontier = self.ours.set_safe_frontier

    def allocate(
        self, nbytes: int, freed_before: int = 0, alignment: int = 64, upper: bool = False
    ) -> int:
        asked: dict[str, Any] = {"freed_before": freed_before, "alignment": alignment}
        if upper:
            asked["allocation_end"] = "upper"
        try:
            return self.noted(self.ours.allocate_raw(nbytes, **asked))
        except bfc.OutOfMemoryError:
            return self.noted(0)

    def compare(self) -> None:
        figures = self.ours.stats()
        found = self.ours.snapshot().chunks()
        chunks = [(chunk.ptr, chunk.size, chunk.in_use, chunk.bin_num) for chunk in found]
        self.see([getattr(figures, name) for name in FIGURES], chunks, self.device.calls)


def answers_of(
    kind: type[NightlyAlone] | type[OursAlone], seed: int, partitioned: bool = False
) -> tuple[list[int], bytes]:
    """The places that an allocator gives in a seed's history, and the digest of what is seen."""
    rng = random.Random(seed)
    options = options_of(rng, partitioned)
    subject = kind(options)
    play(rng, subject, options, ALIGNMENTS)
    return subject.places, subject.seen.digest()


def write_answers(file: Path) -> None:
    """Write the answers of the nightly to one of the files."""
    answers = [answers_of(NightlyAlone, seed, file == ENDS_FILE) for seed in range(HISTORIES)]
    np.savez_compressed(
        file,
        version=NIGHTLY,
        places=np.concatenate([np.array(places, np.uint32) for places, _ in answers]),
        counts=np.array([len(places) for places, _ in answers], np.uint32),
        digests=np.frombuffer(b"".join(digest for _, digest in answers), np.uint8).reshape(-1, 32),
    )
