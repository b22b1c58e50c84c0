"""Launchers that start a program in several processes: how many, and of which program."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Launchers whose options bfc does not read.
OTHERS = (
    *("deepspeed", "mpirun", "mpiexec", "srun", "horovodrun", "colossalai", "ray", "lightning"),
    *("fabric", "composer", "xpu_launch", "paddle", "jsrun", "aprun", "torchx"),
)


@dataclass(frozen=True)
class Launch:
    """What a launcher was asked to start."""

    nproc: int
    nnodes: int
    words: tuple[str, ...]  # the script or module, and its arguments
    module: bool = False
    environment: tuple[tuple[str, str], ...] = ()


def read(words: Sequence[str], module: bool) -> Launch | None:
    """What a command starts if it begins with a launcher, else None.

    Raises ValueError if the launcher, or what it was told, is not known.
    """
    name = os.path.basename(words[0])
    if module:
        reader = {"torch.distributed.run": _torchrun, "torch.distributed.launch": _torchrun}.get(
            name
        )
        if name == "accelerate.commands.launch":
            reader = _accelerate
    elif name == "accelerate":
        if words[1:2] != ["launch"]:
            raise ValueError("of accelerate's commands bfc predict knows one: accelerate launch")
        return _accelerate(words[2:])
    elif name in OTHERS and not os.path.isfile(words[0] + ".py"):
        raise ValueError(
            f"bfc does not know the launcher {name}. Give it the script itself, and the number of "
            "processes: bfc predict --nproc 8 train.py"
        )
    else:
        reader = _torchrun if name == "torchrun" else None
    return None if reader is None else reader(words[1:])


def _torchrun(words: Sequence[str]) -> Launch:
    from torch.distributed.run import get_args_parser, parse_min_max_nnodes

    parsed = _parsed("torchrun", get_args_parser, words)
    if parsed.no_python or parsed.run_path:
        raise ValueError(
            "bfc predict runs scripts and modules: leave --no-python and --run-path out"
        )
    try:
        _, nnodes = parse_min_max_nnodes(parsed.nnodes)
    except (RuntimeError, ValueError):
        raise ValueError(
            f"torchrun's --nnodes is a number, or MIN:MAX, not {parsed.nnodes}"
        ) from None
    nproc = _number(parsed.nproc_per_node, "torchrun --nproc-per-node")
    script = (parsed.training_script, *parsed.training_script_args)
    return Launch(nproc, nnodes, script, bool(parsed.module))


def _accelerate(words: Sequence[str]) -> Launch:
    try:
        launch = importlib.import_module("accelerate.commands.launch")
        helpers = importlib.import_module("accelerate.utils.launch")
    except ImportError as error:
        raise ValueError(
            f"accelerate launch needs accelerate here, too ({error}): pip install accelerate, or "
            "bfc predict --nproc 8 with the script itself"
        ) from None
    parsed = _parsed("accelerate launch", launch.launch_command_parser, words)
    with contextlib.redirect_stdout(io.StringIO()):
        parsed, _, _ = launch._validate_launch_command(parsed)  # which reads its configuration
    if parsed.use_deepspeed or parsed.tpu or parsed.use_megatron_lm:
        raise ValueError(
            "of what accelerate launch starts, bfc predict knows DDP and FSDP, and does not know "
            "DeepSpeed, TPUs or Megatron-LM"
        )
    total = _number(parsed.num_processes, "accelerate launch --num_processes")
    nnodes = parsed.num_machines or 1
    if total % nnodes:
        raise ValueError(f"{total} processes are not as many on each of {nnodes} machines")
    parsed.main_process_port = 0  # any that is free: nothing is sent
    variables = helpers.prepare_multi_gpu_env(parsed)
    new = [(name, text) for name, text in variables.items() if os.environ.get(name) != text]
    script = (parsed.training_script, *parsed.training_script_args)
    return Launch(total // nnodes, nnodes, script, bool(parsed.module), tuple(new))


def _parsed(
    name: str, make: Callable[[], argparse.ArgumentParser], words: Sequence[str]
) -> argparse.Namespace:
    """What a launcher's own parser makes of words. Raises ValueError with what it says."""
    parser = make()
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parser.parse_args(list(words))
    except SystemExit as end:
        if not end.code:  # it was asked for its help, and has printed that
            raise
        lines = said.getvalue().strip().splitlines()
        what = lines[-1].partition("error: ")[2] if lines else "it knows no more"
        raise ValueError(f"{name} was called wrongly: {what}") from None


def _number(text: object, option: str) -> int:
    if not str(text).isdecimal() or not int(str(text)):
        raise ValueError(
            f"{option} is {text}: bfc cannot count GPUs that are not there, so it needs a number, "
            "such as 8"
        )
    return int(str(text))
