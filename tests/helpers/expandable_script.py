"""Runs the numbered cases of expandable segments (`expandable_cases.py`) on a subject: the compiled
original, the model, or ours behind the same methods.

A case is a text: a line a step, with what must come of it. Sizes are 512, 600K, 20M, or a sum of
these. `R1+20M` is 20 MiB into the second reservation, `S0` the first ordinary segment.

    alloc a 2M s2 -> R0+2M      2 MiB on stream 2, called a; "-> oom", "-> driver" and the like for
                                a failure, "-> not R0" for any other address
    many a 40 1M -> R0          40 times 1 MiB, called a0 to a39; the first one's address
    free a b                    any of these too may end in "-> driver"
    free a*                     all whose name begins so
    use a 2                     record_stream
    hold 2; finish 2            of a stream
    empty, set TEXT, fraction 0.5, resize 50M
    create 2; begin 2; begin 2 none; end 2; release 2; lend 2; nosplit 2       the pool (0, 2)
    fail map 2                  the second call of that kind from now, with an error of the driver;
                                "fail create 1 oom" for a lack of memory
    calls c20 m(R0) a(R0,20M)   all calls of the driver since the last such line
    blocks R0 20M[2M:A 18M:-]   the whole snapshot: A allocated, P pending, - free
    stats reserved=20M da=1     some of the statistics
    trace segment_map(R0,20M)   what was recorded of segments since the start

A call is written `reserve(R0,92160M)`, `c20` (create), `m(R0+20M)`, `a(R0,40M)` (set_access),
`wait(2)`, `u(R0,20M)` (unmap), `r1` (release the first page), `unreserve(R0)`, `malloc(S0,20M)`,
`free(S0,20M)`, `record(2)`, `query(2)` and `sync(2)` for events on stream 2; with "!" and without
an address for a refusal. A line that begins with "upstream:" or "ours:" is for one of them:
documented differences.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.peers.server import OUT_OF_MEMORY, Failure

UNITS = {"G": 1 << 30, "M": 1 << 20, "K": 1 << 10, "": 1}
UNKNOWN = 999
STATS = {
    "reserved": "reserved_bytes.all.current",
    "small": "reserved_bytes.small_pool.current",
    "large": "reserved_bytes.large_pool.current",
    "reserved.peak": "reserved_bytes.all.peak",
    "reserved.allocated": "reserved_bytes.all.allocated",
    "reserved.freed": "reserved_bytes.all.freed",
    "segment": "segment.all.allocated",
    "split": "inactive_split.all.current",
    "split_bytes": "inactive_split_bytes.all.current",
    "oversize": "oversize_allocations.current",
    "oversize_segments": "oversize_segments.allocated",
    "da": "num_device_alloc",
    "df": "num_device_free",
    "retries": "num_alloc_retries",
    "ooms": "num_ooms",
    "waits": "num_sync_all_streams",
}
STATES = {"active_allocated": "A", "active_pending_free": "P", "inactive": "-"}
NAMES = {"map": "m", "access": "a", "unmap": "u"}
EVENTS = {"event_record": "record", "event_query": "query", "event_synchronize": "sync"}


def parsed(text: str) -> int:
    """The bytes of a size."""
    parts = re.findall(r"([\d.]+)([GMK]?)", text)
    return sum(int(float(number) * UNITS[unit]) for number, unit in parts)


def written(nbytes: int) -> str:
    """A size as a case has it."""
    parts = []
    for unit in ("M", "K", ""):
        count, nbytes = divmod(nbytes, UNITS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return "+".join(parts) or "0"


@dataclass(frozen=True)
class Case:
    """One numbered case: the device's capacity, the settings it starts with, and its steps."""

    number: str
    about: str
    capacity: int
    settings: str
    steps: tuple[str, ...]

    @property
    def options(self) -> dict[str, Any]:
        return {"capacity": self.capacity, "settings": self.settings}


def parse_cases(text: str) -> Iterator[Case]:
    """A case begins with "EX-1: what it is about", and "[device 70M; settings TEXT]" where they are
    not 80 GiB and the option alone. Its steps are indented by four, and go on where a line is
    indented by more."""
    for block in re.findall(r"(?ms)^EX-.*?(?=^EX-|\Z)", text):
        joined = re.sub(r"\n {5,}", " ", block)
        head, *steps = [line.strip() for line in joined.splitlines() if line.strip()]
        found = re.fullmatch(
            r"EX-(\w+): (.*?)(?: \[(?:device (\S+?))?(?:; )?(?:settings (\S+))?\])?", head
        )
        assert found is not None, head
        settings = "expandable_segments:True" if found[4] is None else found[4]
        yield Case(found[1], found[2], parsed(found[3] or "80G"), settings, tuple(steps))


@dataclass
class Runner:
    """Takes the steps of a case, and compares."""

    subject: Any
    upstream: bool
    blocks: dict[str, int] = field(default_factory=dict)
    seen: int = 0
    log: list[Any] = field(default_factory=list)

    def run(self, case: Case) -> None:
        self.subject.record_history(True)
        for line in case.steps:
            step = self.for_us(line)
            if step is not None:
                told, _, wanted = step.partition(" -> ")
                answer = self.take(told)
                expected = wanted.strip() or self.default(told)
                where = f"EX-{case.number}, {line}"
                if expected.startswith("not "):
                    assert answer != expected.removeprefix("not "), where
                else:
                    assert answer == expected, f"{where}\n  wants {expected}\n  has   {answer}"

    def for_us(self, line: str) -> str | None:
        for whom, is_ours in (("upstream: ", False), ("ours: ", True)):
            if line.startswith(whom):
                return line.removeprefix(whom) if is_ours != self.upstream else None
        return line

    def default(self, told: str) -> str:
        name, _, rest = told.partition(" ")
        return rest.strip() if name in ("calls", "blocks", "stats", "trace") else "done"

    def take(self, told: str) -> str:
        """What comes of a step."""
        name, *words = told.split()
        readers: dict[str, Callable[..., str]] = {
            "calls": lambda *_: self.calls(),
            "blocks": lambda *_: self.snapshot(),
            "stats": self.stats,
            "trace": lambda *_: self.trace(),
        }
        if name in readers:
            return readers[name](*words)
        answer = getattr(self, f"do_{name}")(*words)
        if isinstance(answer, Failure):
            return answer.kind
        return "done" if answer is None else self.place(answer)

    # Steps

    def do_alloc(self, name: str, nbytes: str, stream: str = "s0") -> Any:
        answer = self.subject.malloc(parsed(nbytes), int(stream[1:], 0))
        if not isinstance(answer, Failure):
            self.blocks[name] = answer
        return answer

    def do_many(self, name: str, count: str, nbytes: str, stream: str = "s0") -> Any:
        answers = [self.do_alloc(f"{name}{at}", nbytes, stream) for at in range(int(count))]
        return answers[0]

    def do_free(self, *words: str) -> Any:
        names = [
            name
            for word in words
            for name in list(self.blocks)
            if name == word or (word[-1] == "*" and name.startswith(word[:-1]))
        ]
        answers = [self.subject.free(self.blocks.pop(name)) for name in names]
        return next((answer for answer in answers if answer is not None), None)

    def do_use(self, name: str, stream: str) -> Any:
        return self.subject.record_stream(self.blocks[name], int(stream))

    def do_hold(self, stream: str) -> Any:
        return self.subject.hold(int(stream))

    def do_finish(self, stream: str) -> Any:
        return self.subject.finish(int(stream))

    def do_empty(self) -> Any:
        return self.subject.empty_cache()

    def do_set(self, text: str) -> Any:
        return self.subject.set_settings(text)

    def do_fraction(self, fraction: str) -> Any:
        return self.subject.set_memory_fraction(float(fraction))

    def do_resize(self, nbytes: str) -> Any:
        return self.subject.resize(parsed(nbytes))

    def do_fail(self, kind: str, n: str, code: str = "") -> Any:
        return self.subject.fail_at(int(n), OUT_OF_MEMORY if code == "oom" else UNKNOWN, kind)

    def do_create(self, pool: str) -> Any:
        return self.subject.create_pool((0, int(pool)))

    def do_begin(self, pool: str, streams: str = "all") -> Any:
        return self.subject.begin_pool((0, int(pool)), streams)

    def do_end(self, pool: str) -> Any:
        return self.subject.end_pool((0, int(pool)))

    def do_release(self, pool: str) -> Any:
        return self.subject.release_pool((0, int(pool)))

    def do_lend(self, pool: str) -> Any:
        return self.subject.set_use_on_oom((0, int(pool)), True)

    def do_nosplit(self, pool: str) -> Any:
        return self.subject.set_no_split((0, int(pool)))

    # Reading

    def place(self, address: int) -> str:
        """An address, counted from the reservation or the segment that it lies in."""
        self.read_log()
        for letter, kind in (("R", "reserve"), ("S", "malloc")):
            found = [call for call in self.log if call[0] == kind and call[2] is not None]
            for number, (_, nbytes, start) in enumerate(found):
                if start <= address < start + nbytes:
                    offset = f"+{written(address - start)}" if address > start else ""
                    return f"{letter}{number}{offset}"
        return hex(address)

    def read_log(self) -> None:
        self.log = self.subject.calls

    def calls(self) -> str:
        self.read_log()
        fresh, self.seen = self.log[self.seen :], len(self.log)
        return " ".join(self.call(*call) for call in fresh) or "none"

    def call(self, kind: str, nbytes: int, place: int | None) -> str:
        if kind in EVENTS:
            return f"{EVENTS[kind]}({nbytes})"
        if kind == "create":
            return f"c{nbytes >> 20}" + ("!" if place is None else "")
        if place is None:
            return f"{NAMES.get(kind, kind)}({written(nbytes)})!"
        if kind in ("release", "wait"):
            return f"r{place}" if kind == "release" else f"wait({place})"
        if kind in ("map", "unreserve"):
            return f"{NAMES.get(kind, kind)}({self.place(place)})"
        return f"{NAMES.get(kind, kind)}({self.place(place)},{written(nbytes)})"

    def snapshot(self) -> str:
        runs = []
        for segment in self.subject.snapshot():
            at = self.place(segment["address"])
            assert segment["is_expandable"] == at.startswith("R")
            blocks = " ".join(
                f"{written(block['size'])}:{STATES[block['state']]}" for block in segment["blocks"]
            )
            runs.append(f"{at} {written(segment['total_size'])}[{blocks}]")
        return "; ".join(runs) or "none"

    def stats(self, *words: str) -> str:
        """The statistics that are asked for."""
        stats = self.subject.stats()
        found = []
        for word in words:
            name, _, value = word.partition("=")
            number = stats[STATS[name]]
            is_bytes = not value.isdigit() or number >= 512
            found.append(f"{name}={written(number) if is_bytes else number}")
        return " ".join(found)

    def trace(self) -> str:
        entries = [entry for entry in self.subject.trace() if entry["action"].startswith("seg")]
        return " ".join(
            f"{entry['action']}({self.place(entry['addr'])},{written(entry['size'])})"
            for entry in entries
        )
