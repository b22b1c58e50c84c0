"""Removes everything that names a program or a person from a PyTorch memory snapshot. The numbers,
PyTorch's own words and the settings stay."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from typing import Any

from bfc.errors import TraceError
from bfc.files import open_regular, replacing
from bfc.pytorch.plain_pickle import loads, shown
from bfc.pytorch.reader import MOST_BYTES, Parts
from bfc.pytorch.releases import (
    ANOTHER,
    EMPTIES,
    EMPTIES_A_POOL,
    GOES,
    PERHAPS,
    PREPARES,
    what_frames_say,
)
from bfc.pytorch.version import DIVISIONS, HOST, NUMBERS
from bfc.pytorch.words import (
    ANNOTATE,
    BLOCK_ACTIONS,
    CONF,
    OOM,
    OUR_FILE,
    OUR_OWN,
    OUR_POOL,
    OUR_RELEASE,
    SEGMENT_ACTIONS,
    SLEEPS,
    SNAPSHOT,
    STATES,
    WAKES,
    is_mark,
)

#: The viewer of the web page reads protocols 2 to 4.
PROTOCOL = 4

_ACTIONS = (*BLOCK_ACTIONS, *SEGMENT_ACTIONS, OOM, SNAPSHOT)
_OF_ENTRIES = ("addr", "device_free", "size", "stream")
_OF_SEGMENTS = (
    "device",
    "address",
    "total_size",
    "allocated_size",
    "active_size",
    "requested_size",
    "stream",
    "is_expandable",
)
_OF_BLOCKS = ("address", "size", "requested_size")
#: Frames that say whether the cache was emptied, in place of those that said it in the source.
_FRAMES = {
    EMPTIES: [{"filename": OUR_FILE, "line": 0, "name": OUR_RELEASE}],
    PERHAPS: [{"filename": "", "line": 0, "name": OUR_RELEASE}],
    ANOTHER: [{"filename": OUR_FILE, "line": 0, "name": OUR_OWN}],
    EMPTIES_A_POOL: [
        {"filename": OUR_FILE, "line": 0, "name": OUR_RELEASE},
        {"filename": OUR_FILE, "line": 0, "name": OUR_POOL},
    ],
    PREPARES: [{"filename": "", "line": 0, "name": "capture_begin"}],
}


def is_number(value: Any) -> bool:
    """Whether it is a number that JSON can hold."""
    return isinstance(value, int | float) and value == value and abs(value) != float("inf")


def public_settings(settings: Any) -> dict[str, Any]:
    """The settings that stay."""
    if not isinstance(settings, dict):
        return {}
    kept: dict[str, Any] = {
        name: settings[name] for name in NUMBERS if is_number(settings.get(name))
    }
    if isinstance(settings.get(CONF), str):
        kept[CONF] = settings[CONF]
    table = settings.get(DIVISIONS)
    if isinstance(table, dict):
        known = {str(1 << power) for power in range(16)}
        kept[DIVISIONS] = {
            name: value for name, value in table.items() if name in known and is_number(value)
        }
    return kept


def strip(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> int:
    """Writes the snapshot without frames, names and times. Returns the number of entries in its
    histories. Raises TraceError if the source is not a memory snapshot."""
    try:
        with open_regular(source) as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise TraceError(f"it holds more than {MOST_BYTES} bytes, the most that are read")
        content = loads(data)
        bare = _Stripper(len(data)).snapshot(content)
    except TraceError as error:
        raise TraceError(f"{os.fspath(source)}: {error}") from None
    with replacing(target) as out:
        pickle.dump(bare, out, protocol=PROTOCOL)
    return sum(map(len, bare["device_traces"]))


class _Stripper:
    def __init__(self, file_bytes: int) -> None:
        self._parts = Parts(file_bytes)
        self._said: dict[int, int] = {}
        self._tags: dict[str, str] = {}  # by name, what is said in its place

    def snapshot(self, content: Any) -> dict[str, Any]:
        if isinstance(content, list):
            content = {"segments": content}
        if not isinstance(content, dict) or not {"segments", "device_traces"} & set(content):
            raise TraceError(f"it holds {shown(content)}: it is not a memory snapshot of PyTorch")
        return {
            "segments": [self._segment(one) for one in self._list(content, "segments")],
            "device_traces": [
                [self._entry(entry) for entry in self._checked(trace)]
                for trace in self._list(content, "device_traces")
            ],
            "allocator_settings": public_settings(content.get("allocator_settings")),
            "external_annotations": [],
            # They name nobody once they are empty, and say which version wrote the snapshot.
            **{key: [] for key in HOST if key in content},
        }

    def _list(self, parent: dict[str, Any], name: str) -> Sequence[Any]:
        return self._checked(parent.get(name, []))

    def _checked(self, value: Any) -> Sequence[Any]:
        if not isinstance(value, list | tuple):
            raise TraceError(f"{shown(value)} stands where a list is expected")
        self._parts.look_at(value, "it")
        return value

    def _segment(self, segment: Any) -> dict[str, Any]:
        kept = _numbers(segment, _OF_SEGMENTS) | {"frames": []}
        if isinstance(segment.get("segment_pool_id"), list | tuple):
            kept["segment_pool_id"] = _pair(segment["segment_pool_id"])
        kept["segment_type"] = "small" if segment.get("segment_type") == "small" else "large"
        kept["blocks"] = [self._block(block) for block in self._list(segment, "blocks")]
        return kept

    def _block(self, block: Any) -> dict[str, Any]:
        kept = _numbers(block, _OF_BLOCKS) | {"frames": []}
        history = block.get("history")
        if "requested_size" not in kept and isinstance(history, list | tuple) and history:
            kept["history"] = [_numbers(history[0], ("real_size",))]  # in files of old releases
        if block.get("state") in STATES.values():
            kept["state"] = block["state"]
        return kept

    def _entry(self, entry: Any) -> dict[str, Any]:
        """An entry. One that is not about memory, such as a user's annotation, becomes a "snapshot"
        entry, which has no effect: it still separates freed segments from those taken later."""
        kept = _numbers(entry, _OF_ENTRIES)
        action = entry.get("action")
        said = entry.get("user_metadata")
        if action == ANNOTATE and is_mark(said):  # bfc's own words, but for the names of tags
            kept["user_metadata"] = self._without_a_name(said)
        elif not isinstance(action, str) or action not in _ACTIONS:
            return {"action": SNAPSHOT, "addr": 0, "size": 0, "stream": 0, "time_us": 0}
        kept |= {"action": action, "time_us": 0, "frames": []}
        if isinstance(entry.get("pool_id"), list | tuple):
            kept["pool_id"] = _pair(entry["pool_id"])
        if action in SEGMENT_ACTIONS:
            frames = entry.get("frames")
            if id(frames) not in self._said:
                self._said[id(frames)] = what_frames_say(frames)
            said = self._said[id(frames)]
            kept["frames"] = _FRAMES.get(said, []) if action in GOES or said == PREPARES else []
        return kept

    def _without_a_name(self, mark: str) -> str:
        for what in (SLEEPS, WAKES):
            if mark.startswith(what):
                tag = mark.removeprefix(what)
                return what + self._tags.setdefault(tag, f"tag {len(self._tags) + 1}")
        return mark


def _numbers(part: Any, names: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise TraceError(f"{shown(part)} stands where a dict is expected")
    return {name: part[name] for name in names if is_number(part.get(name))}


def _pair(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(value if is_number(value) else 0 for value in values[:2])
