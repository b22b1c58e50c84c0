"""What `--policy` and `--device` name: the allocator to replay on, and where its memory comes
from."""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import bfc
from bfc.plans.plan import marked
from bfc.pytorch.rules import NEWEST
from bfc.suballocators import SubAllocator
from bfc_tools.cli.sizes import device_bytes
from bfc_tools.study import recorded_settings
from bfc_tools.study.counting import (
    Counted,
    CountedHost,
    CountedOpenCL,
    CountedPages,
    CountedSimulated,
)
from bfc_tools.study.experiment import Policy
from bfc_tools.study.python_policy import PythonPolicy


def device_maker(text: str, names: Sequence[str] | None = None) -> Callable[[], Counted]:
    """A function that makes the device that `--device` names, for the policies of these names: one
    of your own may map memory wrongly, which the device tells it. Raises ValueError."""
    kind, _, rest = text.partition(":") if not text[:1].isdecimal() else (SIMULATED, "", text)
    if kind == "opencl":
        return _opencl_maker(text, rest)
    if kind not in (SIMULATED, "host") or (kind == SIMULATED and not rest):
        raise ValueError(
            f"--device {text}: it is simulated:SIZE, or SIZE alone, host[:SIZE] or "
            "opencl[:INDEX][:SIZE]"
        )
    capacity = device_bytes(rest, f"--device {text}") if rest else None
    if kind == "host":
        return lambda: CountedHost(capacity)
    simulated = CountedSimulated if any(map(_is_own, names or ())) else CountedPages
    return lambda: simulated(capacity)


def _opencl_maker(text: str, rest: str) -> Callable[[], Counted]:
    index, _, size = rest.partition(":")
    if not index.isdecimal():
        if size:
            raise ValueError(f"--device {text}: it is opencl[:INDEX][:SIZE]")
        index, size = "0", rest
    capacity = device_bytes(size, f"--device {text}") if size else None
    return lambda: CountedOpenCL(index=int(index), capacity=capacity)


def is_default(arguments: argparse.Namespace) -> bool:
    """Whether nothing on the command line chooses a policy."""
    return not arguments.policy and not arguments.allow_growth


def default_policy(trace: bfc.Trace, arguments: argparse.Namespace) -> tuple[str, str]:
    """The policy that a trace is replayed under unless another one is asked for, and why.

    It is PyTorch's, with the recorded settings, for what PyTorch recorded, PyTorch's with --torch,
    and else TensorFlow's.
    """
    if "torch" not in trace.meta:
        return ("bfc" if arguments.torch is None else "caching"), ""
    strict = arguments.strict
    text = "".join((recorded_settings.read(trace).settings or "").split())
    try:
        bfc.CachingSettings().apply(text, strict, torch=trace.torch or NEWEST)
    except bfc.SettingsError as error:
        fault = recorded_settings.shown(str(error).splitlines()[0])
        return "caching", f"PyTorch's policy with its defaults; of the recorded settings, {fault}"
    if not text:
        return "caching", "PyTorch's policy"
    return f"caching:{text}", "PyTorch's policy with the recorded settings"


def policies(arguments: argparse.Namespace, default: str = "bfc") -> list[Policy]:
    """The policies asked for, in that order; `default` where none is. Those of PyTorch follow the
    version that is asked for, or the newest. Raises ValueError."""
    torch = arguments.torch or NEWEST
    # No setting has a space in it, and a table has no place for a line's end. A file may have one.
    names = [
        _in_short(text.strip() if is_planned(text) else "".join(text.split()))
        for text in arguments.policy or [default]
    ]
    limit = _limit(arguments.memory_limit)
    listed = [_policy(name, arguments, limit, torch) for name in names]
    if arguments.allow_growth and "bfc" not in names:
        raise ValueError(
            "--allow-growth is an option of --policy bfc: the caching policy and virtual_memory "
            "always take memory as it is needed"
        )
    if arguments.strict and all(map(_has_no_original, names)):
        why = (
            "your own has none"
            if _is_own(names[0])
            else "neither TensorFlow nor PyTorch has plans"
            if is_planned(names[0])
            else "neither TensorFlow nor PyTorch stitches"
        )
        raise ValueError(f"--strict is for the policies that have an original: {why}")
    return listed


def _in_short(name: str) -> str:
    """A policy's name with `stitch` for `stitch=True`, as BFC_RUN may say it."""
    return re.sub(r"\b(stitch|virtual_memory)=True\b", r"\1", name)


def tried(listed: list[Policy], make_device: Callable[[], Counted]) -> list[Policy]:
    """The same policies, after each has made an allocator: what is wrong with the options is raised
    here, before anything is read."""
    for policy in listed:
        policy.make_allocator(make_device()).close()
    return listed


def is_pytorch(policy: Policy) -> bool:
    """Whether a version of PyTorch matters to a policy."""
    return policy.name.partition(":")[0] == "caching"


def of_version(listed: list[Policy], torch: str) -> list[Policy]:
    """The same policies. Those of PyTorch follow this version."""
    options: dict[str, Any] = {"torch": torch}
    return [
        Policy(policy.name, functools.partial(policy.make_allocator, **options))
        if is_pytorch(policy)
        else policy
        for policy in listed
    ]


def _policy(
    name: str, arguments: argparse.Namespace, limit: int | float | None, torch: str
) -> Policy:
    kind, colon, text = name.partition(":")
    common: dict[str, Any] = {"memory_limit": limit}
    if not _has_no_original(name):
        common["strict"] = arguments.strict
    if is_planned(name):
        return Policy(name, _planned(name, kind, text, common, torch))
    if kind == "caching":
        common["torch"] = torch
        if _stitches(name):
            common |= _of_stitching(name, text, torch)
        else:
            common["settings"] = _settings(text, arguments.strict, torch)
        return Policy(name, functools.partial(bfc.CachingAllocator, **common))
    if kind != "bfc":
        if _is_own(name):
            return Policy(name, _of_module(name, kind, text, common["memory_limit"]))
        raise ValueError(f"--policy {name}: {POLICIES}")
    own = _of_virtual_memory(name, text) if colon else {"allow_growth": arguments.allow_growth}
    return Policy(name, functools.partial(bfc.BFCAllocator, **common, **own))


def _planned(
    name: str, kind: str, text: str, common: dict[str, Any], torch: str
) -> Callable[[SubAllocator], Any]:
    """What makes an allocator that serves the plan of a file. Raises ValueError."""
    file, _, settings = text.removeprefix(PLAN).partition(",")
    plan = bfc.Plan.load(file)
    if kind == "bfc":
        if settings and settings.split(",")[0] != VIRTUAL_MEMORY:
            raise ValueError(
                f"--policy {name}: after the file of a plan for bfc comes nothing, or "
                "virtual_memory"
            )
        own = _of_virtual_memory(name, settings) if settings else {"allow_growth": True}
        return functools.partial(_serving, bfc.BFCAllocator, plan, **common, **own)
    if settings.split(",")[0] == STITCH:
        own = _of_stitching(name, settings, torch)
    else:
        own = {"settings": _settings(settings or plan.settings, False, torch)}
    return functools.partial(_serving, bfc.CachingAllocator, plan, torch=torch, **common, **own)


def _serving(
    kind: Callable[..., bfc.Allocator], plan: bfc.Plan, source: SubAllocator, **options: Any
) -> bfc.Allocator:
    """An allocator that serves a plan, whether it pays or not. Raises PlanError if there is no room
    for it."""
    allocator = kind(source, **options)
    try:
        allocator.use_plan(plan, strict=True, gate=None)
    except BaseException:
        allocator.close()
        raise
    return allocator


def with_steps(trace: bfc.Trace, listed: list[Policy]) -> bfc.Trace:
    """The trace, with marks where its iterations begin if a policy has a plan: as `bfc plan` finds
    them, where the trace has none."""
    if not any(is_planned(policy.name) for policy in listed):
        return trace
    return marked(trace)


def is_planned(name: str) -> bool:
    """Whether a policy serves a plan."""
    return name.strip().startswith((f"bfc:{PLAN}", f"caching:{PLAN}"))


def _has_no_original(name: str) -> bool:
    """Whether neither TensorFlow nor PyTorch has such a policy."""
    return is_planned(name) or _stitches(name) or _is_own(name)


def _of_module(
    name: str, module: str, kind: str, limit: str | float | None
) -> Callable[[SubAllocator], PythonPolicy]:
    """What makes a policy that is written in Python. Its module is looked for in the current
    folder, too. Raises ValueError."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), kind)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"--policy {name}: {module} cannot be imported so ({said})") from error
    if not (inspect.isclass(found) and issubclass(found, PythonPolicy)):
        raise ValueError(f"--policy {name}: {kind} is not a class with the base PythonPolicy")
    options: dict[str, Any] = {} if limit is None else {"memory_limit": limit}
    try:
        inspect.signature(found).bind(None, **options)
    except TypeError as error:
        raise ValueError(
            f"--policy {name}: {kind} cannot be made ({error}): its __init__ takes sub_allocator, "
            "and **options to pass on"
        ) from None
    return functools.partial(found, **options)


def _is_own(name: str) -> bool:
    """Whether the policy is MODULE:CLASS."""
    return OWN.fullmatch(name) is not None and not name.startswith(("bfc:", "caching:"))


def _stitches(name: str) -> bool:
    """Whether the policy stitches. Neither TensorFlow nor PyTorch has such a policy."""
    return name.startswith("bfc:") or name.partition(":")[2].split(",")[0] == STITCH


def _of_stitching(name: str, text: str, torch: str) -> dict[str, Any]:
    """`stitch`, and what follows it, as arguments of a CachingAllocator. Raises ValueError."""
    options: dict[str, Any] = {"stitch": True}
    # A setting may contain commas, so only the first words are looked at.
    rest = text.partition(",")[2]
    if rest.startswith("page_size="):
        first, _, rest = rest.partition(",")
        options |= _options(name, [first])
    return options | {"settings": _settings(rest, False, torch)}


def _of_virtual_memory(name: str, text: str) -> dict[str, Any]:
    """What follows `bfc:`, as arguments of a BFCAllocator. Raises ValueError."""
    first, *rest = text.split(",")
    if first != VIRTUAL_MEMORY:
        raise ValueError(
            f"--policy {name}: after bfc: comes virtual_memory, with page_size=SIZE and "
            "headroom=FRACTION after commas, or plan=FILE; TensorFlow's own options are "
            "--allow-growth, --memory-limit and --strict"
        )
    return {VIRTUAL_MEMORY: True} | _options(name, rest)


def _options(name: str, items: list[str]) -> dict[str, Any]:
    """What `KEY=VALUE` says, for each item. Raises ValueError."""
    options: dict[str, Any] = {}
    for item in items:
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


#: The device that a size alone means, as in `bfc advise`.
SIMULATED = "simulated"
#: What `--policy` takes.
POLICIES = (
    "it is bfc[:virtual_memory[,OPTIONS]] or caching[:[stitch[,page_size=SIZE],]SETTINGS], either "
    "of them with :plan=FILE, or MODULE:CLASS for a policy of your own"
)
OWN = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")
#: The first word after `bfc:` or `caching:`, for the policies that stitch.
VIRTUAL_MEMORY, STITCH = "virtual_memory", "stitch"
#: What the file of a plan stands behind.
PLAN = "plan="
#: The options of both, and what reads them. The allocator reads a page's size.
OPTIONS: dict[str, Callable[[str], object]] = {"page_size": str, "headroom": _fraction}


def _settings(text: str, strict: bool, torch: str) -> bfc.CachingSettings:
    try:
        return bfc.CachingSettings().apply(text, strict, torch=torch)
    except bfc.SettingsError as error:
        raise error.found_in("--policy caching") from None


def _limit(text: str | None) -> int | float | None:
    if text is None:
        return None
    if "." in text and text.replace(".", "", 1).isdigit():
        return float(text)
    return device_bytes(text, f"--memory-limit {text}")
