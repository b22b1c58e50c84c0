"""`bfc predict SCRIPT`: how much GPU memory a PyTorch program will need, found without a GPU."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from difflib import get_close_matches
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from bfc.units import format_bytes
from bfc_tools.cli import launchers, models
from bfc_tools.cli.endings import Ended, Exit
from bfc_tools.cli.program import add_program
from bfc_tools.cli.searching import SINGLE, add_questions, asked_for, search
from bfc_tools.cli.sizes import device_bytes
from bfc_tools.cli.streams import tell
from bfc_tools.predicting import devices, outside
from bfc_tools.predicting import text as texts
from bfc_tools.predicting.asked import Asked, figures, fits_gpu, verdict_of
from bfc_tools.predicting.changes import BY_NAME, named
from bfc_tools.predicting.failures import failed
from bfc_tools.predicting.stopping import STEPS, Limits
from bfc_tools.predicting.summary import markdown

if TYPE_CHECKING:
    from bfc_tools.predicting.prediction import Prediction
    from bfc_tools.predicting.script import Ran
    from bfc_tools.predicting.verdict import Verdict
    from bfc_tools.study.advice import Advice

HELP = "predict how much GPU memory a PyTorch program needs, without a GPU"
EPILOG = f"""\
The script runs as `python SCRIPT ARGUMENTS` would run it, on tensors that are only shapes: it needs
no GPU, and computes nothing on one. It uses the network, and starts other programs, with your
rights. What it prints goes to standard error.

Your files stay as they are: what the script writes, renames and removes is so for the script and
the programs that it starts alone, and is thrown away at its end, also downloads and temporary
files. --real-files lets the script work on your files; its checkpoints hold nothing then.

Options of bfc may stand before the script, or among its arguments. An option that the script's own
text has, too, is left to the script there, and so is --device cuda. What stands after -- is the
script's alone: bfc predict train.py --device h100 -- --steps 1000.

It is stopped after {STEPS} steps of the optimizer, since the state of optimizers appears in the
first, and what is kept for the next step in the second; or, if its files call _dump_snapshot, once
it has written that. --steps says otherwise; --steps 0 lets it run to its end. A program without an
optimizer runs to its end: --forwards stops it after so many calls of a model, --seconds after so
much time. Of several limits, the first that is reached counts.

The first line answers. "live" is what the program asked for, "allocated" what
torch.cuda.max_memory_allocated() counts, "reserved" what is taken from the device: that must fit.
In the tables, numbers in names of modules are joined: layers.*.attn are those of all layers.

A device is the name of a GPU, such as h100 or "RTX 4090", or what it leaves to PyTorch, such as
24GiB, with --cc and --sms for what operators ask of it. The names are
{fill(", ".join(devices.DEVICES), 96)}.

--largest batch-size=1..512 searches for the largest value that fits, of an argument that the script
takes as --batch-size 8, --batch-size=8 or batch-size=8: it says which. The last that fits and the
first that does not are the proof. Values may be 8..512:8 (in steps of 8) or 8,16,32, and a variable
of the environment is env:BATCH=1..512. Given twice, it is found for some values of the second.
--cheapest tries all GPUs. --what-if names what holds the memory, and tries changes that need no
editing: {", ".join(BY_NAME)}.
--with checkpoint,bf16 makes some of them in a single prediction, or in a search. A search imports
PyTorch once, and forks that process for each try. --dask tcp://10.0.0.1:8786 makes the tries on the
workers of a Dask cluster, and --ray ADDRESS on those of a Ray cluster: they need bfc, PyTorch, and
the script's files where they lie on this machine.

--nproc 8 --nnodes 2 predicts a program of 16 processes as torchrun would start them, each with its
RANK: a table, the worst first, and what that has more of than the others. Of more than
8 ranks it runs those that may differ, and says which. torchrun, accelerate launch and
-m torch.distributed.run before the script, with their options, ask for the same.

With --oom the program gets torch.OutOfMemoryError where it runs out of memory. That may be caught;
the first line says what was refused all the same. A program that finds its batch size by running
out of memory needs --oom to find it.

--budget is the most that PyTorch may take, where that is less than the GPU leaves to it: the answer
is for that then. The operators are those of the GPU. --markdown prints what a comment on a pull
request has room for.

--as-torch 2.9 places memory by the rules of PyTorch 2.9, and counts what its operators take beside
their results, whichever PyTorch is installed. Which operators it would call that cannot tell: it
says so. Of a release that is newer than all that are known, the rules of the newest hold.

--about aten::mm prints what is known of an operator, where that was read, and what is not known; of
names that are no operator's, those that are like them.

exit code: 0 it fits; 1 it does not, or a request was refused; 2 a wrong call, or the script failed
or left no answer; 3 it fits on the GPU, but not into --budget (of a single prediction); 130
interrupted; 128 and a signal's number if that ended it.
"""
#: Seconds between two lines that tell how far it is.
EVERY = 10.0
#: More seconds than this a timer of the system does not take.
MOST_SECONDS = 1e8
#: Values of an option --device that are the script's, not ours.
SCRIPTS_DEVICES = re.compile(r"(cuda|cpu|mps|xpu|auto|gpu|meta)(:\d+)?", re.IGNORECASE)
#: What is said where it does not fit.
ASK_WHAT_IF = (
    "With --what-if, the same command names what holds the memory, and tries changes of the "
    "program."
)
TABLES = {"module": "by_module", "op": "by_operator", "line": "by_line"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "bfc predict [OPTION]... SCRIPT [ARGUMENT | OPTION]... [-- ARGUMENT...]\n"
        "       bfc predict [OPTION]... -m MODULE [ARGUMENT | OPTION]... [-- ARGUMENT...]\n"
        "       bfc predict [OPTION]... hf:MODEL [--task train|serve] [ARGUMENT | OPTION]...\n"
        "       bfc predict --about OPERATOR"
    )
    parser.add_argument(
        "--about",
        metavar="OPERATOR",
        help="print what is known of an operator of PyTorch's, such as aten::mm",
    )
    _add_shared(parser)
    add_program(parser)


def _add_shared(parser: argparse.ArgumentParser, default: Any = None) -> None:
    """The options that may stand among the script's arguments, too."""
    add = parser.add_argument
    add("--device", metavar="GPU", default=default, help="a GPU, or a size (default: h100)")
    add("--budget", metavar="SIZE", default=default, help="the most that it may take, as 22GiB")
    add("--cc", metavar="X.Y", default=default, help="its compute capability, such as 8.9")
    add("--sms", type=int, metavar="N", default=default, help="its number of multiprocessors")
    add("--steps", type=int, metavar="N", default=default, help="stop after N optimizer steps")
    add(
        "--forwards",
        type=int,
        metavar="N",
        default=default,
        help="stop after N calls of a model, where there is no optimizer",
    )
    add("--seconds", type=float, metavar="N", default=default, help="stop after N seconds")
    add(
        "--settings",
        metavar="CONF",
        default=default,
        help="as in PYTORCH_CUDA_ALLOC_CONF (default: what that variable has)",
    )
    add(
        "--oom",
        action="store_true",
        default=default or False,
        help="run out of memory where the program would: it gets torch.OutOfMemoryError",
    )
    add(
        "--real-files",
        action="store_true",
        default=default or False,
        help="let the script write, rename and remove files",
    )
    add(
        "--as-torch",
        metavar="X.Y",
        default=default,
        help="by the rules of another PyTorch than is installed, such as 2.9",
    )
    add("--save", type=Path, metavar="TRACE", default=default, help="save the run, an .npz trace")
    add(
        "--by",
        choices=sorted(TABLES),
        default=default,
        help="whose memory it is at the peak: by module (default), operator or line",
    )
    add("--no-advice", action="store_true", default=default or False, help="search no settings")
    forms = parser.add_mutually_exclusive_group()
    for name, what in (("--json", "JSON"), ("--markdown", "a summary in Markdown")):
        forms.add_argument(
            name, action="store_true", default=default or False, help=f"print {what}, not text"
        )
    add_questions(parser, default)


def run(arguments: argparse.Namespace) -> bool | Exit:
    """Runs the script, and prints what it needs. Returns whether that fits, or that only a budget
    is too small. The command does so in a process of its own, and this one stays outside. A search
    does so many times."""
    if arguments.about is not None:
        print(_about(arguments))
        return True
    asked = _asked(arguments)
    if arguments.named is not None and arguments.named.engine:
        return _by_arithmetic(arguments, asked)
    arguments.serves = models.load_of(arguments.named, asked.arguments)
    if asked_for(arguments):
        return search(arguments, asked)
    if arguments.ends_process:
        outside.begin(asked.real_files)
    return _run(arguments, asked)


def _by_arithmetic(arguments: argparse.Namespace, asked: Asked) -> bool:
    """Prints what a server has room for. Returns whether that is enough."""
    arguments.serves = None
    for name in (*asked_for(arguments), *(one for one in SINGLE if getattr(arguments, one))):
        raise ValueError(f"--engine is answered by arithmetic, and --{name} needs a program")
    server = models.server_of(arguments.named, asked.arguments, asked.device)
    print(json.dumps(server.to_dict(), indent=1) if arguments.json else server)
    return server.fits is True


def _about(arguments: argparse.Namespace) -> str:
    if arguments.module or arguments.command:
        raise ValueError("--about prints what is known of an operator, and runs no script")
    from bfc_tools.predicting.about import about

    return about(arguments.about)


def _asked(arguments: argparse.Namespace) -> Asked:
    """What the options and the script's arguments ask."""
    script, rest = _split(arguments)
    limits = _limits(arguments)
    if arguments.save is not None and arguments.save.suffix != ".npz":
        raise ValueError(
            f"--save writes the run as an .npz trace, not {arguments.save}. "
            "What the script itself is to be told stands behind --"
        )
    device = arguments.device or "h100"
    if SCRIPTS_DEVICES.fullmatch(device):
        raise ValueError(
            f"--device {device} names no GPU: write a GPU such as h100, or a size such as 24GiB. "
            f"An option of the script's stands behind it: bfc predict {script} --device {device}"
        )
    if devices.find(device).usable == devices.find(device).memory:  # a size
        device_bytes(device, "--device")
    budget = None if arguments.budget is None else device_bytes(arguments.budget, "--budget")
    return Asked(
        script,
        tuple(rest),
        module=arguments.module is not None,
        title=arguments.title,
        limits=limits,
        device=device,
        budget=budget,
        cc=arguments.cc,
        sms=arguments.sms,
        settings=arguments.settings,
        oom=arguments.oom,
        real_files=arguments.real_files,
        environment=getattr(arguments, "environment", ()),
        changes=named(getattr(arguments, "with") or ""),
        as_torch=arguments.as_torch,
    )


def _run(arguments: argparse.Namespace, asked: Asked) -> bool | Exit:
    ran = asked.run(_Progress())
    found = ran.prediction
    error = _failed(asked, ran)
    verdict = verdict_of(ran, asked.called, asked.budget, error)
    hint = asked.hint(ran, verdict)
    advice = None
    adapted = found.went_on or (found.ran_out and not found.refusals)
    if verdict.fits is False and not (arguments.no_advice or adapted or ran.signal):
        print("bfc: looking for settings that make it fit", file=sys.stderr, flush=True)
        advice = found.advise(asked.budget and verdict.limit)
    if arguments.save is not None:
        _save(found, arguments.save)
    if arguments.json:
        found_all = figures(ran, verdict, hint, advice, asked.budget)
        print(json.dumps(found_all, indent=1, default=str))
    elif arguments.markdown:
        print("\n".join(markdown(found, verdict, advice)))
    else:
        print(_text(ran, verdict, hint, advice, TABLES[arguments.by or "module"]))
    if error is not None and (verdict.fits is None or ran.signal):
        sys.stdout.flush()
        raise error
    if error is not None and not _ran_out(ran):
        print(f"bfc: {error}", file=sys.stderr)
    over = verdict.fits is False and fits_gpu(ran, verdict, asked.budget)
    return Exit.OVER_BUDGET if over else bool(verdict.fits)


def _limits(arguments: argparse.Namespace) -> Limits:
    """After what the program is stopped."""
    steps, forwards, seconds = arguments.steps, arguments.forwards, arguments.seconds
    if steps is not None and steps < 0:
        raise ValueError(f"--steps is 0 (no limit) or more, not {steps}")
    if forwards is not None and forwards < 1:
        raise ValueError(f"--forwards is 1 or more, not {forwards}")
    if seconds is not None and not 0 < seconds < MOST_SECONDS:
        raise ValueError(f"--seconds is more than 0, not {seconds:g}")
    return Limits(sys.maxsize if steps == 0 else steps, forwards, seconds)


def _save(found: Prediction, path: Path) -> None:
    """Writes the run where the user wants it, also where files are kept apart."""
    if outside.link is None or not outside.link.apart:
        found.save(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        found.save(f"{folder}/trace.npz")
        outside.link.write(str(path), Path(folder, "trace.npz").read_bytes())


def _split(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """The script, or module, and its arguments; options of ours among these are taken out.

    An option that the script's own text has is left to it.
    """
    command = [*(arguments.module or ()), *arguments.command]  # a module's end before "--"
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise ValueError("which script? bfc predict train.py --device 24GiB")
    command = _launched(arguments, command)
    command = _named(arguments, command)
    script = command.pop(0)
    end = command.index("--") if "--" in command else len(command)
    mixed, own = command[:end], command[end + 1 :]
    text = Asked(script, module=arguments.module is not None).text()
    left: list[str] = []
    hidden = [_hide(word, mixed[at + 1 :], text, left) for at, word in enumerate(mixed)]
    parser = argparse.ArgumentParser(
        prog="bfc predict", add_help=False, allow_abbrev=False, argument_default=None
    )
    _add_shared(parser, argparse.SUPPRESS)
    ours, rest = parser.parse_known_args(hidden)
    for name, value in vars(ours).items():
        before = getattr(arguments, name) if isinstance(value, list) else None
        setattr(arguments, name, [*before, *value] if before else value)
    script_or_model = arguments.title or script
    _tell(script_or_model, sorted(vars(ours)), left)
    for word in rest:
        name = word.partition("=")[0]
        near = get_close_matches(name, [f"--{one}" for one in NAMES], 1, 0.8)
        if near and not _has(text, name):
            tell(f"bfc: {name} goes to {script_or_model}. Did you mean bfc's own {near[0]!r}?")
    return script, [word.removeprefix(HIDDEN) for word in rest] + own


def _launched(arguments: argparse.Namespace, command: list[str]) -> list[str]:
    """The command without the launcher that it begins with, which says how many processes."""
    launch = launchers.read(command, arguments.module is not None)
    if launch is None:
        return command
    if arguments.nproc is not None or arguments.nnodes is not None:
        raise ValueError(
            f"{command[0]} says how many processes there are: leave --nproc and --nnodes out"
        )
    arguments.nproc, arguments.nnodes = launch.nproc, launch.nnodes
    arguments.environment = launch.environment
    arguments.module = [] if launch.module else None
    return list(launch.words)


def _named(arguments: argparse.Namespace, command: list[str]) -> list[str]:
    """The command with a module in place of the name of a model, if it begins with one."""
    arguments.title, arguments.named = "", None
    if arguments.module is not None or not models.is_model(command[0]):
        return command
    named = models.read(command)
    arguments.title, arguments.module, arguments.named = named.title, [], named
    given = getattr(arguments, "environment", ())
    arguments.environment = (*given, *named.environment)
    return [named.module, *named.words]


#: Before a word that is the script's, so that our parser leaves it where it is.
HIDDEN = "\0"
#: Our options that may stand behind the script.
NAMES = (
    *("device", "budget", "cc", "sms", "steps", "forwards", "seconds", "settings", "oom"),
    "as-torch",
    *("real-files", "save", "by", "no-advice", "json", "markdown"),
    *("largest", "cheapest", "what-if", "with", "jobs", "nproc", "nnodes"),
)
OPTIONS = re.compile(rf"--({'|'.join(NAMES)})(=.*)?", re.DOTALL)


def _hide(word: str, following: list[str], text: str, left: list[str]) -> str:
    """The word, marked if it is an option of the script that is called as one of ours."""
    found = OPTIONS.fullmatch(word)
    if found is None:
        return word
    name = f"--{found[1]}"
    value = found[2][1:] if found[2] else "".join(following[:1])
    if name == "--device":  # --device cuda is the script's, --device h100 is not
        is_the_scripts = SCRIPTS_DEVICES.fullmatch(value) is not None
    else:
        is_the_scripts = _has(text, name)
        if is_the_scripts:
            left.append(name)
    return HIDDEN + word if is_the_scripts else word


def _has(text: str, name: str) -> bool:
    """Whether a script's text names an option."""
    return re.search(rf"[\"']{re.escape(name)}[\"']", text) is not None


def _tell(script: str, ours: list[str], left: list[str]) -> None:
    """Says on standard error whose the options behind the script were."""
    if left:
        tell(
            f"bfc: {', '.join(left)} left to {script}, which has the same; bfc's own stands before "
            "the script"
        )
    if ours:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in ours)
        tell(f"bfc: {named} taken as bfc's own; behind -- all is {script}'s")


def _failed(asked: Asked, ran: Ran) -> BaseException | None:
    """What is said if the script raised an error, or ended by a signal."""
    if ran.signal or isinstance(ran.error, KeyboardInterrupt):
        return _signalled(ran) or ran.error
    return failed(asked.called, ran)


def _signalled(ran: Ran) -> BaseException | None:
    """What ends the command after a signal that the program got."""
    if ran.signal == signal.SIGINT:
        return KeyboardInterrupt()
    return Ended(ran.signal) if ran.signal else None


def _ran_out(ran: Ran) -> bool:
    return type(ran.error).__name__ == "OutOfMemoryError"


class _Progress:
    """A line on standard error now and then."""

    def __init__(self) -> None:
        self._began = self._next = time.monotonic()
        self._next += EVERY

    def __call__(self, ran: Ran) -> None:
        found, stopping = ran.prediction, ran.stopping
        now = time.monotonic()
        if now >= self._next:
            self._next = now + EVERY
            print(
                f"bfc: {now - self._began:.0f} s, {found.operators} operators, "
                f"{stopping.steps} optimizer steps, {stopping.forwards} forward passes, "
                f"{format_bytes(found.peak_requested)} live at most",
                file=sys.stderr,
                flush=True,
            )


def _text(ran: Ran, verdict: Verdict, hint: str, advice: Advice | None, table: str) -> str:
    all_of_it = "; --steps 0 runs all of it" if ran.stopping.limits.is_default else ""
    stopped = ran.stopped and ran.stopped + all_of_it
    said = texts.lines(ran.prediction, verdict, table, advice=advice, hint=hint, stopped=stopped)
    more = [] if verdict.fits or ran.prediction.changes else ["", ASK_WHAT_IF]
    return "\n".join([*said, *more])
