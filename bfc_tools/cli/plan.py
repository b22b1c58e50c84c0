"""`bfc plan`: places for the blocks of a recorded run, and how much memory they take."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import bfc
from bfc.errors import PlanError
from bfc.files import open_regular
from bfc.plans.plan import FIGURES, PART_FACTS
from bfc.trace import Iterations
from bfc.units import format_bytes, printable
from bfc_tools.cli.runs import FILE, add_snapshot_device, add_torch, read_trace
from bfc_tools.cli.tables import Cells, add_formats, show

HELP = "find places for a recorded run's blocks, and say what they take"
EPILOG = """\
A plan knows the whole run, and so can lay its blocks where they leave no gaps: span is what it
takes, in one region for what is never freed (base) and one for everything else (body). reserved is
what the fallback policy takes, which sees one request at a time. An allocator serves a plan that
is given to it as plan=, or to its method use_plan.

A run that repeats is planned as a head and one iteration of each kind, found from marks: the events
at which iterations begin. They are in the trace (meta["marks"]) or in FILE, as JSON: a list of
numbers of events, or of pairs such as [1467, "train"]. Without marks, iterations that ask for the
same sizes in the same order are looked for; if there are none, the whole run is laid out, as if it
were never to repeat. Record two iterations of each kind or more, better four.

parts: slots is how many blocks have a place; agree, how many of the recorded iterations ask for the
same, but for one request in twenty.

examples:
  bfc plan run.npz
  bfc plan run.npz -o plan.npz --marks marks.json
  bfc plan run.npz --fallback bfc
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="RUN", type=Path, help=FILE)
    add("-o", "--output", metavar="PLAN", type=Path, help="write the plan to this file, an .npz")
    add(
        "--fallback",
        choices=("caching", "bfc"),
        default="caching",
        help="the policy that serves what is not planned (default: caching, PyTorch's)",
    )
    add("--marks", metavar="FILE", type=Path, help="JSON: the events at which iterations begin")
    add_snapshot_device(add)
    add_torch(add)
    add_formats(parser)


def run(arguments: argparse.Namespace) -> bool:
    """Makes the plan, writes it where that was asked for, and prints its figures."""
    source: Path = arguments.source
    marks = None if arguments.marks is None else _marks(arguments.marks)
    trace = read_trace(source, arguments.snapshot_device, arguments.torch)
    if marks is None and not (isinstance(trace.meta, dict) and "marks" in trace.meta):
        marks = "auto"
    try:
        plan = bfc.Plan.from_trace(trace, marks=marks, fallback=arguments.fallback)
    except PlanError as error:
        raise PlanError(f"{source}: {error}") from None
    found = trace.iterations() if arguments.marks is None else None
    if arguments.output is not None:
        plan.save(arguments.output)
    show(
        arguments,
        text=lambda: _text(plan, trace, found, arguments.output),
        as_json=lambda: json.dumps(
            {**_figures(plan), "torch": trace.torch, "parts": _parts(plan)}, indent=2
        ),
        rows=lambda: _parts(plan),
    )
    return True


def _marks(path: Path) -> Any:
    try:
        with open_regular(path) as file:
            found = json.loads(file.read(64 << 20))
    except ValueError as error:
        raise PlanError(f"{path}: it is not JSON ({error})") from None
    if not isinstance(found, list):
        raise PlanError(f'{path}: it is not a list of marks, such as [[0, "train"]]')
    return found


def _figures(plan: bfc.Plan) -> dict[str, Any]:
    names = ("fallback", "settings", *FIGURES, "span", "budget", "declined")
    return {name: getattr(plan, name) for name in names}


def _parts(plan: bfc.Plan) -> list[Cells]:
    return [
        {
            "slots": len(part),
            "bytes": part.peak(),
            **{name: getattr(part, name) for name in PART_FACTS},
        }
        for part in plan.parts
    ]


def _text(plan: bfc.Plan, trace: bfc.Trace, found: Iterations | None, output: Path | None) -> str:
    lines = [f"{output}: {plan!r}"] if output is not None else []
    if found:
        lines.append(str(found))
    for part in plan.parts:
        name = " ".join(filter(None, (printable(part.kind), part.role)))
        line = f"{name:<16} {len(part):>8} slots, {format_bytes(part.peak()):>11} at most"
        if part.role == "body":
            line += f", {part.agreeing} of {part.recorded} recorded agree"
        if part.left_out:
            line += f", {part.left_out} left out: their blocks outlive the next iteration"
        lines.append(line)
    lines.append(
        f"span             {format_bytes(plan.span)}: base {format_bytes(plan.base)}, body "
        f"{format_bytes(plan.body)}; {plan.span / plan.peak:.4f} of the most that was live"
    )
    if plan.span < plan.peak:
        lines.append(
            f"{format_bytes(plan.peak - plan.span)} of the most that was live have no place in it: "
            f"the marked iterations do not hold them"
        )
    saved = "saves" if plan.budget >= 0 else "would take, beyond that,"
    version = f" (PyTorch {trace.torch})" if plan.fallback == "caching" else ""
    lines.append(
        f"{plan.fallback}{version} reserved {format_bytes(plan.online)}: the plan {saved} "
        f"{format_bytes(abs(plan.budget))}"
    )
    if plan.planned:
        ratio = plan.planned / plan.online
        lines.append(
            f"tried on the recording, each iteration with a plan of others: {plan.fallback} "
            f"reserved {format_bytes(plan.planned)}, {ratio:.3f} of that"
        )
    if private := trace._private_allocations():
        lines.append(
            f"{private} allocations from private pools are left out: a pool keeps its memory to "
            f"itself"
        )
    if len(plan.parts) == 1:
        why = "no iterations are marked" if found is None else str(found)
        if found:
            why = "these iterations do not hold the most that was live"
        lines.append(f"{why}: the whole run is laid out as it was")
    if plan.declined is not None:
        lines.append(f"an allocator declines it: {plan.declined}")
    return "\n".join(lines)
