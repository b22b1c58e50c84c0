"""Runs a slow model next to an allocator. The model gets the same calls, and the same answers from
its sub-allocator."""

from __future__ import annotations

from typing import Any, Protocol

from bfc._core import SharedCounter
from bfc.policies._bfc import BFCAllocator
from bfc.policies._caching import CachingAllocator
from bfc.snapshots.snapshot import Snapshot
from bfc_slow_models.recorded_source import Differs, Tape, TapedDevice, TapedSource
from bfc_slow_models.tensorflow_model import GRANULE, Model, layout_of
from bfc_slow_models.torch_model import TorchModel
from bfc_slow_models.torch_records import MIN_BLOCK
from bfc_slow_models.torch_words import Failure, Segment


class Beside(Protocol):
    """A model. `allocate` returns an address, or None if the model refuses."""

    #: Whether it knows streams other than 0.
    knows_streams: bool
    #: Whether the comparison can go on after the model has refused a request.
    outlives_refusals: bool

    def allocate(self, nbytes: int, stream: int, freed_before: int) -> int | None: ...
    def free(self, ptr: int) -> None: ...
    def record_stream(self, ptr: int, stream: int) -> None: ...
    def release_free_regions(self) -> None: ...
    def clear_stats(self) -> None: ...
    def compare(self) -> None: ...
    def close(self) -> None: ...


def model_for(allocator: Any, tape: Tape) -> Beside | None:
    """The model of a fresh allocator of ours; None if it has none: for a policy that is not
    ours, or for options and sources that the model does not know."""
    source = tape.source
    if type(allocator) is BFCAllocator:
        known = source.granularity <= GRANULE
        known = known and not allocator.retry_seconds and not allocator.stream
        return BesideTensorFlow(allocator, tape) if known else None
    if type(allocator) is CachingAllocator:
        settings = allocator.snapshot().settings
        assert settings is not None
        # A limit of the whole device cannot be told from no limit here, but the model counts
        # differently.
        ambiguous = settings.garbage_collection_threshold > 0 and allocator.memory_fraction == 1.0
        known = source.granularity <= MIN_BLOCK and source.largest_block is None and not ambiguous
        plain = source.stream_ordered and not allocator.release_only_what_is_needed
        return BesideTorch(allocator, tape) if known and plain else None
    return None


def same(what: str, ours: Any, models: Any) -> None:
    """Raises Differs where two answers are not equal."""
    if ours != models:
        raise Differs(f"{what}: the allocator has\n  {ours}\nand the model\n  {models}")


class BesideTensorFlow:
    """`bfc.BFCAllocator` and TensorFlow's rules."""

    knows_streams = False
    outlives_refusals = True

    def __init__(self, allocator: BFCAllocator, tape: Tape) -> None:
        self.allocator, self.tape = allocator, tape
        self.model = Model(
            TapedSource(tape),
            memory_limit=allocator.memory_limit,
            allow_growth=allocator.allow_growth,
            garbage_collection=allocator.garbage_collection,
            fragmentation_fraction=allocator.fragmentation_fraction,
            strict=allocator.strict,
            tensorflow=allocator.tensorflow,
        )

    def set_timing_counter(self) -> None:
        """Both count their frees from now on."""
        self.allocator.set_timing_counter(SharedCounter())
        self.model.set_timing_counter()

    def set_safe_frontier(self, frontier: int) -> None:
        self.allocator.set_safe_frontier(frontier)
        self.model.set_safe_frontier(frontier)

    def allocate(self, nbytes: int, stream: int, freed_before: int) -> int | None:
        return self.model.allocate(nbytes, freed_before)

    def free(self, ptr: int) -> None:
        self.model.free(ptr)

    def record_stream(self, ptr: int, stream: int) -> None:
        raise NotImplementedError

    def release_free_regions(self) -> None:
        self.model.release_free_regions()

    def clear_stats(self) -> None:
        self.model.clear_stats()

    def compare(self) -> None:
        same("next region", self.allocator.next_region_size, self.model.next_region_size)
        same("layout", layout_of(self.allocator), self.model.layout())
        same("stats", self.allocator.stats(), self.model.stats())

    def close(self) -> None:
        self.model.close()


class BesideTorch:
    """`bfc.CachingAllocator` and PyTorch's rules."""

    knows_streams = True

    def __init__(self, allocator: CachingAllocator, tape: Tape) -> None:
        self.allocator, self.tape = allocator, tape
        self.outlives_refusals = allocator.strict
        self.model = TorchModel(settings=allocator.snapshot().settings, rolls_back=True)
        self.model.device = TapedDevice(tape)
        fraction = allocator.memory_fraction
        self.model.limit = None if fraction == 1.0 else allocator.memory_limit

    def allocate(self, nbytes: int, stream: int, freed_before: int) -> int | None:
        answer = self.model.malloc(nbytes, stream)
        return None if isinstance(answer, Failure) else int(answer)

    def free(self, ptr: int) -> None:
        self.model.free(ptr)

    def record_stream(self, ptr: int, stream: int) -> None:
        self.model.record_stream(ptr, stream)

    def release_free_regions(self) -> None:
        self.model.empty_cache()

    def clear_stats(self) -> None:
        self.allocator.reset_peak_stats()
        self.allocator.reset_accumulated_stats()
        self.model.reset_peak_stats()
        self.model.reset_accumulated_stats()

    def compare(self) -> None:
        ours, models = self.allocator.memory_stats(), self.model.stats()
        different = [name for name in models if ours[name] != models[name]]
        same("stats", {n: ours[n] for n in different}, {n: models[n] for n in different})
        same("segments", segments_of(self.allocator.snapshot(history=False)), self.model.snapshot())

    def close(self) -> None:
        self.tape.calls.clear()  # PyTorch's allocator is never closed


def segments_of(snapshot: Snapshot) -> list[Segment]:
    """The regions in the words of PyTorch's snapshot, without their device and frames."""
    segments: list[Any] = snapshot.to_torch()["segments"]
    for segment in segments:
        del segment["device"], segment["frames"]
        for block in segment["blocks"]:
            del block["frames"]
    return segments
