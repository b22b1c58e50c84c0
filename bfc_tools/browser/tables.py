"""The stacks, frames and texts that a page names, each once, and no more than a page can hold."""

from __future__ import annotations

from typing import Any

from bfc.libraries import NDArray, np
from bfc.trace import Trace
from bfc_tools.browser.encoding import packed
from bfc_tools.study.source_lines import Lines

#: The most characters of all texts of frames, and of one text.
MOST_CHARACTERS = 700_000
LONGEST_TEXT = 300
#: What stands for a text that is left out, or for its middle.
CUT = "\N{HORIZONTAL ELLIPSIS}"


def shortened(text: str) -> str:
    """A text, without its middle if it is long."""
    if len(text) <= LONGEST_TEXT:
        return text
    half = (LONGEST_TEXT - 1) // 2
    return text[:half] + CUT + text[-half:]


class Tables:
    """Numbers of stacks and frames of one trace, given out as they are asked for: at most
    `most_stacks` rows."""

    def __init__(self, trace: Trace, most_stacks: int) -> None:
        self._trace = trace
        self._most_stacks = most_stacks
        self._parents: list[int] = []
        self._frames_of: list[int] = []
        self._stacks: dict[int, int] = {0: -1}
        self._frames: dict[int, int] = {}
        self._rows: list[list[int]] = []
        self._stack_numbers: list[int] = []
        self._texts: dict[str, int] = {CUT: 0}
        self._characters = 0
        self.stacks_left_out = 0

    def frame(self, number: int) -> int:
        """The page's number of a frame of the trace."""
        if number not in self._frames:
            filename, line, name = self._trace.frames[number]
            self._frames[number] = len(self._rows)
            self._rows.append([self._text(filename), line, self._text(name)])
        return self._frames[number]

    def _text(self, text: str) -> int:
        text = shortened(text)
        if text not in self._texts:
            if self._characters + len(text) > MOST_CHARACTERS:
                return 0
            self._characters += len(text)
            self._texts[text] = len(self._texts)
        return self._texts[text]

    def stacks(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The page's numbers of stacks of the trace: the first ones are added before others. -1 for
        the empty stack, and for those for which there is no room."""
        unique, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
        found = np.full(len(unique), -1, np.int64)
        for at in np.argsort(first).tolist():
            found[at] = self._stack(int(unique[at]))
        missing = found[inverse] < 0
        self.stacks_left_out += int((missing & (numbers > 0)).sum())
        return found[inverse]

    def _stack(self, number: int) -> int:
        rows = self._trace.stacks
        chain: list[int] = []
        room = self._most_stacks - len(self._parents)
        while number not in self._stacks:
            if len(chain) >= room:
                return -1
            chain.append(number)
            number = int(rows[number, 0])
        at = self._stacks[number]
        for number in reversed(chain):
            self._parents.append(at)
            self._frames_of.append(self.frame(int(rows[number, 1])))
            self._stack_numbers.append(number)
            at = self._stacks[number] = len(self._parents) - 1
        return at

    def as_json(self) -> dict[str, Any]:
        """The tables: "texts", "frames" and "stacks", and "stacks_left_out"."""
        of_stacks = Lines(self._trace).of(np.array(self._stack_numbers, np.int64))
        lines = [self.frame(at) if at >= 0 else -1 for at in of_stacks.tolist()]
        rows = np.array(self._rows, np.uint32).reshape(-1, 3)
        return {
            "texts": list(self._texts),
            "frames": {
                name: packed(rows[:, at]) for at, name in enumerate(("file", "line", "name"))
            },
            "stacks": {
                "parent": packed(np.array(self._parents, np.int32)),
                "frame": packed(np.array(self._frames_of, np.int32)),
                "line": packed(np.array(lines, np.int32)),
            },
            "stacks_left_out": self.stacks_left_out,
        }
