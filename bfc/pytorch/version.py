"""Which version of PyTorch wrote a memory snapshot: the signs that its keys are.

PyTorch's behaviour, 3.4, lists them. No snapshot says its version.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bfc.pytorch.rules import NEWEST
from bfc.pytorch.words import CONF

#: The keys of PyTorch's newest snapshots, and of their settings: numbers, a table and a text.
TOP_KEYS = frozenset(
    (
        *("segments", "device_traces", "allocator_settings", "external_annotations"),
        *("host_segments", "host_traces"),
    )
)
LIMITS = ("max_round_threshold", "max_cached_size")
NUMBERS = (
    *("max_split_size", "garbage_collection_threshold", "expandable_segments"),
    *("release_lock_on_cudamalloc", "graph_capture_record_stream_reuse", *LIMITS),
    *("pinned_num_register_threads", "pinned_use_cuda_host_register"),
)
DIVISIONS = "roundup_power2_divisions"
SETTINGS_KEYS = frozenset((CONF, *NUMBERS, DIVISIONS))
HOST = ("host_segments", "host_traces")
#: How many unknown keys are named.
SHOWN = 3

UNKNOWN = "nothing in the file says which version wrote it"
OLDER = "nothing in the file is of 2.13 or later, and nothing tells 2.11 from 2.12"


@dataclass(frozen=True)
class Version:
    """What a file says of the version that wrote it."""

    #: One of `rules.VERSIONS`, whose rules a replay follows; None if the file does not say.
    rules: str | None
    sign: str  # how it was told, in words


UNTOLD = Version(None, UNKNOWN)


def version_of(content: Mapping[str, Any], has_internal_metadata: bool) -> Version:
    """What the keys of a snapshot say. Signs that contradict each other, and keys that no known
    version writes, are told in the `sign`, and by a warning. `has_internal_metadata` is whether an
    entry of its history has this key."""
    settings = content.get("allocator_settings")
    settings = settings if isinstance(settings, Mapping) else {}
    later = list(_signs(content, settings, has_internal_metadata))
    unknown = [*(set(content) - TOP_KEYS), *(set(settings) - SETTINGS_KEYS)]
    if unknown and all(key in content for key in HOST):
        named = ", ".join(ascii(key[:40]) for key in sorted(unknown)[:SHOWN])
        sign = (
            f"it has keys that PyTorch {NEWEST} does not write ({named}): a newer version may "
            "have written it"
        )
        warnings.warn(f"the snapshot is read as one of PyTorch {NEWEST}: {sign}", stacklevel=2)
        return Version(NEWEST, sign)
    if not later:
        text = settings.get(CONF)
        if isinstance(text, str) and "throw_on_cudamalloc_oom" in text:
            return Version(None, "its settings name throw_on_cudamalloc_oom, which 2.12 has first")
        return Version(None, OLDER) if settings else UNTOLD
    missing = _missing(content, settings, later)
    sign = f"{later[0][1]}, as in {later[0][0]}"
    if missing:
        sign = f"{sign}, but {missing}, as in an older version: it is read as one of {NEWEST}"
        warnings.warn(f"the signs in the snapshot contradict each other: {sign}", stacklevel=2)
    return Version(NEWEST, sign)


def _signs(
    content: Mapping[str, Any], settings: Mapping[str, Any], has_internal_metadata: bool
) -> Iterator[tuple[str, str]]:
    """(version, sign) of each sign of a later version than 2.12, the latest version first."""
    text = settings.get(CONF)
    if has_internal_metadata:
        yield "2.15", "an entry has internal_metadata"
    if isinstance(text, str) and "expandable_segments_reserve" in text:
        yield "2.15", "its settings name expandable_segments_reserve"
    if any(key in content for key in HOST):
        yield "2.14 and later", f"it has {' and '.join(key for key in HOST if key in content)}"
    if any(key in settings for key in LIMITS):
        yield "2.13 and later", f"its settings have {' and '.join(LIMITS)}"


def _missing(
    content: Mapping[str, Any], settings: Mapping[str, Any], later: list[tuple[str, str]]
) -> str:
    """What a file with such signs should have, too, and lacks; empty if nothing."""
    if settings and not any(key in settings for key in LIMITS):
        return f"its settings have no {LIMITS[0]}"
    if later[0][0] == "2.15" and not any(key in content for key in HOST):
        return f"it has no {HOST[0]}"
    return ""
