"""How many operations of random histories this machine has verified in all: `soak.json` in the
folder of `bfc.compiling.cache`."""

from __future__ import annotations

import fcntl
import json

from bfc.compiling import cache

Done = dict[str, list[float]]  # by fuzzer: operations, seconds, faults


def added(done: Done) -> Done:
    """Adds to the account of this machine, and returns it."""
    path = cache() / "soak.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        file.seek(0)
        account: Done = json.loads(file.read() or "{}")
        for name, figures in done.items():
            before = account.get(name, [0, 0, 0])
            account[name] = [one + more for one, more in zip(before, figures, strict=True)]
        file.truncate(0)
        file.write(json.dumps(account))
    return account


def table(done: Done) -> str:
    total = [sum(figures) for figures in zip(*done.values(), strict=True)] or [0, 0, 0]
    rows = [*sorted(done.items()), ("all", total)]
    lines = [f"{'fuzzer':10}{'operations':>18}{'seconds':>10}{'a second':>12}{'faults':>8}"]
    for name, (operations, seconds, faults) in rows:
        rate = operations / seconds if seconds else 0
        lines.append(f"{name:10}{operations:18,.0f}{seconds:10,.0f}{rate:12,.0f}{faults:8.0f}")
    return "\n".join(lines)
