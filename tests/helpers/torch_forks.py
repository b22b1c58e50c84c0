"""A process that has imported PyTorch and nothing else, and forks one for each script that it is
sent: the import takes seconds. `Forks` sends them.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


class Forks:
    """Runs scripts as `python -c` would, one after the other, in the environment that is given."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self.scratch = tempfile.TemporaryDirectory()
        self.process: Any = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, self.scratch.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            env=environment,
        )

    def run(self, script: str, arguments: Sequence[str], seconds: float) -> Ended:
        self.process.stdin.write((json.dumps([script, *arguments]) + "\n").encode())
        self.process.stdin.flush()
        child = int(self.line(seconds))
        try:
            code = int(self.line(seconds))
        except TimeoutError:
            os.kill(child, signal.SIGKILL)
            self.line(seconds)
            raise
        said = (Path(self.scratch.name, it).read_text() for it in ("stdout", "stderr"))
        return Ended(code, *said)

    def line(self, seconds: float) -> bytes:
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            raise TimeoutError(f"nothing was said for {seconds:.0f} s")
        said: bytes = self.process.stdout.readline()
        assert said, "the process that has imported PyTorch has ended"
        return said

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.scratch.cleanup()


# -- that process ---------------------------------------------------------------------------------


def serve(scratch: str) -> tuple[str, list[str]]:
    """Forks for each line. Returns in the child, with its script and arguments."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.dup(1)
    for line in requests:
        child = os.fork()
        if child == 0:
            os.close(answers)
            requests.close()
            for number, name in ((0, os.devnull), (1, "stdout"), (2, "stderr")):
                flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                opened = os.open(os.path.join(scratch, name), flags)
                os.dup2(opened, number)
                os.close(opened)
            script, *arguments = json.loads(line)
            return script, arguments
        os.write(answers, b"%d\n" % child)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(answers, b"%d\n" % code)
    sys.exit()


if __name__ == "__main__":
    import torch  # noqa: F401

    code, words = serve(sys.argv[1])
    sys.argv, sys.path[0] = ["-c", *words], ""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), vars(main))
