"""`bfc devices`: what memory there is on this machine, and what is missing."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

import bfc
from bfc.drivers.cuda import _driver
from bfc.drivers.opencl import platform as _opencl
from bfc.units import format_bytes

EPILOG = """\
It opens no device: no CUDA context is made, and no memory is taken. The exit code is 0.
"""


def add_to(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "devices",
        help="list the devices, their memory and limits, and what is missing",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> bool:
    """Lists the devices. One that cannot be asked is in the list with the reason, and is not a
    failure."""
    kinds = {
        "cuda": _listed(bfc.cuda.is_available, bfc.cuda.device_count, _cuda_device),
        "opencl": _listed(bfc.opencl.is_available, bfc.opencl.device_count, _opencl_device),
        "host": _listed(lambda: "the host's memory", lambda: 1, _host),
    }
    if arguments.json:
        print(json.dumps(kinds, indent=2))
        return True
    for kind, found in kinds.items():
        print(found["reason"] if kind != "host" else "The host is always available")
        for number, device in enumerate(found["devices"]):
            print(f"  {kind}:{number}" if kind != "host" else "  host", *_words(device), sep="  ")
    return True


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
