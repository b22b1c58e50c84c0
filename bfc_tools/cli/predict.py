"""`bfc predict SCRIPT`: how much GPU memory a PyTorch program will need, found without a GPU."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from bfc.units import format_bytes
from bfc_tools.cli.sizes import device_bytes
from bfc_tools.cli.tables import printable
from bfc_tools.predicting import devices
from bfc_tools.predicting import script as scripts
from bfc_tools.predicting.prediction import REPEATS
from bfc_tools.predicting.script import STEPS, Ran, causes
from bfc_tools.study.advise import advise

if TYPE_CHECKING:
    from bfc_tools.predicting.prediction import Prediction
    from bfc_tools.study.advice import Advice

HELP = "predict how much GPU memory a PyTorch program needs, without a GPU"
EPILOG = f"""\
The script runs as `python SCRIPT ARGUMENTS` would run it, on tensors that are only shapes: it needs
no GPU, and computes nothing on one. It uses the network, and starts other programs, with your
rights. What it prints goes to standard error.

Your files stay as they are: what the script writes, renames and removes with Python's functions is
so for the script alone, and is thrown away at its end. Not so what code in C, other programs and
processes that multiprocessing spawns write, downloads into caches, and temporary files.
--real-files lets the script work on your files; its checkpoints hold nothing then.

Options of bfc may stand before the script, or among its arguments. An option that the script's own
text has, too, is left to the script there, and so is --device cuda. What stands after -- is the
script's alone: bfc predict train.py --device h100 -- --steps 1000.

It is stopped after {STEPS} steps of the optimizer, since the state of optimizers appears in the
first, and what is kept for the next step in the second; or, if its files call _dump_snapshot, once
it has written that. --steps says otherwise; --steps 0 lets it run to its end.

The first line answers. "live" is what the program asked for, "allocated" what
torch.cuda.max_memory_allocated() counts, "reserved" what is taken from the device: that must fit.
In the tables, numbers in names of modules are joined: layers.*.attn are those of all layers.

A device is the name of a GPU, such as h100 or "RTX 4090", or what it leaves to PyTorch, such as
24GiB, with --cc and --sms for what operators ask of it. The names are
{fill(", ".join(devices.DEVICES), 96)}.

exit code: 0 it fits, 1 it does not, 2 a wrong call, or the script failed, 130 interrupted.
"""
#: How many rows a table has.
ROWS = 10
#: Seconds between two lines that tell how far it is.
EVERY = 10.0
#: Values of an option --device that are the script's, not ours.
SCRIPTS_DEVICES = re.compile(r"(cuda|cpu|mps|xpu|auto|gpu|meta)(:\d+)?", re.IGNORECASE)
#: What a module's file is called, behind the module's name.
MODULE_ENDS = (".py", "/__main__.py")
TABLES = {"module": "by_module", "op": "by_operator", "line": "by_line"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "bfc predict [OPTION]... SCRIPT [ARGUMENT | OPTION]... [-- ARGUMENT...]\n"
        "       bfc predict [OPTION]... -m MODULE [ARGUMENT | OPTION]... [-- ARGUMENT...]"
    )
    _add_shared(parser)
    parser.add_argument(
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


def _add_shared(parser: argparse.ArgumentParser, default: Any = None) -> None:
    """The options that may stand among the script's arguments, too."""
    add = parser.add_argument
    add("--device", metavar="GPU", default=default, help="a GPU, or a size (default: h100)")
    add("--cc", metavar="X.Y", default=default, help="its compute capability, such as 8.9")
    add("--sms", type=int, metavar="N", default=default, help="its number of multiprocessors")
    add("--steps", type=int, metavar="N", default=default, help="stop after N optimizer steps")
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
    add("--save", type=Path, metavar="TRACE", default=default, help="save the run, an .npz trace")
    add(
        "--by",
        choices=sorted(TABLES),
        default=default,
        help="whose memory it is at the peak: by module (default), operator or line",
    )
    add("--no-advice", action="store_true", default=default or False, help="search no settings")
    add("--json", action="store_true", default=default or False, help="print JSON, not text")


def run(arguments: argparse.Namespace) -> bool:
    """Runs the script, and prints what it needs. Returns whether that fits."""
    script, rest = _split(arguments)
    steps = arguments.steps
    if steps is not None and steps < 0:
        raise ValueError(f"--steps is 0 (no limit) or more, not {steps}")
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
    ran = scripts.run(
        script,
        rest,
        module=arguments.module is not None,
        steps=sys.maxsize if steps == 0 else steps,
        progress=_Progress(),
        device=device,
        cc=arguments.cc,
        sms=arguments.sms,
        settings=arguments.settings,
        oom=arguments.oom,
        real_files=arguments.real_files,
        until_exit=arguments.ends_process,
    )
    found = ran.prediction
    if not len(found.trace) and arguments.oom and _ran_out(ran):
        print(f"It runs out of memory on {found.gpu.name} at its first allocation.")
        return False
    if not len(found.trace):
        raise _failed(script, ran) or ValueError(
            f"{script} allocated nothing on the GPU: bfc predicts what a program does on the "
            'device "cuda". Does it ask for another device?'
        )
    fits = found.fits()
    advice = None
    if not fits and not arguments.no_advice:
        print("bfc: looking for settings that make it fit", file=sys.stderr, flush=True)
        advice = advise(found.trace, found.gpu.usable, jobs=1)
    if arguments.save is not None:
        found.trace.save(arguments.save)
    if arguments.json:
        print(_json(ran, fits, advice))
    else:
        print("\n".join(_text(ran, fits, advice, TABLES[arguments.by or "module"])))
    failed = _failed(script, ran)
    if failed is not None and not (arguments.oom and _ran_out(ran)):
        sys.stdout.flush()
        raise failed
    return fits


def _split(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """The script, or module, and its arguments; options of ours among these are taken out.

    An option that the script's own text has is left to it.
    """
    command = [*(arguments.module or ()), *arguments.command]  # a module's end before "--"
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise ValueError("which script? bfc predict train.py --device 24GiB")
    script = command.pop(0)
    end = command.index("--") if "--" in command else len(command)
    mixed, own = command[:end], command[end + 1 :]
    text = _text_of(Path(script) if arguments.module is None else _file_of(script))
    left: list[str] = []
    hidden = [_hide(word, mixed[at + 1 :], text, left) for at, word in enumerate(mixed)]
    parser = argparse.ArgumentParser(
        prog="bfc predict", add_help=False, allow_abbrev=False, argument_default=None
    )
    _add_shared(parser, argparse.SUPPRESS)
    ours, rest = parser.parse_known_args(hidden)
    vars(arguments).update(vars(ours))
    _tell(script, sorted(vars(ours)), left)
    return script, [word.removeprefix(HIDDEN) for word in rest] + own


#: Before a word that is the script's, so that our parser leaves it where it is.
HIDDEN = "\0"
#: Our options that may stand behind the script.
OPTIONS = re.compile(
    r"--(device|cc|sms|steps|settings|oom|real-files|save|by|no-advice|json)(=.*)?", re.DOTALL
)


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
        is_the_scripts = re.search(rf"[\"']{re.escape(name)}[\"']", text) is not None
        if is_the_scripts:
            left.append(name)
    return HIDDEN + word if is_the_scripts else word


def _file_of(module: str) -> Path:
    """The file that `python -m` runs, found without importing its package."""
    inside = module.replace(".", "/")
    files = [Path(folder, inside + end) for folder in ("", *sys.path) for end in MODULE_ENDS]
    return next((file for file in files if file.is_file()), files[0])


def _text_of(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""  # which is said when it is run


def _tell(script: str, ours: list[str], left: list[str]) -> None:
    """Says on standard error whose the options behind the script were."""
    if left:
        print(
            f"bfc: {', '.join(left)} left to {script}, which has the same; bfc's own stands before "
            "the script",
            file=sys.stderr,
        )
    if ours:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in ours)
        print(f"bfc: {named} taken as bfc's own; behind -- all is {script}'s", file=sys.stderr)


def _failed(script: str, ran: Ran) -> Exception | None:
    """What is said if the script raised an error."""
    error = ran.error
    if error is None:
        return None
    if isinstance(error, KeyboardInterrupt):
        raise error
    until = "the figures are those until then"
    if not len(ran.prediction.trace):
        until = "it had allocated nothing on the GPU"
    if isinstance(error, SystemExit):
        return RuntimeError(f"{script} exited with {error.code!r}; {until}")
    return RuntimeError(
        f"{script} raised {type(error).__name__} (its traceback is above); {until}{_hint(error)}"
    )


def _hint(error: BaseException) -> str:
    """What to do about an error, or about what caused it."""
    if isinstance(error, NotImplementedError):  # which says it itself
        return ""
    for cause in causes(error):
        if isinstance(cause, ModuleNotFoundError) and cause.name == "triton":
            return ". pip install triton: its kernels are not run here, but the script imports it"
        if any(text in str(cause) for text in _NO_VALUES):
            return (
                ". A kernel of the program's own reads a tensor, which has no values here: make an "
                "operator of it with torch.library.custom_op, and say with register_fake what it "
                "returns"
            )
        if isinstance(cause, KeyError) and str(cause).strip("'") in _OF_TORCHRUN:
            return (
                ". torchrun sets that variable. RANK=0 LOCAL_RANK=0 WORLD_SIZE=8 bfc predict "
                "... predicts the first of eight processes"
            )
        for one in type(cause).__mro__:
            if one.__name__ in _HINTS:
                return _HINTS[one.__name__]
    return ""


#: What PyTorch says where something reads the memory of a tensor that is only a shape.
_NO_VALUES = ("its data is not allocated yet", "Cannot access data pointer of Tensor")
_OF_TORCHRUN = frozenset(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"))
_PACKAGE = ". It needs that package here, too: bfc runs the whole script"
_HINTS = {
    "AssertionError": (
        ". If it is about what tensors hold: a prediction mostly does not know that, and takes "
        "for False what depends on it. With PYTHONOPTIMIZE=1 Python leaves asserts out"
    ),
    "LocalEntryNotFoundError": (
        ". It needs the network here, too, or the files in Hugging Face's cache"
    ),
    "MisconfigurationException": (  # Lightning's, if it is asked for more devices than there are
        ". bfc predicts for one GPU: if it asks for more, give it arguments that ask for one"
    ),
    "FileNotFoundError": ". It needs that file here, too: bfc runs the whole script",
    "ModuleNotFoundError": _PACKAGE,
    "ImportError": (
        ". If a package is missing, it is needed here, too: bfc runs the whole script. In place of "
        "kernels that need a GPU, such as flash_attn, give the program what "
        'PyTorch has: attn_implementation="sdpa" for flash_attention_2'
    ),
    **dict.fromkeys(
        ("ConnectionError", "ConnectError", "URLError", "gaierror", "TimeoutError", "HTTPError"),
        ". It needs the network here, too: bfc runs the whole script",
    ),
}


def _ran_out(ran: Ran) -> bool:
    return type(ran.error).__name__ == "OutOfMemoryError"


class _Progress:
    """A line on standard error now and then."""

    def __init__(self) -> None:
        self._began = self._next = time.monotonic()
        self._next += EVERY

    def __call__(self, found: Prediction, steps: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + EVERY
            print(
                f"bfc: {now - self._began:.0f} s, {found.operators} operators, "
                f"{steps} optimizer steps, {format_bytes(found.peak_requested)} live at most",
                file=sys.stderr,
                flush=True,
            )


def _json(ran: Ran, fits: bool, advice: Advice | None) -> str:
    import json

    figures = ran.prediction.to_dict()
    error = None if ran.error is None else f"{type(ran.error).__name__}: {ran.error}"
    figures |= {
        "fits": fits if error is None or not fits else None,
        "steps": ran.steps,
        "stopped": ran.stopped,
        "error": error,
    }
    figures["advice"] = None if advice is None else json.loads(advice.to_json())
    return json.dumps(figures, indent=1, default=str)


def _text(ran: Ran, fits: bool, advice: Advice | None, table: str) -> Iterator[str]:
    found = ran.prediction
    failed = ran.error is not None and not _ran_out(ran)
    yield ("Until it failed: " if failed else "") + _answer(found, fits)
    yield from _peaks(found)
    yield from _at_other_addresses(found)
    yield from _repeated(found)
    yield ""
    yield from _moment(found)
    yield ""
    yield from _rows("whose memory at the peak", found.peak.by_kind)
    yield ""
    title = {"by_module": "by module", "by_operator": "by operator", "by_line": "by line"}[table]
    rows: Mapping[str, int] = getattr(found.peak, table)
    yield from _rows(title, _joined(rows) if table == "by_module" else rows)
    if advice is not None:
        yield ""
        yield str(advice)
    yield ""
    yield "not in these numbers (the ranges are rough):"
    for one in found.not_counted:
        yield (f"  {one.what}: {format_bytes(one.low)} to {format_bytes(one.high)}, {one.why}")
    names: dict[str, list[str]] = {}
    for name, why in found.unknown.items():
        names.setdefault(why, []).append(name)
    yield from (f"  {', '.join(alike)}: {why}" for why, alike in names.items())
    yield ""
    yield "assumed:"
    yield from (f"  {line}" for line in _assumed(ran))


def _answer(found: Prediction, fits: bool) -> str:
    held = format_bytes(found.peak_reserved)
    device = f"{found.gpu.name}, of which PyTorch can take {format_bytes(found.gpu.usable)}"
    if found.gpu.memory == found.gpu.usable:
        device = found.gpu.name
    if found.limited:
        word = "fits on" if fits else "runs out of memory on"
        return f"It {word} {device}: it reserves {held} at most."
    if fits and found.peak_reserved > found.gpu.usable:
        return f"It fits on {device}, if only just: with more room it would reserve {held}."
    if fits:
        return f"It fits on {device}: it reserves at most {held}."
    return f"It does not fit on {device}: it would reserve {held}."


def _peaks(found: Prediction) -> Iterator[str]:
    yield f"live       {format_bytes(found.peak_requested)} at most, asked for by the program"
    yield f"allocated  {format_bytes(found.peak_allocated)} at most, in blocks of the allocator"
    if found.settings:
        yield (
            f"reserved   {format_bytes(found.peak_reserved)} at most under {found.settings}, "
            f"{format_bytes(found.reserved_under(''))} under the defaults"
        )
    else:
        yield (
            f"reserved   {format_bytes(found.peak_reserved)} at most, under PyTorch's default "
            "settings"
        )


def _at_other_addresses(found: Prediction) -> Iterator[str]:
    """What is reserved in other processes, where that varies."""
    low, high = found.reserved_range()
    if low < high:
        fits = ", which may not fit" if found.peak_reserved <= found.gpu.usable < high else ""
        yield (
            f"           {format_bytes(low)} to {format_bytes(high)} by the addresses that the "
            f"driver gives{fits}: PyTorch 2.13 and later do not depend on them"
        )


def _repeated(found: Prediction) -> Iterator[str]:
    """What many steps reserve, where that is more."""
    held = found.reserved_after()
    if held is not None and held > found.peak_reserved:
        fits = "" if held <= found.gpu.usable else ", which does not fit"
        yield f"           {format_bytes(held)} if the last step is repeated {REPEATS} times{fits}"


_PHASES = {
    "": "outside of a step",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer's step",
}


def _moment(found: Prediction) -> Iterator[str]:
    peak = found.peak
    yield f"The peak is {_PHASES[peak.phase]}, at {peak.line or 'an unknown line'}:"
    if peak.of_line:
        yield f"  the gradient of {peak.of_line}"
    place = f"{peak.module}, " if peak.module else ""
    yield f"  {place}operator {peak.operator}"


def _joined(rows: Mapping[str, int]) -> dict[str, int]:
    """Modules whose names differ only in numbers, as one."""
    totals: dict[str, int] = {}
    for name, nbytes in rows.items():
        joined = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        totals[joined] = totals.get(joined, 0) + nbytes
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _rows(title: str, rows: Mapping[str, int]) -> Iterator[str]:
    total = sum(rows.values()) or 1
    yield f"{title}:"
    shown = list(rows.items())[:ROWS]
    for name, nbytes in shown:
        named = printable(name) or "(no module)"
        yield f"  {format_bytes(nbytes):>11}  {nbytes / total:6.1%}  {named}"
    if len(rows) > ROWS:
        rest = total - sum(nbytes for _, nbytes in shown)
        yield f"  {format_bytes(rest):>11}  {rest / total:6.1%}  {len(rows) - ROWS} others"


def _assumed(ran: Ran) -> Iterator[str]:
    found, gpu = ran.prediction, ran.prediction.gpu
    yield (
        f"torch {found.torch_version}: predict with the version that will run, since others may "
        "call other operators"
    )
    yield (
        f"compute capability {gpu.cc[0]}.{gpu.cc[1]}, {gpu.sms} multiprocessors of "
        f"{gpu.threads_per_sm} threads"
    )
    if ran.stopped:
        yield (
            f"what follows needs no more: it was stopped after {ran.steps} steps of the optimizer; "
            "--steps 0 runs all of it"
        )
    values = [one for one in found.assumptions if one["what"].startswith(".")]
    in_packages = [one for one in values if _INSTALLED in one["where"]]
    hidden = in_packages if len(in_packages) > FEW else []
    for one in found.assumptions:
        if one in hidden:
            continue
        place = _place(one["where"])
        times = "" if one["times"] == 1 else f", {one['times']} times"
        if one["what"].startswith("."):
            yield f"{one['what']}{place} is {one['value']}{times}"
        else:
            yield f"{one['what']} ({one['value']}){place}{times}"
    if hidden:
        names = sorted({one["where"].rpartition(_INSTALLED)[2].split("/")[0] for one in hidden})
        yield (
            f".item() and the like at {len(hidden)} lines of {', '.join(names)}: 1, 1.0, False or "
            "zeros; --json lists them"
        )
    yield from _about_files(found)


#: More values than these that packages have read are counted, and not listed.
FEW = 3
_INSTALLED = "/site-packages/"


def _place(where: str) -> str:
    """Where a line is: with its package, if it is in one."""
    if where == "?":
        return " in the backward pass"  # whose thread has no lines
    _, installed, path = where.rpartition(_INSTALLED)
    return f" at {path if installed else where.rsplit('/', 1)[-1]}"


def _about_files(found: Prediction) -> Iterator[str]:
    """What became of the files that the program has changed."""
    written, removed = found.files_written, found.files_removed
    if written:
        yield f"the program wrote {_some(written)}: thrown away"
    if removed:
        yield f"it removed or renamed {_some(removed)}: yours are there still"


def _some(paths: list[str]) -> str:
    """A few paths, and how many there are."""
    here = Path.cwd()
    first = Path(paths[0])
    name = printable(str(first.relative_to(here) if first.is_relative_to(here) else first))
    return name if len(paths) == 1 else f"{name} and {len(paths) - 1} more"
