"""Frees that wait for other streams, in the slow model of PyTorch's allocator [2.11, 2.12, 2.15].

Numbers in brackets are the sections of the description of PyTorch's allocator.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from bfc.devices import Fence
from bfc_slow_models.torch_records import Chunk, PrivatePool
from bfc_slow_models.torch_words import Pool

if TYPE_CHECKING:
    from bfc_slow_models.torch_model import TorchModel


class Events:
    """The part of `TorchModel` that records events, and frees blocks when these are over."""

    def __init__(self, model: TorchModel) -> None:
        self.model = model
        self.queues: defaultdict[int, list[tuple[Fence, Chunk]]] = defaultdict(list)
        #: Freed while no event may be recorded.
        self.deferred: list[Chunk] = []

    def record(self, chunk: Chunk) -> None:
        chunk.events = len(chunk.uses)
        for stream in sorted(chunk.uses):
            self.queues[stream].append((self.model.device.fence(stream), chunk))
        chunk.uses.clear()

    def process(self) -> None:
        self.record_deferred()
        for stream in sorted(self.queues):
            while self.queues[stream] and self.queues[stream][0][0].done():
                self.pass_event(self.queues[stream].pop(0)[1])

    def wait(self, owner: PrivatePool | None = None) -> None:
        """Wait for all events, or for those of one private pool's blocks."""
        self.record_deferred()
        for stream in sorted(self.queues):
            for event, chunk in list(self.queues[stream]):
                if owner is None or chunk.pool.owner is owner:
                    event.wait()
                    self.queues[stream].remove((event, chunk))
                    self.pass_event(chunk)

    def pass_event(self, chunk: Chunk) -> None:
        chunk.events -= 1
        if not chunk.events:
            self.model.free_chunk(chunk)

    def defer(self, chunk: Chunk) -> None:
        """`markers` become the last nodes of all streams that use it; none if one does not
        capture."""
        self.deferred.append(chunk)
        chunk.markers.clear()
        device, streams = self.model.device, (chunk.stream, *chunk.uses)
        if all(device.capture_id(stream) for stream in streams):
            chunk.markers = {one for stream in streams for one in device.capture_terminals(stream)}

    def free_what_the_graph_orders(self, stream: int) -> None:
        """Frees what was deferred on this stream, if the graph has its uses before its next
        work. Upstream keeps the uses that were recorded in the capture [2.15]."""
        earlier = self.nodes_before(stream)
        for chunk in list(self.deferred):
            if chunk.stream == stream and chunk.markers and chunk.markers <= earlier:
                self.deferred.remove(chunk)
                chunk.uses.clear()
                self.model.free_chunk(chunk)

    def nodes_before(self, stream: int) -> set[int]:
        device = self.model.device
        found = set(device.capture_terminals(stream))
        while more := {node for one in found for node in device.capture_dependencies(one)} - found:
            found |= more
        return found

    def record_deferred(self, only: Pool | None = None) -> None:
        """Records events for what was freed in a scope, or for one pool's. Upstream forgets the
        uses recorded there [2.15]."""
        for chunk in [one for one in self.deferred if only in (None, one.pool.id)]:
            self.deferred.remove(chunk)
            chunk.uses -= chunk.scope_uses
            chunk.scope_uses.clear()
            self.record(chunk)
            if not chunk.events:
                self.model.free_chunk(chunk)
