"""Memory snapshots in PyTorch's form, made by hand, and what `Trace.from_torch` makes of them."""

from __future__ import annotations

import io
import pickle
import random
from typing import Any

import pytest
from torch_recorder import Recorder, random_places, random_run

import bfc

KIB, MIB = 1 << 10, 1 << 20
BASE = 1 << 40
HEAD = b"\x80\x04"


def read(content: Any, protocol: int = 4, **options: Any) -> bfc.Trace:
    return bfc.Trace.from_torch(io.BytesIO(pickle.dumps(content, protocol)), **options)


def facts(trace: bfc.Trace) -> dict[str, Any]:
    return trace.meta["torch"]


def event(action: str, addr: int = 0, size: int = 1000, **rest: Any) -> dict[str, Any]:
    return {"action": action, "addr": BASE + addr, "size": size, "stream": 0, **rest}


def free(addr: int = 0, size: int = 1000) -> list[dict[str, Any]]:
    return [event("free_requested", addr, size), event("free_completed", addr, size)]


def segment(*blocks: tuple[int, int], addr: int = 0, **rest: Any) -> dict[str, Any]:
    """A segment of blocks (bytes, bytes asked for or -1 where it is free)."""
    return {
        "address": BASE + addr,
        "total_size": sum(size for size, _ in blocks),
        "stream": 0,
        "segment_type": "small" if sum(size for size, _ in blocks) <= 2 * MIB else "large",
        "blocks": [
            {
                "size": size,
                "requested_size": max(requested, 0),
                "state": "inactive" if requested < 0 else "active_allocated",
            }
            for size, requested in blocks
        ],
        **rest,
    }


def recording(segments: list[Any], events: list[Any], **rest: Any) -> dict[str, Any]:
    return {"segments": segments, "device_traces": [events], **rest}


def recorded(seed: int, steps: int = 120, **options: Any) -> Recorder:
    dice = random.Random(seed)
    recorder = Recorder(random_places(dice), **options)
    random_run(dice, recorder, steps)
    return recorder


def refused(content: bytes) -> str:
    with pytest.raises(bfc.TraceError) as caught:
        bfc.Trace.from_torch(io.BytesIO(content))
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 500
    assert text.isascii()
    return text.removeprefix("the snapshot: ")
