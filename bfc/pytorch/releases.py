"""Which segments of a recording were freed because the program emptied the cache.

PyTorch has no entry for `torch.cuda.empty_cache()`. It frees segment after segment, and so do the
retry of a request and garbage collection. But right after those two a segment is taken, or the
request is refused (PyTorch's behaviour, 2.8, 2.13 and 3.4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bfc.pytorch.layout import Span, Spans
from bfc.pytorch.sizes import SMALL_SEGMENT, round_up
from bfc.pytorch.words import (
    OOM,
    OUR_FILE,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
)

if TYPE_CHECKING:
    from bfc.pytorch._recording import Event

#: What the frames of an entry say: there are none; they name another call; they name a function
#: with the right name that is not PyTorch's; the call that empties the cache; the call that empties
#: the cache of one private pool; the call that begins a capture, and allocates before it.
NO_FRAMES, ANOTHER, PERHAPS, EMPTIES, EMPTIES_A_POOL, PREPARES = range(6)

#: The most segments and blocks that are looked at, over all runs. After that no run is certain.
MOST_LOOKS = 1 << 22

GOES = (SEGMENT_FREE, SEGMENT_UNMAP)
_TAKES = (SEGMENT_ALLOC, SEGMENT_MAP, OOM)


def what_frames_say(frames: Any) -> int:
    """What a list of frames, innermost first, says about the call: NO_FRAMES, ANOTHER, ..."""
    said = NO_FRAMES
    for frame in frames if isinstance(frames, list | tuple) else ():
        name = frame.get("name") if isinstance(frame, dict) else None
        if not isinstance(name, str):
            continue
        said = said or ANOTHER
        if "MemPool" in name and said == EMPTIES:
            return EMPTIES_A_POOL
        if "capture_begin" in name and said == ANOTHER:
            return PREPARES
        if "emptyCache" in name:
            said = EMPTIES
        elif name == "empty_cache":
            said = max(said, EMPTIES if _is_a_library(frame.get("filename")) else PERHAPS)
    return said


def _is_a_library(filename: Any) -> bool:
    """Whether a file is PyTorch's, such as torch/cuda/memory.py, or the name of this package."""
    if not isinstance(filename, str):
        return False
    parts = filename.replace("\\", "/").split("/")
    return filename == OUR_FILE or (parts[-1] == "memory.py" and "torch" in parts)


def runs_of(events: Sequence[Event]) -> dict[int, tuple[int, bool]]:
    """The runs of entries that free segments, by the index of their last entry: what its frames
    say, and whether a segment is taken, or a request refused, right after it. A run ends where the
    frames say something else."""
    runs: dict[int, tuple[int, bool]] = {}
    for index, event in enumerate(events):
        if event.action in GOES:
            after = events[index + 1] if index + 1 < len(events) else None
            if after is None or after.action not in GOES or not _is_one_call(event, after):
                runs[index] = (event.named, after is not None and after.action in _TAKES)
    return runs


def _is_one_call(entry: Event, after: Event) -> bool:
    return after.named == entry.named and (
        entry.named != EMPTIES_A_POOL or after.pool == entry.pool
    )


class Releases:
    """Follows the segments of a recording, `spans` before its events, and finds the cause of each
    run of frees.

    `live_between` returns the addresses of the live blocks between two addresses, and `end_of` the
    end of the block that is live at one. `large` is the bytes of a page in expandable segments of
    large blocks. With `may_be_interrupted`, other threads may add entries while a request is
    retried, as under `release_lock_on_cudamalloc`.
    """

    def __init__(
        self,
        events: Sequence[Event],
        spans: list[Span],
        live_between: Callable[[int, int], Sequence[int]],
        end_of: Callable[[int], int],
        large: int,
        may_be_interrupted: bool,
    ) -> None:
        self._runs = runs_of(events)
        self._live_between, self._end_of, self._large = live_between, end_of, large
        self._looks_left = MOST_LOOKS
        # If the frames decide every run, the segments need not be followed.
        asks = not may_be_interrupted and any(said == NO_FRAMES for said, _ in self._runs.values())
        self._spans = Spans(spans) if asks else None
        self.unsure = 0

    def ends_at(self, index: int) -> bool:
        """Whether an entry is the last of a run that frees segments."""
        return index in self._runs

    def follow(self, index: int, event: Event) -> int | None:
        """Processes an entry about a segment. Returns what was emptied up to it: 0 for the cache,
        the number of a private pool, or None for nothing."""
        if self._spans is not None:
            self._keep(self._spans, event)
        if index not in self._runs:
            return None
        said, takes_at_once = self._runs[index]
        if said == EMPTIES:
            return 0
        if said == EMPTIES_A_POOL and event.pool:
            return event.pool
        if said in (ANOTHER, PREPARES) and takes_at_once:
            return None
        if said == PERHAPS:
            is_release = not takes_at_once
        else:
            is_release = said == NO_FRAMES and not takes_at_once and self._is_all_gone()
        self.unsure += not is_release
        return 0 if is_release else None

    def _keep(self, spans: Spans, event: Event) -> None:
        is_mapped = event.action in (SEGMENT_MAP, SEGMENT_UNMAP)
        if event.action in GOES:
            spans.cut(event.address, event.size, is_mapped)
        elif event.size:
            is_small = event.size % self._large > 0 if is_mapped else event.size <= SMALL_SEGMENT
            end = event.address + event.size
            spans.add(Span(event.address, end, event.stream, is_small, is_mapped, event.pool))

    def _is_all_gone(self) -> bool:
        """Whether nothing is left that emptying the cache would have given back."""
        if self._spans is None:
            return False
        for span in self._spans.all():
            live = self._live_between(span.start, span.end)
            self._looks_left -= 1 + len(live)
            if self._looks_left < 0:
                return False
            if not span.pool and self._has_something_free(span, live):
                return False
        return True

    def _has_something_free(self, span: Span, live: Sequence[int]) -> bool:
        """Whether a segment, or a page of an expandable one, is free. Memory is mapped by pages, so
        a span begins where a page begins."""
        if not span.is_expandable:
            return not live
        page = SMALL_SEGMENT if span.is_small else self._large
        at = span.start
        for address in [*live, span.end]:
            first = span.start + round_up(at - span.start, page)
            if first + page <= address:
                return True
            at = max(at, self._end_of(address)) if address < span.end else at
        return False
