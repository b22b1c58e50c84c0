"""Several ranks' logs: one table, and the odd one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from bfc.snapshots.snapshot import Snapshot
from bfc.units import format_bytes, in_columns, printable
from bfc_tools.study.logs.log import Log
from bfc_tools.study.logs.refusal import LONGEST, LoggedRanOut

#: A figure that is so far from the others' is odd.
ODD = 0.05

_HEADINGS = ("", "program", "refused", "live", "reserved", "free", "others", "cause")


@dataclass(frozen=True)
class Logs:
    """What one or several logs say, side by side. `print` shows the answer first.

    Attributes
    ----------
    logs : tuple of Log
        The logs, those without a refusal too.
    """

    logs: tuple[Log, ...]

    @property
    def refusals(self) -> list[LoggedRanOut]:
        """All refusals, each with a name that no other has.

        Returns
        -------
        list of LoggedRanOut
            In the order of the logs.
        """
        return [refusal for _, refusal in self._named()]

    def odd(self) -> tuple[str, str] | None:
        """The process that differs from the others.

        Returns
        -------
        tuple of (str, str) or None
            Its name, and how it differs. None if all are alike, or there is one.
        """
        named = self._named()
        silent = [log.name for log in self.logs if not log.refusals]
        if len(named) == 1 and silent:
            return named[0][0], f"alone ran out of memory; {_others(silent)}"
        if len(silent) == 1 and len(named) > 1:
            return silent[0], "alone did not run out of memory"
        if len(named) < 3:
            return None
        causes = Counter(refusal.cause for _, refusal in named)
        rare = [name for name, refusal in named if causes[refusal.cause] == 1]
        if len(causes) == 2 and len(rare) == 1:
            cause = next(refusal.cause for name, refusal in named if name == rare[0])
            return rare[0], f"differs in its cause, {cause}"
        for word, what in (("live", "had"), ("others", "saw others hold"), ("nbytes", "asked for")):
            values = [(name, getattr(refusal, word)) for name, refusal in named]
            known = [(name, value) for name, value in values if value is not None]
            if len(known) < 3:
                continue
            middle = median(value for _, value in known)
            name, value = max(known, key=lambda it: abs(it[1] - middle))
            if abs(value - middle) > ODD * max(middle, 1 << 20):
                more = "more" if value > middle else "less"
                by = format_bytes(int(abs(value - middle)))
                return name, f"{what} {format_bytes(value)}, {by} {more} than the middle of all"
        return None

    def listed(self) -> tuple[str, LoggedRanOut, Snapshot] | None:
        """The chunks of the process that is odd, or else of the first one that lists them.

        Returns
        -------
        tuple or None
            Its name, what was refused, and what the memory held; None if no log lists chunks.
        """
        odd = self.odd()
        found = None
        for log in self.logs:
            for refusal, snapshot in log.snapshots():
                name = self._name_of(log, refusal)
                if found is None or (odd is not None and name == odd[0]):
                    found = name, refusal, snapshot
        return found

    def _name_of(self, log: Log, refusal: LoggedRanOut) -> str:
        several = len(self.logs) > 1
        parts = [log.name if several else "", refusal.who if len(log.refusals) > 1 else ""]
        return " ".join(filter(None, parts)) or refusal.who or log.name

    def _named(self) -> list[tuple[str, LoggedRanOut]]:
        several = len(self.logs) > 1
        found = []
        for log in self.logs:
            for refusal in log.refusals:
                name = self._name_of(log, refusal)
                found.append((name, replace(refusal, who=name) if several else refusal))
        return found

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def to_json(self) -> str:
        """All of it as JSON.

        Returns
        -------
        str
            "logs", each with "name", "refusals", "may_fail" and "hint", and "odd".
        """
        logs: list[dict[str, Any]] = [
            {
                "name": log.name,
                "refusals": [refusal.as_dict() for refusal in log.refusals],
                "may_fail": log.may_fail,
                "hint": log.hint,
            }
            for log in self.logs
        ]
        return json.dumps({"logs": logs, "odd": self.odd()}, indent=2)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each refusal, for a table.

        Returns
        -------
        list of dict
            Without the remarks.
        """
        return [
            {key: value for key, value in refusal.as_dict().items() if key != "remarks"}
            for refusal in self.refusals
        ]

    def _lines(self) -> Iterator[str]:
        named = self._named()
        odd = self.odd()
        chosen = named[0][1] if named else None
        if odd is not None:
            yield f"{printable(odd[0])[:LONGEST]} {odd[1]}."
            chosen = next((refusal for name, refusal in named if name == odd[0]), chosen)
        if chosen is None:
            for log in self.logs:
                yield _nothing(log)
            return
        yield chosen.sentence
        for remark in chosen.remarks:
            yield f"Note: {remark}."
        if chosen.to_record:
            yield f"To know more, record: {chosen.to_record}."
        may_fail = sum(log.may_fail for log in self.logs)
        if may_fail:
            were = "request was" if may_fail == 1 else "requests were"
            yield f"{may_fail} more {were} refused for which the program had another way."
        if len(named) > 1 or len(self.logs) > 1:
            yield ""
            yield from _table(named)
            silent = [log.name for log in self.logs if not log.refusals]
            if silent:
                yield f"No refusal in {', '.join(map(printable, silent[:10]))}" + (
                    f" and {len(silent) - 10} more" if len(silent) > 10 else ""
                )


def _nothing(log: Log) -> str:
    text = f"{printable(log.name)}: no out-of-memory error of PyTorch, TensorFlow or JAX is in it"
    return f"{text}; {log.hint}" if log.hint else text


def _others(names: list[str]) -> str:
    return f"{len(names)} other{'s' if len(names) > 1 else ''} did not"


def _table(named: list[tuple[str, LoggedRanOut]]) -> Iterator[str]:
    def cell(nbytes: int | None) -> str:
        return "-" if nbytes is None else format_bytes(nbytes)

    rows = [
        (
            name[:LONGEST],
            it.program,
            cell(it.nbytes),
            cell(it.live),
            cell(it.reserved),
            cell(it.free_in_segments),
            cell(it.others),
            it.cause if it.is_whole else f"{it.cause}?",
        )
        for name, it in named
    ]
    yield from in_columns([_HEADINGS, *rows])
