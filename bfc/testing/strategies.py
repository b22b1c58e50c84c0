"""Strategies for Hypothesis: sizes, requests, whole histories, settings, and what streams hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from bfc.trace import Trace

KIB, MIB = 1 << 10, 1 << 20
#: Where rounding, kinds, segments and bins of the two policies change.
BORDERS = (256, 512, 4 * KIB, MIB, 2 * MIB, 10 * MIB, 20 * MIB)
SETTINGS = (
    "large_segment_size_mb",
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "garbage_collection_threshold",
    "roundup_power2_divisions",
    "expandable_segments",
)


def sizes(smallest: int = 1, largest: int = 64 * MIB) -> st.SearchStrategy[int]:
    """Sizes in bytes.

    Parameters
    ----------
    smallest : int, optional
        The smallest; sizes shrink towards it.
    largest : int, optional
        The largest.

    Returns
    -------
    hypothesis.strategies.SearchStrategy of int
        Small sizes, sizes near powers of two and near the borders that matter to the policies, and
        any.

    Raises
    ------
    ValueError
        If `smallest` is negative, or above `largest`.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(sizes(), lambda nbytes: nbytes > 1 << 20)
    1048577
    """
    if not 0 <= smallest <= largest:
        raise ValueError(f"sizes go from {smallest} to {largest}: 0 <= smallest <= largest")
    powers = [1 << bit for bit in range(largest.bit_length())]
    near = [size for size in sorted({*powers, *BORDERS}) if smallest <= size <= largest]
    few = st.integers(smallest, min(largest, smallest + 5000))
    if not near:
        return few | st.integers(smallest, largest)
    beside = st.builds(
        lambda size, extra: min(max(size + extra, smallest), largest),
        st.sampled_from(near),
        st.integers(-1, 1),
    )
    return few | beside | st.integers(smallest, largest)


class Asked(NamedTuple):
    """A request."""

    nbytes: int
    stream: int = 0


def requests(
    sizes: st.SearchStrategy[int] | None = None, streams: Sequence[int] = (0,)
) -> st.SearchStrategy[Asked]:
    """Requests for memory.

    Parameters
    ----------
    sizes : hypothesis.strategies.SearchStrategy of int, optional
        Their sizes in bytes; None is `bfc.testing.sizes()`.
    streams : sequence of int, optional
        Their streams.

    Returns
    -------
    hypothesis.strategies.SearchStrategy of Asked
        With `nbytes` and `stream`.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(requests(streams=(0, 2)), lambda request: request.stream)
    Asked(nbytes=1, stream=2)
    """
    return st.builds(Asked, _sizes_or(sizes), st.sampled_from(list(streams)))


def traces(
    *,
    sizes: st.SearchStrategy[int] | None = None,
    streams: int = 1,
    min_events: int = 0,
    max_events: int = 100,
    frees_all: bool = False,
    releases: bool = False,
) -> st.SearchStrategy[Trace]:
    """Whole histories, each valid in itself.

    Parameters
    ----------
    sizes : hypothesis.strategies.SearchStrategy of int, optional
        The sizes in bytes; None is `bfc.testing.sizes()`.
    streams : int, optional
        How many streams, numbered from 0.
    min_events : int, optional
        The fewest events. With `frees_all` the frees at the end may come on top.
    max_events : int, optional
        The most events.
    frees_all : bool, optional
        Free everything before the end.
    releases : bool, optional
        Have releases of what is cached among the events (`op` 2).

    Returns
    -------
    hypothesis.strategies.SearchStrategy of bfc.Trace
        They shrink to few events of small sizes.

    Raises
    ------
    ValueError
        If the numbers of events are negative or the wrong way round, or there is no stream.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(traces(), lambda trace: len(trace) > 2).size.tolist()
    [1, 1, 1]
    """
    if not 0 <= min_events <= max_events or streams < 1:
        raise ValueError("0 <= min_events <= max_events, and at least one stream")
    allocation = requests(sizes, range(streams))
    free = st.integers(-5, max_events)
    event = allocation | free | st.none() if releases else allocation | free
    most = max_events // 2 if frees_all else max_events
    # Hypothesis prefers short lists: let some be long from the start.
    least = st.sampled_from(sorted({min(min_events, most), most // 4, most // 2}))
    events = least.flatmap(lambda fewest: st.lists(event, min_size=fewest, max_size=most))
    made = events.map(lambda chosen: _history(chosen, frees_all))
    if min_events:
        made = made.filter(lambda columns: len(columns[0]) >= min_events)
    return made.map(lambda columns: Trace(*columns))


Columns = tuple[list[int], list[int], list[int], list[int]]


def _history(chosen: list[Asked | int | None], frees_all: bool) -> Columns:
    """The columns of a trace. A number frees a live block, if any: counted from the oldest, or
    below 0 from the newest, so that it means the same block where others are left out. None
    releases what is cached."""
    columns: Columns = ([], [], [], [])
    live: list[tuple[int, int]] = []

    def add(*values: int) -> None:
        for column, value in zip(columns, values, strict=True):
            column.append(value)

    def free(at: int) -> None:
        freed, on = live.pop(at)
        add(1, freed, 0, on)

    for event in chosen:
        if isinstance(event, Asked):
            live.append((columns[0].count(0), event.stream))
            add(0, live[-1][0], event.nbytes, event.stream)
        elif event is None:
            add(2, 0, 0, 0)
        elif live:
            free(event % len(live) if event >= 0 else -1 - (-1 - event) % len(live))
    while frees_all and live:
        free(-1)
    return columns


def settings(keys: Sequence[str] = SETTINGS) -> st.SearchStrategy[str]:
    """Texts of settings that `bfc.CachingAllocator` takes.

    Parameters
    ----------
    keys : sequence of str, optional
        The settings that may appear. "expandable_segments" needs a sub-allocator that can map
        memory (`supports_virtual_memory`).

    Returns
    -------
    hypothesis.strategies.SearchStrategy of str
        They shrink towards "".

    Raises
    ------
    ValueError
        If a key is unknown.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(settings(), lambda text: "roundup" in text)
    'roundup_power2_divisions:1'
    """
    unknown = [key for key in keys if key not in SETTINGS]
    if unknown:
        raise ValueError(f"there is no setting {unknown[0]!r}; there are {', '.join(SETTINGS)}")
    return _settings(keys)


@st.composite
def _settings(draw: st.DrawFn, keys: Sequence[str]) -> str:
    words, large = [], 20
    chosen = [key for key in SETTINGS if key in keys and draw(st.booleans())]
    if "large_segment_size_mb" in chosen:
        large = draw(st.integers(11, 40))
        words.append(f"large_segment_size_mb:{large}")
    if "max_split_size_mb" in chosen:
        words.append(f"max_split_size_mb:{draw(st.integers(large, 100))}")
    if "max_non_split_rounding_mb" in chosen:
        words.append(f"max_non_split_rounding_mb:{draw(st.integers(large, 100))}")
    if "garbage_collection_threshold" in chosen:
        words.append(f"garbage_collection_threshold:{draw(st.integers(1, 99)) / 100}")
    if "roundup_power2_divisions" in chosen:
        words.append(f"roundup_power2_divisions:{1 << draw(st.integers(0, 6))}")
    if "expandable_segments" in chosen:
        words.append(f"expandable_segments:{draw(st.booleans())}")
    return ",".join(draw(st.permutations(words)) if len(words) > 1 else words)


class Hold(NamedTuple):
    """An event: what is queued on the stream from now on stays unfinished."""

    stream: int


class Finish(NamedTuple):
    """An event: everything on the stream has finished."""

    stream: int


class Use(NamedTuple):
    """An event: a live block is used on another stream too."""

    block: int
    stream: int


def stream_events(streams: Sequence[int] = (0, 2)) -> st.SearchStrategy[Hold | Finish | Use]:
    """What can happen on streams, apart from allocating and freeing.

    Parameters
    ----------
    streams : sequence of int, optional
        Which streams.

    Returns
    -------
    hypothesis.strategies.SearchStrategy of Hold, Finish or Use
        Work is held and finishes (`hold` and `finish` of a sub-allocator), and blocks are used on
        other streams (`record_stream`).

    Examples
    --------
    >>> from hypothesis import find
    >>> event = find(stream_events((0, 2)), lambda event: event.stream == 2)
    >>> event.stream
    2
    """
    stream = st.sampled_from(list(streams))
    uses = st.builds(Use, st.integers(0, 100), stream)
    return uses | st.builds(Hold, stream) | st.builds(Finish, stream)


def _sizes_or(chosen: st.SearchStrategy[int] | None) -> st.SearchStrategy[int]:
    return sizes() if chosen is None else chosen
