"""What the dump of a BFC allocator says: TensorFlow's and XLA's out-of-memory dump."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from bfc.snapshots.snapshot import BIN_COUNT, ChunkInfo, RegionInfo, Snapshot, Stats, bin_index
from bfc.units import format_bytes
from bfc_tools.study.logs.sizes import Printed

#: Whose a piece of memory is shown as that no line of a damaged dump speaks of.
NOT_IN_LOG = "(not in the log)"
#: The most chunks that are kept of one dump, at 17 bytes each. Later ones are counted.
MOST_CHUNKS = 1 << 22


@dataclass
class Region:
    """The chunks of one region, in the order of their addresses."""

    size: int | None = None  # as its own line says it
    address: array[int] = field(default_factory=lambda: array("Q"))
    nbytes: array[int] = field(default_factory=lambda: array("Q"))
    in_use: array[int] = field(default_factory=lambda: array("B"))
    names: dict[int, str] = field(default_factory=dict)  # by the number of the chunk
    waits: set[int] = field(default_factory=set)  # free chunks that the device may still use
    is_ended: bool = False  # whether a chunk said that none follows
    has_gaps: bool = False

    @property
    def start(self) -> int:
        """The address of the first chunk."""
        return self.address[0] if self.address else 0

    @property
    def end(self) -> int:
        """The address behind the last chunk."""
        return self.address[-1] + self.nbytes[-1] if self.address else 0

    @property
    def is_whole(self) -> bool:
        """Whether its chunks cover it, as far as one can tell."""
        covered = self.end - self.start
        return not self.has_gaps and (self.size is None or covered == self.size)


@dataclass
class Dump:
    """One dump, as far as it was found."""

    allocator: str = ""
    line: int = 0  # of the log, where it begins
    last_line: int = 0
    #: What was asked for, rounded up to whole units of 256 bytes, if a line says so.
    asked: Printed | None = None
    regions: list[Region] = field(default_factory=list)
    bins: dict[int, tuple[int, int]] = field(default_factory=dict)  # chunks, and those in use
    #: Figures at its end: "pool", "limit", "available", "in use", "sum", "largest free", "gap", ...
    figures: dict[str, Printed] = field(default_factory=dict)
    occupancy: str = ""
    grows: bool | None = None
    end: str = ""  # "lower" or "upper", of an allocator that has two
    chunks: int = 0
    left_out: int = 0  # chunks for which there was no room
    #: Whether lines of another dump stood between its own, so that some may have gone to the other.
    is_mixed: bool = False
    has_order: bool = False  # whether its chunks name their successors
    is_whole: bool = False  # whether it has no faults, once it is over

    @property
    def live(self) -> int:
        """The bytes in chunks in use."""
        return sum(
            size
            for region in self.regions
            for size, used in zip(region.nbytes, region.in_use, strict=True)
            if used
        )

    def free(self) -> Iterator[int]:
        """The bytes of each free chunk, without those that the device may still use."""
        for region in self.regions:
            for number, size in enumerate(region.nbytes):
                if not region.in_use[number] and number not in region.waits:
                    yield size

    @property
    def listed(self) -> int:
        """The bytes of all chunks."""
        return sum(sum(region.nbytes) for region in self.regions)

    def faults(self) -> list[str]:
        """What is missing, or does not agree with itself. A dump without faults is whole: each
        figure of it is there twice, and both agree."""
        if not self.regions:
            return ["it lists no chunks"]
        found = list(self._faults_of_regions())
        found += self._faults_of_bins()
        for name, nbytes, what in (
            ("pool", self.listed, "its chunks have"),
            ("sum", self.live, "its chunks in use have"),
            ("in use", self.live, "its chunks in use have"),
        ):
            said = self.figures.get(name)
            if said is not None and not said.may_be(nbytes):
                found.append(
                    f"{what} {format_bytes(nbytes)}, and a line below says "
                    f"{format_bytes(said.nbytes)}"
                )
        if not self.bins and not {"pool", "sum", "in use"} & self.figures.keys():
            found.append("it ends before its figures")
        if self.left_out:
            found.append(f"there was no room for {self.left_out} more chunks")
        return list(dict.fromkeys(found))

    def _faults_of_regions(self) -> Iterator[str]:
        cut = [region for region in self.regions if not region.is_whole]
        if cut:
            lacking = sum(max((it.size or it.end - it.start) - sum(it.nbytes), 0) for it in cut)
            yield f"lines are missing: {format_bytes(lacking)} of its regions are in none"
        elif self.has_order and not all(region.is_ended for region in self.regions):
            yield "its last lines are missing"

    def _faults_of_bins(self) -> Iterator[str]:
        if not self.bins:
            return
        all_chunks: Counter[int] = Counter()
        used: Counter[int] = Counter()
        for region in self.regions:
            for size, is_used in zip(region.nbytes, region.in_use, strict=True):
                number = bin_index(size)
                all_chunks[number] += 1
                used[number] += is_used
        gap = 1 if "gap" in self.figures else 0  # which is in no bin
        for number, (count, in_use) in self.bins.items():
            if in_use != used[number] or not count <= all_chunks[number] <= count + gap:
                yield (
                    f"the bins count {sum(count for count, _ in self.bins.values())} chunks, and "
                    f"{all_chunks.total()} are listed"
                )
                return
        if len(self.bins) < BIN_COUNT:
            yield f"{BIN_COUNT - len(self.bins)} lines of its bins are missing"

    def snapshot(self) -> Snapshot:
        """The chunks, as a snapshot of an allocator has them. What no line speaks of is a chunk in
        use of the owner `NOT_IN_LOG`. The dump does not say what was asked for in a chunk: it is
        taken to be the chunk's size."""
        regions = tuple(sorted(self._regions(), key=lambda region: region.ptr))
        limit, peak = self.figures.get("limit"), self.figures.get("peak in use")
        pool = sum(region.size for region in regions)
        stats = Stats(
            bytes_in_use=self.live,
            peak_bytes_in_use=max(self.live, 0 if peak is None else peak.nbytes),
            bytes_limit=pool if limit is None else limit.nbytes,
            bytes_reserved=pool,
            peak_bytes_reserved=pool,
            largest_free_block_bytes=max(self.free(), default=0),
            pool_bytes=pool,
            peak_pool_bytes=pool,
        )
        return Snapshot(self.allocator or "log", stats, regions)

    def _regions(self) -> Iterator[RegionInfo]:
        number = 0
        for region in self.regions:
            if not region.address:
                continue
            chunks: list[ChunkInfo] = []
            lacking = max((region.size or 0) - (region.end - region.start), 0)
            start = reached = region.start - (lacking if region.is_ended else 0)
            rows = zip(region.address, region.nbytes, region.in_use, strict=True)
            for at, (address, size, used) in enumerate(rows):
                if address > reached:
                    number += 1
                    chunks.append(_missing(reached, address - reached, number))
                number += 1
                asked, made = (size, number) if used else (0, -1)
                owner = region.names.get(at, "")
                waits = 1 if at in region.waits else 0
                state = "in use" if used else "free"
                chunks.append(
                    ChunkInfo(address, size, asked, made, state, freed_at_count=waits, owner=owner)
                )
                reached = address + size
            if lacking and not region.is_ended:
                number += 1
                chunks.append(_missing(reached, lacking, number))
                reached += lacking
            yield RegionInfo(start, reached - start, tuple(chunks))


def _missing(address: int, nbytes: int, number: int) -> ChunkInfo:
    return ChunkInfo(address, nbytes, nbytes, number, "in use", owner=NOT_IN_LOG)
