"""`bfc devices`: what memory there is on this machine, and what is missing."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import bfc
from bfc.drivers.cuda import _driver
from bfc.drivers.opencl import platform as _opencl
from bfc.units import format_bytes
from bfc_tools.cli.tables import Cells, add_formats, show

HELP = "list the devices, their memory and limits, and what is missing"
EPILOG = """\
It opens no device: no CUDA context is made, and no memory is taken. The exit code is 0.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_formats(parser)


def run(arguments: argparse.Namespace) -> bool:
    """Lists the devices. One that cannot be asked is in the list with the reason, and is not a
    failure."""
    kinds = {
        "cuda": _listed(bfc.cuda.is_available, bfc.cuda.device_count, _cuda_device),
        "opencl": _listed(bfc.opencl.is_available, bfc.opencl.device_count, _opencl_device),
        "host": _listed(lambda: "the host's memory", lambda: 1, _host),
    }
    show(
        arguments,
        text=lambda: "\n".join(_lines(kinds)),
        as_json=lambda: json.dumps(kinds, indent=2),
        rows=lambda: _rows(kinds),
    )
    return True


def _lines(kinds: dict[str, Any]) -> Iterator[str]:
    for kind, found in kinds.items():
        yield found["reason"] if kind != "host" else "The host is always available"
        for name, device in _named(kind, found):
            yield "  ".join(["", name, *_words(device)])
            if device.get("no_kernels"):
                yield f"    {device['no_kernels']}"


def _rows(kinds: dict[str, Any]) -> Iterator[Cells]:
    """A row for each device, and one for a kind that has none, with the reason."""
    for kind, found in kinds.items():
        for name, device in _named(kind, found) or [("", {"fault": found["reason"]})]:
            yield {"kind": kind, "device": name, **_NO_FACTS, **device}


#: Every column is there, whatever this machine has.
_NO_FACTS = dict.fromkeys(
    (
        "name",
        "total_bytes",
        "platform",
        "version",
        "largest_allocation_bytes",
        "alignment_bytes",
        "svm",
        "no_kernels",
        "fault",
    )
)


def _named(kind: str, found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The devices of a kind, under the names that `--device` takes."""
    return [
        (kind if kind == "host" else f"{kind}:{number}", device)
        for number, device in enumerate(found["devices"])
    ]


def _listed(
    is_available: Callable[[], object],
    count: Callable[[], int],
    describe: Callable[[int], dict[str, Any]],
) -> dict[str, Any]:
    usable = is_available()
    devices = [_attempt(describe, number) for number in range(count())] if usable else []
    return {"available": bool(usable), "reason": str(usable), "devices": devices}


def _attempt(describe: Callable[[int], dict[str, Any]], number: int) -> dict[str, Any]:
    """The facts of a device, or why there are none: a broken device must not hide the others."""
    try:
        return describe(number)
    except Exception as error:
        return {"fault": _opencl.first_line(error)}


def _cuda_device(number: int) -> dict[str, Any]:
    name, total = _driver.describe(number)
    return {"name": name, "total_bytes": total}


def _opencl_device(number: int) -> dict[str, Any]:
    device = _opencl.devices()[number]
    return {
        "name": str(device.name).strip(),
        "platform": str(device.platform.name).strip(),
        "version": str(device.version).strip(),
        "total_bytes": int(device.global_mem_size),
        "largest_allocation_bytes": int(device.max_mem_alloc_size),
        "alignment_bytes": int(device.mem_base_addr_align) // 8,
        "svm": _opencl.has_svm(device),
        "no_kernels": _opencl.why_no_kernels(device),
    }


def _host(_number: int) -> dict[str, Any]:
    return {
        "name": f"{os.cpu_count() or 1} processors",
        "total_bytes": bfc.HostSubAllocator().total_bytes,
    }


def _words(device: dict[str, Any]) -> list[str]:
    if "fault" in device:
        return [f"cannot be asked: {device['fault']}"]
    words = [device["name"], format_bytes(device["total_bytes"])]
    if "platform" in device:
        largest, svm = device["largest_allocation_bytes"], device["svm"]
        words.append(f"at most {format_bytes(largest)} in one allocation")
        words.append(f"aligned to {device['alignment_bytes']} bytes")
        words.append("buffers and SVM" if svm else "buffers, no SVM")
        words.append(device["version"])
    return words
