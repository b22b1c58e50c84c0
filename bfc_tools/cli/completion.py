"""`bfc completion SHELL`: a script with which a shell completes the command, made by shtab."""

from __future__ import annotations

import argparse
from pathlib import Path

from bfc.errors import DeviceUnavailableError

HELP = "print a script with which a shell completes the names of commands, options and files"
EPILOG = """\
It needs the package shtab, which pip install 'bfc-allocator[cli]' brings. Once for each shell:

  bash   bfc completion bash > ~/.local/share/bash-completion/completions/bfc
         which the package bash-completion reads; or source that file in ~/.bashrc
  fish   bfc completion fish > ~/.config/fish/completions/bfc.fish
  zsh    bfc completion zsh > FOLDER/_bfc, for a FOLDER of $fpath, before ~/.zshrc calls compinit

Make the folder if it is not there, and the script again when bfc has changed. The exit code is 0,
or 2 without shtab.
"""
#: Of those that shtab knows: tests complete words in bash, and have the others read their script.
SHELLS = ("bash", "fish", "zsh")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)


def run(arguments: argparse.Namespace) -> bool:
    """Prints the script."""
    try:
        import shtab
    except ImportError as error:
        raise DeviceUnavailableError(
            "completion is made by the package shtab: pip install 'bfc-allocator[cli]'"
        ) from error
    _mark_files(arguments.parser)
    print(shtab.complete(arguments.parser, arguments.shell))
    return True


def _mark_files(parser: argparse.ArgumentParser) -> None:
    """Says of what are names of files that they are: the words without an option, and paths."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                _mark_files(one)
        elif action.type is Path or not (action.option_strings or action.choices):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
