"""`bfc run SCRIPT`: a PyTorch program, unchanged, with all of its GPU memory from pools of bfc."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from pathlib import Path

from bfc.integrations._torch_cuda import settings_of_environment
from bfc.pytorch.rules import NEWEST
from bfc_tools.cli.policies import device_maker
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
        "-m",
        dest="module",
        nargs=argparse.PARSER,  # its arguments too, which may begin with an option
        metavar="MODULE",
        help="run a module, as python -m",
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="the program, with its arguments",
    )


def run(arguments: argparse.Namespace) -> bool:
    """Becomes the program: returns only where that cannot be, with an error."""
    wanted = Wanted(policy=arguments.policy, memory_limit=arguments.memory_limit)
    command = _command(arguments)
    _check(wanted)
    sys.stdout.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the program would
        signal.signal(number, signal.SIG_DFL)
    os.execve(command[0], command, _environment(wanted.with_whole_paths().text()))


def _check(wanted: Wanted) -> None:
    """Raises what is wrong with the options, before anything runs."""
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


def _environment(text: str) -> dict[str, str]:
    """That of the program: its Pythons read our folder first."""
    path = [str(STARTUP)]
    path += filter(None, [os.environ.get("PYTHONPATH")])
    return os.environ | {
        VARIABLE: text,
        FIRST: str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(path),
    }
