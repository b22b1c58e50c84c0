"""What one process of a log said: its refusals, in the order of the lines."""

from __future__ import annotations

import re
from dataclasses import replace

from bfc_tools.study.logs import bfc_cause, torch_cause
from bfc_tools.study.logs.bfc_cause import EITHER, JAX, TENSORFLOW, Told
from bfc_tools.study.logs.dump import Dump
from bfc_tools.study.logs.dumps import Dumps
from bfc_tools.study.logs.lines import Line, bare
from bfc_tools.study.logs.refusal import LoggedRanOut
from bfc_tools.study.logs.sizes import Printed, size_in
from bfc_tools.study.logs.torch_text import BEGINS, TorchText, text_of
from bfc_tools.study.logs.words import (
    Chunk,
    Compiled,
    DeviceRefused,
    Exhausted,
    Map,
    Refused,
    Word,
    chunk_of,
    word_of,
)

#: How many lines, and how many characters, a text of PyTorch's may have.
MOST_LINES, MOST_CHARACTERS = 40, 6000
#: The most refusals that are kept; more are counted.
MOST_TOLD = 256
#: Lines that belong together are not further apart.
NEAR = 4000

_SIGNS = (
    (
        TENSORFLOW,
        re.compile(  # JAX has a path of TensorFlow's below external/, and no operation to name
            r"(?<![/\\])tensorflow[/\\](?:core|tsl)[/\\]|local_(?:tsl|xla)|/job:localhost"
            r"|ResourceExhausted|requested by op \w"
        ),
    ),
    (JAX, re.compile(r"jax|XlaRuntimeError|pj_?rt|external/(?:xla|org_tensorflow|tsl)/", re.I)),
)
_BUFFER = re.compile(r"\b(?:Buffer \d+:|Size: |Operator:)")
_SOURCE = re.compile(r'source_file="([^"]{1,300})"(?: source_line=(\d+))?')
_OPERATOR = re.compile(r'op_name="([^"]{1,300})"')
_CUT = re.compile(r"(?:InUse|Chunk|Free)\s+at\b|bfc_allocator\.cc|Allocator \(")


class Source:
    """Takes the lines of one process. `refusal` is what they come to."""

    def __init__(self, who: str) -> None:
        self.who = who
        self.dumps: dict[str, Dumps] = {}  # by the thread that printed them
        self.told: list[Told] = []
        self.torch: list[tuple[int, TorchText]] = []
        self.may_fail = 0  # requests that were refused, and for which the program had another way
        self.left_out = 0
        self._last_may_fail: Refused | None = None
        self._programs: set[str] = set()
        self._knows_async = False
        self._text: list[str] = []
        self._text_line = 0
        self._cut = self._before = ""
        self._compiled: dict[str, Printed] = {}
        self._device_refused: Printed | None = None
        self._buffer: Printed | None = None
        self._largest: tuple[str, int] = ("", 0)
        self._unsure: list[tuple[Exhausted, int]] = []

    def take(self, line: Line) -> None:
        """Takes a line."""
        text = line.text
        if " of size" in text and not self._text:  # of millions of lines, nearly all
            chunk = chunk_of(text)
            if chunk is not None:
                self._cut = self._before = ""
                self._take_word(chunk, line)
                return
        for program, sign in _SIGNS:
            if program not in self._programs and sign.search(text):
                self._programs.add(program)
        self._knows_async |= "cuda_malloc_async" in text
        if self._text or BEGINS.search(text):
            self._take_text(line)
        elif BEGINS.search(joined := f"{self._before}{text}") or BEGINS.search(
            joined := f"{self._before} {text}"
        ):  # it was cut where it begins
            self._take_text(line._replace(text=joined))
        self._before = text[-40:]
        if _BUFFER.search(text):
            self._take_buffer(text)
        word = word_of(text)
        if word is None and self._cut:
            word = _joined(self._cut, bare(text))
        is_cut = word is None and _CUT.search(text) is not None
        is_cut |= isinstance(word, Exhausted) and word.asked is None
        self._cut = text.rstrip() if is_cut and len(text) < 500 else ""
        if word is not None:
            self._take_word(word, line)

    def finish(self) -> None:
        """To be called behind the last line."""
        self._end_text()
        unsure, self._unsure = self._unsure, []
        if self._programs or self._compiled:
            for word, line in unsure:
                self._exhausted(word, line)
        for dumps in self.dumps.values():
            dumps.finish()
            for dump in dumps.done:
                if not any(told.dump is dump for told in self.told):
                    self._tell(Told(dump.line, asked=dump.asked, dump=dump))

    @property
    def program(self) -> str:
        """Whose words these are."""
        return next(iter(self._programs)) if len(self._programs) == 1 else EITHER

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing of a refusal."""
        return not self.told and not self.torch

    def refusals(self) -> list[LoggedRanOut]:
        """The refusal that counts: the last one of each device, since a program ends with it; and
        of processes that no name tells apart, the last of each."""
        if self.torch and (not self.told or self.torch[-1][0] >= self.told[-1].line):
            return self._of_torch()
        devices: dict[str, list[Told]] = {}
        for told in self.told:
            devices.setdefault(told.allocator, []).append(told)
        if len(devices) > 1:
            devices.pop("", None)
        found = []
        for allocator, told_of in devices.items():
            count = len(told_of) + (self.left_out if allocator == self.told[-1].allocator else 0)
            beside = _beside_each_other(told_of)
            for number, told in enumerate(beside):
                who = f"{self.who} {told.where}".strip() if len(devices) > 1 else self.who
                if len(beside) > 1:
                    who = f"{who} process {number + 1}".strip()
                found.append(bfc_cause.refusal_of(self._completed(told), who, count))
        return found

    def _of_torch(self) -> list[LoggedRanOut]:
        last: dict[int | None, tuple[int, TorchText]] = {}
        for line, text in self.torch:
            last[text.gpu] = line, text
        if len(last) > 1:
            last.pop(None, None)
        found = []
        for gpu, (line, text) in last.items():
            count = len({other.key for _, other in self.torch if other.gpu == gpu})
            who = f"{self.who} GPU {gpu}".strip() if len(last) > 1 else self.who
            found.append(torch_cause.refusal_of(text, who, line, count))
        return found

    def dump_of(self, refusal: LoggedRanOut) -> Dump | None:
        """The dump of a refusal of this process."""
        told = next((it for it in self.told if it.line == refusal.line), None)
        return None if told is None else told.dump

    def last_dump(self) -> Dump | None:
        """The newest dump whose chunks are known."""
        held = [told.dump for told in self.told if told.dump is not None and told.dump.regions]
        whole = [dump for dump in held if dump.is_whole]
        return (whole or held)[-1] if held else None

    # Lines ------------------------------------------------------------------------------------

    def _take_word(self, word: Word, line: Line) -> None:
        if isinstance(word, Chunk):
            dump = self._dumps_for(word, line).take(word, line.number)
            if dump is not None and dump.chunks <= 1:
                self._of_dump(dump)
            return
        if isinstance(word, Exhausted):
            self._exhausted(word, line.number)
            return
        if isinstance(word, DeviceRefused):
            self._device_refused = word.asked
            return
        if isinstance(word, Compiled):
            self._compiled |= word.values
            if "hbm" in word.values:
                self._tell(Told(line.number, is_error=True))
            return
        dump = self._dumps_for(word, line).take(word, line.number)
        if dump is not None:
            self._of_dump(dump)
        if isinstance(word, Refused):
            self._refused(word, line.number)
        elif isinstance(word, Map) and dump is None and self.told:
            self.told[-1].occupancy = self.told[-1].occupancy or word.text

    def _dumps_for(self, word: Word, line: Line) -> Dumps:
        """The dumps of the thread that printed a line. Lines behind a first one name none."""
        if line.thread in self.dumps and len(self.dumps) == 1:
            return self.dumps[line.thread]
        if not line.thread and self.dumps:
            waiting = [it for it in self.dumps.values() if it.waits_for(word)]
            if waiting:
                return waiting[0]
        return self.dumps.setdefault(line.thread if len(self.dumps) < 64 else "", Dumps())

    def _refused(self, word: Refused, line: int) -> None:
        last = self.told[-1] if self.told else None
        if last is not None and word.rounded is None and _repeats(last, word, line):
            return
        if word.may_fail:
            self.may_fail += 1
            self._last_may_fail = word
            return
        self._tell(Told(line, word.asked, word.rounded, allocator=word.allocator, name=word.name))

    def _of_dump(self, dump: Dump) -> None:
        """Joins a dump with the refusal before it."""
        if any(told.dump is dump for told in self.told[-16:]):
            return
        for told in reversed(self.told[-16:]):
            is_near = dump.line - told.line <= NEAR
            if told.dump is None and told.allocator == dump.allocator and is_near:
                told.dump = dump
                return
        self._tell(Told(dump.line, asked=dump.asked, allocator=dump.allocator, dump=dump))

    def _exhausted(self, word: Exhausted, line: int) -> None:
        """An error follows the lines of the allocator that refused, or stands alone."""
        last = self.told[-1] if self.told else None
        if last is not None and _is_same(last, word) and line - last.line < NEAR + self._length():
            last.is_error = True
            last.device = last.device or word.device
            last.asked = last.asked or word.asked
            return
        if word.asked is None and last is not None:
            return
        if not word.is_sure and not self._programs and not self._compiled:
            self._unsure = [*self._unsure[-15:], (word, line)]
            return
        before = self._last_may_fail
        if before is not None and word.asked is not None and _close(before.asked, word.asked):
            self.may_fail -= 1
            self._last_may_fail = None
            self._tell(Told(line, word.asked, allocator=before.allocator, is_error=True))
            return
        self._tell(Told(line, word.asked, device=word.device, is_error=True))

    def _length(self) -> int:
        dump = self.told[-1].dump
        return 0 if dump is None else dump.last_line - dump.line

    def _tell(self, told: Told) -> None:
        told.compiled, self._compiled = self._compiled, {}
        told.device_refused, self._device_refused = self._device_refused, None
        self.told.append(told)
        if len(self.told) > MOST_TOLD:
            del self.told[0]
            self.left_out += 1

    def _completed(self, told: Told) -> Told:
        compiled = {**told.compiled, **self._compiled} if told is self.told[-1] else told.compiled
        return replace(
            told,
            program=self.program,
            knows_async=self._knows_async,
            compiled=compiled,
            largest_buffer=self._largest,
        )

    # Texts ------------------------------------------------------------------------------------

    def _take_text(self, line: Line) -> None:
        begins = BEGINS.search(line.text) is not None
        if begins:
            self._end_text()
            self._text, self._text_line = [line.text], line.number
        else:
            self._text.append(bare(line.text))
        found = self._found_text()
        is_full = len(self._text) >= MOST_LINES or sum(map(len, self._text)) > MOST_CHARACTERS
        if is_full or (found is not None and found.is_whole):
            self._end_text()

    def _found_text(self) -> TorchText | None:
        """A text that was wrapped may have lost the spaces at the ends of its lines, or not."""
        spaced, joined = text_of(" ".join(self._text)), text_of("".join(self._text))
        if spaced is None or joined is None:
            return spaced or joined
        ranks = [(found.is_whole, found.figures) for found in (spaced, joined)]
        return joined if ranks[1] > ranks[0] else spaced

    def _end_text(self) -> None:
        found = self._found_text() if self._text else None
        self._text = []
        if found is None:
            return
        if found.asked is None and not found.is_whole and self.torch:
            return  # "CUDA out of memory" in the words of somebody else
        self.torch.append((self._text_line, found))
        if len(self.torch) > MOST_TOLD:
            del self.torch[0]
            self.left_out += 1

    def _take_buffer(self, text: str) -> None:
        """The buffers that XLA lists as the largest, and the lines that they come from."""
        if "Size: " in text:
            self._buffer = size_in(text[text.index("Size: ") :])
        elif "Operator:" in text and self._buffer is not None:
            place, operator = _SOURCE.search(text), _OPERATOR.search(text)
            name = operator[1] if operator else ""
            if place is not None:
                number = f":{place[2]}" if place[2] else ""
                name = f"{place[1].rpartition('/')[2]}{number}"
            if name and self._buffer.nbytes > self._largest[1]:
                self._largest = name, self._buffer.nbytes


def _joined(cut: str, rest: str) -> Word | None:
    """What a line says that was cut in two: the space at the cut may be lost, or not."""
    for text in (cut + rest, f"{cut} {rest.lstrip()}"):
        word = word_of(text)
        if word is not None and not (isinstance(word, Exhausted) and word.asked is None):
            return word
    return None


def _close(one: Printed, other: Printed) -> bool:
    """Whether two sizes may be the same, one of them rounded up to whole units of 256 bytes."""
    return abs(one.nbytes - other.nbytes) <= one.off + other.off + 256


def _repeats(last: Told, word: Refused, line: int) -> bool:
    """Whether a line says again, behind a dump, what the line before the dump said."""
    asked = last.rounded or last.asked
    return (
        last.dump is not None
        and last.allocator == word.allocator
        and line - last.dump.last_line < 50
        and (asked is None or _close(asked, word.asked))
    )


def _is_same(told: Told, word: Exhausted) -> bool:
    asked = told.rounded or told.asked
    return asked is None or word.asked is None or _close(asked, word.asked)


def _beside_each_other(told_of: list[Told]) -> list[Told]:
    """The last refusal, and those whose dumps stand between the lines of its dump."""
    last = told_of[-1]
    if last.dump is None:
        return [last]
    return [
        told
        for told in told_of[-64:]
        if told is last or (told.dump is not None and _overlap(told.dump, last.dump))
    ]


def _overlap(one: Dump, other: Dump) -> bool:
    return one.line <= other.last_line and other.line <= one.last_line
