"""Several recorded iterations become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bfc.libraries import NDArray, np
from bfc.plans._planning import match
from bfc.plans.lengths import Lengths, fitted
from bfc.plans.parts import BODY, FOREVER, Part, Rounding

#: Iterations with fewer requests in common do not repeat: the largest stands for all.
AGREES = 0.95
#: Blocks below this part of the peak may live longer in the plan than in one recording.
SMALL = 64
#: By how much the peak may grow through that.
GROWTH = 1.005
#: Where lengths vary, what is at most this large and outlives its iteration has a place in the
#: region of what is never freed, with room for so many times its size if it grows: so the other
#: region is empty when a longer iteration begins.
LASTING, ROOM = 1 << 20, 4
#: How far apart two requests may be in their iterations, to count as the same.
NEAR = 40


def matched(slots: Part, requests: Part) -> NDArray[np.int64]:
    """The slot of each request, or -1, as the server finds them: for each stream by itself."""
    found = np.full(len(requests), -1, np.int64)
    for stream in np.unique(requests.stream):
        there = np.flatnonzero(slots.stream == stream)
        asked = np.flatnonzero(requests.stream == stream)
        if len(there):
            slot = np.empty(len(asked), np.int64)
            match(slots.size[there], requests.size[asked], slot, smaller=False)
            found[asked] = np.where(slot < 0, -1, there[slot])
    return found


def consensus(parts: Sequence[Part]) -> Part:
    """What recorded iterations have in common, with how many agree. None of their blocks outlives
    the next iteration.

    A slot stays if two of three iterations have it. Where they differ too much, or where what is
    joined needs more than they did, one of them is taken.
    """
    hits = [
        float((matched(part, parts[i - 1]) >= 0).sum()) / max(len(part), len(parts[i - 1]), 1)
        for i, part in enumerate(parts)
    ]
    agreement = sum(hits) / len(hits) if len(parts) > 1 else 1.0
    by_peak = sorted(parts, key=Part.peak)
    if agreement < AGREES or len(parts) < 3:
        chosen = by_peak[-1]
    else:
        chosen = _joined(parts[-3], parts[-2], parts[-1])
        if chosen.peak() > GROWTH * by_peak[-1].peak():
            chosen = by_peak[len(parts) // 2]
    agreeing = sum(
        float((matched(chosen, part) >= 0).sum()) >= AGREES * max(len(part), len(chosen))
        for part in parts
    )
    return replace(chosen, recorded=len(parts), agreeing=agreeing, agreement=agreement)


def is_lasting(part: Part) -> NDArray[np.bool_]:
    """Which slots lie in the region of what is never freed."""
    lasting: NDArray[np.bool_] = part.over == FOREVER
    if part.role == BODY and part.lengths is not None:
        recorded = part.lengths.sizes(part.lengths.recorded)
        lasting |= (part.over > 0) & (recorded <= LASTING)
        for number, key in enumerate(part.lengths.keys):
            if key.clear > (number == 0):
                lasting |= lives_at(part, key.request)
    return lasting


def lives_at(part: Part, request: int) -> NDArray[np.bool_]:
    """Which slots live when a request comes: those of its own iteration, and of the one before."""
    born = np.arange(len(part)) < request
    lives: NDArray[np.bool_] = (born & (part.end > request)) | (part.over > request)
    return lives


def with_clear_keys(part: Part, rounded: Rounding) -> Part | None:
    """The same, with what lives when a key comes in the region of what is never freed, where none
    of it is large and grows with a length: so more room can be made at that key. None if that can
    be done for no key, or nothing would change."""
    lengths = part.lengths
    if lengths is None or part.role != BODY:
        return None
    grows = _grows(lengths) & (lengths.sizes(lengths.recorded) > LASTING)
    chosen = [
        number
        for number, key in enumerate(lengths.keys)
        if not (grows & lives_at(part, key.request)).any()
    ]
    made = replace(part, lengths=lengths.cleared(chosen))
    if 0 not in chosen or (len(chosen) == 1 and (is_lasting(made) == is_lasting(part)).all()):
        return None
    return _with_room(made, rounded)


def _grows(lengths: Lengths) -> NDArray[np.bool_]:
    grows: NDArray[np.bool_] = (lengths.growth[:, 1:] != 0).any(axis=1)
    return grows


def _with_room(part: Part, rounded: Rounding) -> Part:
    """The slots with their sizes at the longest lengths. What lasts, and grows, has more room."""
    lengths = part.lengths
    assert lengths is not None
    size = rounded(lengths.sizes(lengths.longest))
    grows = is_lasting(part) & _grows(lengths)
    return replace(part, size=np.where(grows, np.uint64(ROOM) * size, size))


def of_lengths(
    parts: Sequence[Part],
    raw: Sequence[NDArray[np.uint64]],
    rounded: Rounding,
    most_keys: int,
) -> Part | None:
    """What iterations of several lengths have in common: the slots of all lengths, with room for
    the longest. None if their sizes do not follow from so many lengths. `raw` are the bytes that
    they ask for."""
    last, alike = _alike(parts)
    if len(alike) < (3 if most_keys > 1 else max(3, AGREES * len(parts))):
        return None
    lengths = fitted([raw[i] for i in alike], most_keys)
    if lengths is None:
        return None
    end, over = (
        np.max([getattr(parts[i], name) for i in alike], axis=0) for name in ("end", "over")
    )
    made = _with_room(replace(last, end=end, over=over, lengths=lengths), rounded)
    longest = max((parts[i] for i in alike), key=Part.peak)
    if len(lengths.keys) == 1 and made.peak() > GROWTH * longest.peak():
        return None
    told = [float((lengths.sizes(lengths.of(raw[i])) == raw[i]).mean()) for i in alike]
    return replace(made, recorded=len(parts), agreeing=len(alike), agreement=sum(told) / len(parts))


def _alike(parts: Sequence[Part]) -> tuple[Part, list[int]]:
    """The last of those iterations that ask for as many blocks as each other, stream by stream, and
    the numbers of all of them: the one with the highest peak and its like, or the largest group if
    these are fewer than three."""
    groups: dict[tuple[int, bytes], list[int]] = {}
    for number, part in enumerate(parts):
        groups.setdefault((len(part), part.stream.tobytes()), []).append(number)
    highest = max(range(len(parts)), key=lambda number: parts[number].peak())
    found = next(group for group in groups.values() if highest in group)
    if len(found) < 3:
        found = max(groups.values(), key=len)
    return parts[found[-1]], found


def _joined(first: Part, reference: Part, last: Part) -> Part:
    """The slots that two of three have. What is small lives as long as in any of them."""
    few = reference.peak() // SMALL
    small = reference.size < few
    votes = np.ones(len(reference), np.int64)
    end, over = reference.end.astype(np.int64), reference.over.copy()
    missing = []
    for part in (first, last):
        slot = matched(reference, part)
        hit = slot >= 0
        votes[slot[hit]] += 1
        place = places(slot, len(reference))
        longer = hit & small[slot]
        np.maximum.at(end, slot[longer], place[part.end[longer]])
        np.maximum.at(over, slot[longer], part.over[longer])
        missing.append((part, np.flatnonzero(~hit), place))
    end = np.where(over > 0, len(reference), end)
    kept = votes >= 2
    added, at, ends = _in_both(*missing)
    key = np.concatenate([np.flatnonzero(kept), at - 0.5])
    order = np.argsort(key, kind="stable")
    until = np.searchsorted(key[order], np.concatenate([end[kept], ends])[order])
    columns: dict[str, Any] = {
        name: np.concatenate([values[kept], getattr(added, name)])[order]
        for name, values in (
            ("size", reference.size),
            ("offset", reference.offset),
            ("over", over),
            ("stream", reference.stream),
        )
    }
    lasting = np.where(columns["over"] > 0, len(order), until)
    until = np.maximum(lasting, np.arange(len(order)) + 1)
    return replace(reference, **columns, end=until.astype(np.uint32))


def places(slot: NDArray[np.int64], slots: int) -> NDArray[np.int64]:
    """For each request, and for the end, the slot that it or the next that has one is for."""
    known = np.append(np.where(slot < 0, slots, slot), slots)
    places: NDArray[np.int64] = np.minimum.accumulate(known[::-1])[::-1]
    return places


def _in_both(
    one: tuple[Part, NDArray[np.intp], NDArray[np.int64]],
    other: tuple[Part, NDArray[np.intp], NDArray[np.int64]],
) -> tuple[Part, NDArray[np.int64], NDArray[np.int64]]:
    """The requests of two iterations that the reference lacks: which, before which of its slots
    they come, and before which they are freed."""
    part, lacking, place = one
    theirs, others, their_place = other
    mine = np.zeros(len(part), bool)
    mine[lacking] = True
    yours = np.zeros(len(theirs), bool)
    yours[others] = True
    slot = matched(theirs.taken(yours), part.taken(mine))
    both = lacking[slot >= 0]
    near = np.abs(place[both] - their_place[others[slot[slot >= 0]]]) <= NEAR
    chosen = both[near]
    picked = np.zeros(len(part), bool)
    picked[chosen] = True
    return part.taken(picked), place[chosen], place[part.end[chosen]]
