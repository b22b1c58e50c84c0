"""What `--policy` and `--device` name: the allocator to replay on, and where its memory comes
from."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import bfc
from bfc.study.counted import Counted, CountedHost, CountedOpenCL, CountedSimulated
from bfc.study.experiment import Policy
from bfc.units import parse_bytes


def device_maker(text: str) -> Callable[[], Counted]:
    """What makes the device that `--device` names. Raises ValueError."""
    kind, _, rest = text.partition(":")
    if kind == "opencl":
        return _opencl_maker(text, rest)
    if kind not in ("simulated", "host") or (kind == "simulated" and not rest):
        raise ValueError(
            f"--device {text}: it is simulated:SIZE, host[:SIZE] or opencl[:INDEX][:SIZE]"
        )
    capacity = parse_bytes(rest) if rest else None
    if kind == "host":
        return lambda: CountedHost(capacity)
    return lambda: CountedSimulated(rest)


def _opencl_maker(text: str, rest: str) -> Callable[[], Counted]:
    index, _, size = rest.partition(":")
    if not index.isdecimal():
        if size:
            raise ValueError(f"--device {text}: it is opencl[:INDEX][:SIZE]")
        index, size = "0", rest
    capacity = parse_bytes(size) if size else None
    return lambda: CountedOpenCL(index=int(index), capacity=capacity)


def policies(arguments: argparse.Namespace) -> list[Policy]:
    """The policies asked for, in that order; `bfc` where none is. Raises ValueError."""
    # No setting has a space in it, and a table has no place for a line's end.
    names = ["".join(text.split()) for text in arguments.policy or ["bfc"]]
    listed = [_policy(name, arguments) for name in names]
    if arguments.allow_growth and "bfc" not in names:
        raise ValueError(
            "--allow-growth is an option of --policy bfc: the caching policy and virtual_memory "
            "always take memory as it is needed"
        )
    if arguments.strict and all(name.startswith("bfc:") for name in names):
        raise ValueError(
            "--strict is for the policies that have an original: TensorFlow has no virtual_memory"
        )
    return listed


def _policy(name: str, arguments: argparse.Namespace) -> Policy:
    kind, colon, text = name.partition(":")
    limit, strict = _limit(arguments.memory_limit), arguments.strict
    if kind == "caching":
        settings = _settings(text, strict)
        return Policy(
            name,
            lambda device: bfc.CachingAllocator(
                device, memory_limit=limit, settings=settings, strict=strict
            ),
        )
    if kind != "bfc":
        raise ValueError(
            f"--policy {name}: it is bfc[:virtual_memory[,OPTIONS]] or caching[:SETTINGS]"
        )
    if colon:
        options = _options(name, text)
        return Policy(
            name,
            lambda device: bfc.BFCAllocator(
                device, memory_limit=limit, virtual_memory=True, **options
            ),
        )
    return Policy(
        name,
        lambda device: bfc.BFCAllocator(
            device, memory_limit=limit, allow_growth=arguments.allow_growth, strict=strict
        ),
    )


def _options(name: str, text: str) -> dict[str, Any]:
    """What stands behind `bfc:`, as arguments of a BFCAllocator. Raises ValueError."""
    first, *rest = text.split(",")
    if first != "virtual_memory":
        raise ValueError(
            f"--policy {name}: behind bfc: stands virtual_memory, with page_size=SIZE and "
            "headroom=FRACTION after commas; TensorFlow's own options are --allow-growth, "
            "--memory-limit and --strict"
        )
    options: dict[str, Any] = {}
    for item in rest:
        key, equals, value = item.partition("=")
        if key not in OPTIONS or not equals:
            raise ValueError(
                f"--policy {name}: virtual_memory has the options {' and '.join(OPTIONS)}, as in "
                f"bfc:virtual_memory,page_size=4MiB,headroom=0.05, and not {item!r}"
            )
        if key in options:
            raise ValueError(f"--policy {name}: {key} is given twice")
        try:
            options[key] = OPTIONS[key](value)
        except ValueError as error:
            raise ValueError(f"--policy {name}: {key}: {error}") from None
    return options


def _fraction(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a fraction such as 0.05") from None


#: The options of virtual_memory, and what reads them. The allocator reads a page's size.
OPTIONS: dict[str, Callable[[str], object]] = {"page_size": str, "headroom": _fraction}


def _settings(text: str, strict: bool) -> bfc.CachingSettings:
    try:
        return bfc.CachingSettings().apply(text, strict)
    except bfc.SettingsError as error:
        raise error.found_in("--policy caching") from None


def _limit(text: str | None) -> str | float | None:
    if text is not None and "." in text and text.replace(".", "", 1).isdigit():
        return float(text)
    return text
