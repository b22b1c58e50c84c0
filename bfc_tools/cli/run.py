"""`bfc run SCRIPT`: a PyTorch program, unchanged, with all of its GPU memory from pools of bfc."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import NoReturn

from bfc.integrations._torch_cuda import settings_of_environment
from bfc.pytorch.rules import NEWEST
from bfc_tools.cli.policies import device_maker
from bfc_tools.cli.program import add_program
from bfc_tools.cli.serving import FIRST, VARIABLE, Wanted

#: The folder that every Python reads at its start.
STARTUP = Path(__file__).parents[1] / "startup"

HELP = "run a PyTorch program, unchanged, with all of its GPU memory from a pool of bfc"
EPILOG = """\
The program is that of `python SCRIPT`, of `python -m MODULE`, or one on the PATH, such as torchrun.
In each Python that it starts, a pool of bfc takes the place of PyTorch's allocator when torch is
imported, before CUDA is used: memory_stats(), snapshots, CUDA graphs and torch.compile work as
ever. The first time that compiles for half a minute. Python without torch or without bfc runs as
before. Options of bfc stand before the program; all that follows it is the program's.

  bfc run train.py --epochs 3
  bfc run --memory-limit 20GiB --summary -m my.package.train
  bfc run torchrun --nproc-per-node 2 train.py

policies: those of `bfc replay` that begin with caching. The default, caching:stitch, joins free
memory that lies apart, so that no request is refused for that. caching is PyTorch's own policy.
SETTINGS may follow; those of PYTORCH_CUDA_ALLOC_CONF are followed, too.

Where the command cannot stand before the program, two variables say the same: bfc run --env prints
them, with the options that stand beside it. BFC_RUN has these, named with _ for -, as in
BFC_RUN=caching:stitch=True,memory_limit=20GiB; PYTHONPATH begins with a folder of bfc.

The exit code is the program's own; 2 for a wrong call.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "bfc run [OPTION]... [--] SCRIPT [ARGUMENT]...\n"
        "       bfc run [OPTION]... -m MODULE [ARGUMENT]...\n"
        "       bfc run [OPTION]... PROGRAM [ARGUMENT]..."
    )
    add = parser.add_argument
    add(
        "--policy",
        default=Wanted.policy,
        metavar="POLICY",
        help="caching[:[stitch[,page_size=SIZE],]SETTINGS] (default: caching:stitch)",
    )
    add(
        "--memory-limit",
        metavar="LIMIT",
        help="the most that the pool of each device may take: bytes, such as 20GiB, or a fraction "
        "of the device, such as 0.9",
    )
    add(
        "--plan",
        type=Path,
        metavar="FILE",
        help="serve a plan that `bfc plan` wrote, of a recording of this program; its iterations "
        "are recognised by what they ask for",
    )
    add(
        "--history",
        action="store_true",
        help="record PyTorch's own history from the first allocation on, for a program that calls "
        "_dump_snapshot()",
    )
    add(
        "--summary",
        action="store_true",
        help="at the end say three lines on stderr: the peaks, what PyTorch's own allocator would "
        "have reserved, and calls of the driver",
    )
    add(
        "--report",
        type=Path,
        metavar="HTML",
        help="at the end write the page of `bfc report`, also after running out of memory",
    )
    add(
        "--env",
        action="store_true",
        help="run nothing, and print the lines for a shell after which every Python is served",
    )
    add_program(parser)


def run(arguments: argparse.Namespace) -> bool:
    """Becomes the program: returns only with --env, or where that cannot be, with an error."""
    wanted = Wanted(
        policy=arguments.policy,
        memory_limit=arguments.memory_limit,
        plan=arguments.plan and os.path.abspath(arguments.plan),  # processes go to other folders
        history=arguments.history,
        summary=arguments.summary,
        report=arguments.report and os.path.abspath(arguments.report),
    )
    command = [] if arguments.env else _command(arguments)
    _check(wanted)
    variables = _variables(wanted.text())
    if arguments.env:
        for name, value in variables.items():
            print(f"export {name}={shlex.quote(value)}")
    else:
        _become(command, variables)
    return True


def _become(command: list[str], variables: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the program would
        signal.signal(number, signal.SIG_DFL)
    os.execve(command[0], command, os.environ | variables | {FIRST: str(os.getpid())})


def _check(wanted: Wanted) -> None:
    """Raises what is wrong with the options, before anything runs."""
    wanted.files()
    make = wanted.maker(NEWEST, settings_of_environment())
    make(device_maker("simulated:1TiB")()).close()


def _command(arguments: argparse.Namespace) -> list[str]:
    """The program, by its whole path, and its arguments."""
    if arguments.module is not None:  # a module's end before "--"
        return [sys.executable, "-m", *arguments.module, *arguments.command]
    command: list[str] = arguments.command
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise ValueError("which program? bfc run train.py, or bfc run -m my.module")
    program = command[0]
    if program.endswith(".ipynb"):
        raise ValueError(
            f"{program} is a notebook: start the server so, bfc run jupyter lab, and each kernel "
            "of it gets a pool; or call bfc.integrations.torch.install() in a cell"
        )
    if _is_of_python(program):
        return [sys.executable, *command]
    found = shutil.which(program)
    if found is None:
        raise FileNotFoundError(f"no such script, and no such program on the PATH: {program}")
    return [found, *command[1:]]


def _is_of_python(path: str) -> bool:
    """Whether Python is to run it: a file or folder, unless that is a program of another kind."""
    if path.endswith(".py") or os.path.isdir(path):
        return os.path.exists(path)
    return os.path.isfile(path) and not os.access(path, os.X_OK)


def _variables(text: str) -> dict[str, str]:
    """What makes of a Python one that is served: it reads our folder first."""
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [str(STARTUP), *(it for it in path if it not in ("", str(STARTUP)))]
    return {VARIABLE: text, "PYTHONPATH": os.pathsep.join(path)}
