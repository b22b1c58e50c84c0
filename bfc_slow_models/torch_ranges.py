"""Expandable segments, in the slow model of PyTorch's allocator: ranges of addresses whose memory
is mapped chunk by chunk, and the books over them.

A range is reserved whole and mapped in part. Its records stand in one list, as those of an ordinary
segment do, and those without memory lie in the pool's list of unmapped ones. Numbers in brackets
are the sections of the description of PyTorch's allocator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bfc.errors import SubAllocatorError
from bfc_slow_models.torch_device import Refused
from bfc_slow_models.torch_records import SMALL_SEGMENT, Chunk, Request, SubPool, round_up

if TYPE_CHECKING:
    from bfc_slow_models.torch_model import TorchModel


class Range:
    """A reservation in slots of one size. Each slot holds a page, or None.

    `device` has the calls for virtual memory that a source offers (`StandIn`). Where a call fails,
    upstream leaves what it has done so far, and the pages in their slots; with `rolls_back` all of
    that is undone, as ours does.
    """

    def __init__(self, device: Any, nbytes: int, slot: int, stream: int, rolls_back: bool) -> None:
        address = device.reserve(nbytes)
        if address is None:
            raise Refused("driver", "no addresses")
        self.device, self.stream, self.rolls_back = device, stream, rolls_back
        self.address: int = address
        self.nbytes, self.slot = nbytes, slot
        self.pages: list[int | None] = [None] * (nbytes // slot)

    def map(self, address: int, nbytes: int) -> int:
        """Map the slots that a piece touches; it begins at a slot. The bytes, 0 for no memory."""
        first, rest = divmod(address - self.address, self.slot)
        end = first + round_up(nbytes, self.slot) // self.slot
        assert rest == 0
        if self.rolls_back:
            return self._map_or_undo(first, end)
        return self._map(first, end)

    def _map(self, first: int, end: int) -> int:
        if not self._create(first, end):
            return 0
        for slot in range(first, end):
            self.device.map(self._start(slot), [self.pages[slot]])
        self.device.set_access(self._start(first), (end - first) * self.slot)
        return (end - first) * self.slot

    def _create(self, first: int, end: int) -> bool:
        for slot in range(first, end):
            if self.pages[slot] is not None:
                raise Refused("internal", "the slot holds a page that a failed call has left")
            self.pages[slot] = self.device.create(self.slot)
            if self.pages[slot] is None:
                self._release(first, slot)
                return False
        return True

    def _release(self, first: int, end: int) -> None:
        for slot in range(first, end):
            if self.pages[slot] is not None:
                self.device.release(self.pages[slot])
                self.pages[slot] = None

    def _map_or_undo(self, first: int, end: int) -> int:
        nbytes, address = (end - first) * self.slot, self._start(first)
        try:
            if not self._create(first, end):
                return 0
            self.device.map(address, self.pages[first:end])
        except SubAllocatorError:
            self._release(first, end)
            raise
        try:
            self.device.set_access(address, nbytes)
        except SubAllocatorError:
            self.device.unmap(address, nbytes)
            self._release(first, end)
            raise
        return nbytes

    def unmap(self, address: int, nbytes: int) -> tuple[int, int]:
        """Unmap the slots that lie wholly inside a piece: where they begin, and their bytes."""
        first = round_up(address - self.address, self.slot) // self.slot
        end = (address + nbytes - self.address) // self.slot
        if first >= end:
            return address, 0
        self.device.wait(self.stream)
        for slot in range(first, end):
            page, self.pages[slot] = self.pages[slot], None
            if page is None:
                raise Refused("other", "a failed call has unmapped the slot")
            self.device.unmap(self._start(slot), self.slot)
            self.device.release(page)
        return self._start(first), (end - first) * self.slot

    def _start(self, slot: int) -> int:
        return self.address + slot * self.slot


class Ranges:
    """The part of `TorchModel` that maps and unmaps."""

    def __init__(self, model: TorchModel) -> None:
        self.model = model

    # Searching [2.6]

    def best_of(self, fitting: list[Chunk], expandable: bool) -> Chunk | None:
        """Of the free blocks that are large enough, in order of size: the first one. In ranges, a
        hole is preferred to the end of a range that can grow. With the option off, none of a range.
        """
        if not expandable:
            return next((chunk for chunk in fitting if chunk.range is None), None)
        at = 0
        while at + 1 < len(fitting) and fitting[at].range is not None:
            if self.room(fitting[at + 1]) >= self.room(fitting[at]):
                break
            at += 1
        return fitting[at] if fitting else None

    def room(self, chunk: Chunk) -> int:
        """Its bytes, and those of the unmapped block behind it."""
        after = chunk.segment[chunk.segment.index(chunk) + 1 :]
        return chunk.size + (after[0].size if after and not after[0].mapped else 0)

    # Growing

    def grow_range(self, request: Request) -> Chunk | None:
        """A block of a range, mapped as far as need be. Where the device has not enough for all of
        it, what was mapped stays as free memory."""
        chunk = self.place_for(request) or self.reserve_range(request)
        if chunk is None:
            return None
        if not chunk.mapped and not self.map_chunk(chunk, min(chunk.size, request.size)):
            return None
        while chunk.size < request.size:
            after = chunk.segment[chunk.segment.index(chunk) + 1]
            if not self.map_chunk(after, min(request.size - chunk.size, after.size)):
                return None
            chunk = after
        chunk.pool.free.remove(chunk)
        if chunk.pool.owner is not None and not self.model.rolls_back:
            chunk.pool.owner.segments += 1
        return chunk

    def place_for(self, request: Request) -> Chunk | None:
        """The lowest place where free and unmapped blocks, one behind the other, are enough. It
        begins with an unmapped block, or with the one before such a block."""
        unmapped = [chunk for chunk in request.pool.unmapped if chunk.stream == request.stream]
        for chunk in sorted(unmapped, key=lambda chunk: chunk.address):
            at = chunk.segment.index(chunk)
            if at and not chunk.segment[at - 1].is_active:
                at -= 1
            room = 0
            for passed in chunk.segment[at:]:
                if passed.is_active or room >= request.size:
                    break
                room += passed.size
            if room >= request.size:
                return chunk.segment[at]
        return None

    def reserve_range(self, request: Request) -> Chunk | None:
        """A new range with nothing mapped: 9/8 of the device, as large as that is now, or less
        where the settings say so. 2.15 gives one back at once that is smaller than the request."""
        small = request.pool.kind == "small_pool"
        slot = SMALL_SEGMENT if small else self.model.settings.large_segment_size
        total = self.model.device.total_bytes
        wanted = self.model.settings.expandable_segments_reserve
        if isinstance(wanted, float):
            wanted = int(wanted * total)
        most = total + total // 8
        nbytes = round_up(most if wanted is None else min(wanted, most), slot)
        made = Range(self.model.device, nbytes, slot, request.stream, self.model.rolls_back)
        if self.model.rules.checks_range and nbytes < request.size:
            self.model.device.unreserve(made.address, nbytes)
            return None
        chunk = Chunk(
            made.address, nbytes, request.stream, request.pool, [], range=made, mapped=False
        )
        chunk.number = self.model.next_number()
        chunk.segment.append(chunk)
        self.model.segments.append(chunk.segment)
        request.pool.unmapped.append(chunk)
        return chunk

    def map_chunk(self, chunk: Chunk, nbytes: int) -> bool:
        """Map the first bytes of an unmapped block, and all of the slots that they touch."""
        assert chunk.range is not None
        address, mapped = chunk.address, chunk.range.map(chunk.address, nbytes)
        if not mapped:
            return False
        pool = chunk.pool
        pool.unmapped.remove(chunk)
        chunk.mapped = True
        if mapped < chunk.size:
            rest = self.beside(chunk, address + mapped, chunk.size - mapped, after=True)
            rest.mapped = False
            pool.unmapped.append(rest)
            chunk.size = mapped
        for neighbour in self.model.neighbours(chunk):
            self.model.merge(chunk, neighbour)
        pool.put(chunk)
        if pool.owner is not None and self.model.rolls_back:
            pool.owner.segments += mapped // chunk.range.slot
        self.model.statistics.count(pool, reserved_bytes=mapped)
        self.model.statistics.counters["num_device_alloc"] += 1
        self.model.history.add("segment_map", address, mapped, chunk.stream, pool.id)
        return True

    def beside(self, chunk: Chunk, address: int, size: int, after: bool) -> Chunk:
        """A new record in the same range, before or behind another."""
        made = Chunk(address, size, chunk.stream, chunk.pool, chunk.segment, range=chunk.range)
        made.number = chunk.number
        chunk.segment.insert(chunk.segment.index(chunk) + after, made)
        return made

    # Giving back

    def unmap_free(self, pool: SubPool) -> None:
        """Unmaps all slots that lie wholly in free blocks, and drops ranges that hold nothing any
        more."""
        for chunk in [chunk for chunk in pool.in_order() if chunk.range is not None]:
            self.unmap_chunk(chunk)
            if not chunk.is_split:
                self.drop_range(chunk)

    def unmap_chunk(self, chunk: Chunk) -> None:
        assert chunk.range is not None
        pool, end = chunk.pool, chunk.address + chunk.size
        address, unmapped = chunk.range.unmap(chunk.address, chunk.size)
        if not unmapped:
            return
        pool.free.remove(chunk)
        if chunk.address < address:
            pool.put(self.beside(chunk, chunk.address, address - chunk.address, after=False))
        if address + unmapped < end:
            start = address + unmapped
            pool.put(self.beside(chunk, start, end - start, after=True))
        chunk.address, chunk.size, chunk.mapped = address, unmapped, False
        for neighbour in self.model.neighbours(chunk):
            self.model.merge(chunk, neighbour)
        pool.unmapped.append(chunk)
        self.model.statistics.count(pool, reserved_bytes=-unmapped)
        if pool.owner is not None:
            if not pool.owner.segments:
                raise Refused("internal", "more unmappings than mappings of a pool")
            pool.owner.segments -= unmapped // chunk.range.slot if self.model.rolls_back else 1
        self.model.statistics.counters["num_device_free"] += 1
        self.model.history.add("segment_unmap", address, unmapped, chunk.stream, pool.id)

    def drop_range(self, chunk: Chunk) -> None:
        assert chunk.range is not None
        assert not chunk.mapped
        chunk.pool.unmapped.remove(chunk)
        self.model.segments.remove(chunk.segment)
        self.model.device.unreserve(chunk.range.address, chunk.range.nbytes)
