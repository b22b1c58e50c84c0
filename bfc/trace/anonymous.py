"""The parts of a recording's `meta` that may be published: numbers, PyTorch's own words, and
settings."""

from __future__ import annotations

from typing import Any

from bfc.pytorch.rules import VERSIONS
from bfc.pytorch.stripped import is_number, public_settings
from bfc.pytorch.words import SEGMENT_ACTIONS

#: The facts of a recording that are numbers, those that are lists of numbers, and lists of lists.
COUNTS = (
    "device",
    "first_recorded_event",
    "waiting_at_the_end",
    "frees_completed_later",
    "private_pool_allocations",
    "segments_not_exact",
    "blocks_of_unsure_size",
    "releases_unsure",
)
LISTS = ("streams", "addresses")
TABLES = ("segments", "registered", "oom", "oom_calls", "pools", "pool_segments")
#: In place of the sign by which a version was told, which may quote the file.
SAID = "the recording that was anonymised said so"


def public_meta(meta: Any) -> dict[str, Any] | None:
    """The part of a `meta` that names nobody, or None. Nothing else of it is kept, not even its
    keys."""
    torch = meta.get("torch") if isinstance(meta, dict) else None
    if not isinstance(torch, dict):
        return None
    kept: dict[str, Any] = {name: torch[name] for name in COUNTS if is_number(torch.get(name))}
    kept |= {name: torch[name] for name in LISTS if _are_numbers(torch.get(name))}
    for name in TABLES:
        rows = torch.get(name)
        if isinstance(rows, list) and all(map(_are_numbers, rows)):
            kept[name] = rows
    events = torch.get("segment_events")
    if isinstance(events, list) and all(map(_is_about_a_segment, events)):
        kept["segment_events"] = events
    slept = torch.get("asleep")
    if isinstance(slept, list) and all(map(_is_about_a_tag, slept)):
        tags: dict[str, str] = {}
        kept["asleep"] = [
            [*row[:2], tags.setdefault(row[2], f"tag {len(tags) + 1}")] for row in slept
        ]
    kept["settings"] = public_settings(torch.get("settings"))
    version = meta.get("torch_version")
    said = {"torch_version": version, "torch_version_sign": SAID} if version in VERSIONS else {}
    return {"source": "PyTorch memory snapshot, anonymised", **said, "torch": kept}


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(map(is_number, values))


def _is_about_a_tag(row: Any) -> bool:
    return (
        isinstance(row, list)
        and len(row) == 3
        and _are_numbers(row[:2])
        and isinstance(row[2], str)
    )


def _is_about_a_segment(row: Any) -> bool:
    return (
        isinstance(row, list)
        and bool(row)
        and isinstance(row[0], str)
        and row[0] in SEGMENT_ACTIONS
        and _are_numbers(row[1:])
    )
