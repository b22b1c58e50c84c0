"""`bfc report RUN...`: runs as one page for the browser."""

from __future__ import annotations

import argparse
from pathlib import Path

from bfc.pytorch.rules import NEWEST
from bfc_tools.browser.data import data_of, data_of_state
from bfc_tools.browser.perfetto import write_perfetto
from bfc_tools.browser.report import write
from bfc_tools.browser.runs import said_of_sleep
from bfc_tools.cli.policies import device_maker, of_version, policies, tried, with_steps
from bfc_tools.cli.replay import add_options_of_allocators
from bfc_tools.cli.runs import (
    FILES,
    OR_LOGS,
    add_snapshot_device,
    files,
    logs_of,
    named,
    read_trace,
)
from bfc_tools.study.logs.side_by_side import Logs
from bfc_tools.study.torch_version import line_of

#: What stands at the beginning of each page that bfc writes.
TITLE, HEAD = b"<title>bfc report</title>", 4096

HELP = "write a page for the browser that shows recorded runs"
EPILOG = """\
The page is one file. It asks the network for nothing, and any current browser opens it. It shows
the run over time with its peak, a map of the addresses, the blocks at the peak, those that are
never freed and those that live shortly, by owner, line of the program, size and age, and what keeps
each segment. Of a run that ran out of memory, page and command begin with one sentence: how much
was refused, by which line, what was free and where, and what to try. The page holds the names of
files and functions that the run has; `bfc anonymise` removes them.

A memory snapshot of PyTorch is shown as it was recorded, and another run as PyTorch's policy with
its default settings places it. Each --policy adds a replay: all runs stand side by side on one
axis. The blocks are those of the first RUN, and a --policy of PyTorch follows its version. At most
16 runs. --policy caching --policy caching:plan=plan.npz draws a plan against the policy alone.

Of the log of a program that ran out of memory, the command says why, and the page shows the chunks
that the log lists, if it does. Of several logs, as of ranks, a table says which one is odd. What
loggers, terminals and containers put around the lines does not matter.

exit code: 0 the page is written, 2 a wrong call or file.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", type=Path, help=FILES + OR_LOGS)
    add(
        "-o",
        "--output",
        metavar="HTML",
        type=Path,
        help="the file to write (default: the name of the first RUN, with .html, in the folder "
        "where you are)",
    )
    add(
        "--perfetto",
        metavar="JSON",
        type=Path,
        help="also write the runs for ui.perfetto.dev: figures as counters, blocks as slices",
    )
    add("--title", default="", help="the page's title (default: the names of the runs)")
    add(
        "--policy",
        action="append",
        metavar="POLICY",
        help="also replay under this policy, as in `bfc replay`; may be given several times",
    )
    add_options_of_allocators(add, device=None)
    add_snapshot_device(add)


def run(arguments: argparse.Namespace) -> bool:
    """Writes the page. Returns True."""
    logs = None if arguments.policy else logs_of(arguments.runs)
    if logs is not None:
        return _of_logs(logs, arguments)
    output = arguments.output or _named_after(arguments.runs[0])
    make_device = device_maker(arguments.device or "simulated:80GiB", arguments.policy)
    listed = tried(policies(arguments) if arguments.policy else [], make_device)
    if not listed and (arguments.memory_limit or arguments.allow_growth or arguments.strict):
        raise ValueError("--memory-limit, --allow-growth and --strict need a --policy")
    traces = [
        (name, with_steps(read_trace(path, arguments.snapshot_device, arguments.torch), listed))
        for name, path in named(list(files(arguments.runs)))
    ]
    first = traces[0][1]
    listed = of_version(listed, first.torch or NEWEST)
    data = data_of(traces, listed, make_device if arguments.device else None, title=arguments.title)
    if arguments.perfetto is not None and data["kind"] == "state":
        raise ValueError("--perfetto: the file has no history, so there is nothing over time")
    write(data, output)
    if arguments.perfetto is not None:
        write_perfetto(traces, data["runs"], arguments.perfetto)
    for ran_out in data["ran_out"]:
        print(
            ran_out["sentence"]
            if len(traces) == 1
            else f"{ran_out['trace']}: {ran_out['sentence']}"
        )
    print(f"{output}: {data['title']}, {data['events']} events. {line_of(first)}")
    for name, trace in traces:
        for remark in said_of_sleep(trace):
            print(remark if len(traces) == 1 else f"{name}: {remark}")
    return True


def _of_logs(logs: Logs, arguments: argparse.Namespace) -> bool:
    """Says what logs tell, and writes the page of the chunks that one of them lists."""
    if arguments.perfetto is not None:
        raise ValueError("--perfetto: a log has no history, so there is nothing over time")
    print(logs)
    listed = logs.listed()
    if listed is None:
        if any(log.refusals for log in logs.logs):
            print("There is no page, since the text lists no chunks.")
        return True
    name, refusal, snapshot = listed
    output = arguments.output or _named_after(arguments.runs[0])
    remark = "; ".join(
        ["a log does not say what was asked for in a chunk, nor when", *refusal.remarks]
    )
    data = data_of_state(snapshot, title=arguments.title or name, remark=remark)
    data["ran_out"] = [{"trace": name, **refusal.as_dict()}]
    write(data, output)
    print(f"{output}: {data['title']}, the chunks when {refusal.who or name} was refused.")
    return True


def _named_after(run: Path) -> Path:
    """The page's name where none is given. Raises ValueError rather than replace another page."""
    path = Path(f"{run.resolve().stem}.html")
    if path.exists():
        with path.open("rb") as file:
            if TITLE not in file.read(HEAD):
                raise ValueError(f"{path}: it exists, and is no report. Name a file with -o")
    return path
