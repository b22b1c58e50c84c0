"""How often a miss with pages goes from one compiled file into another, as valgrind sees it.

    python tests/repo/test_crossings.py [--each]

The miss is that of docs/walk.md. Counted are the calls of functions that stand in another .pyx, one
for each pair of functions: a loop counts once. What a header has is part of its caller's file, and
a call that goes through Python is none. Most calls end where they come to: they ask something, or
change one record. From the others the way leads on, into a third file; who follows the miss by hand
follows those. `--each` prints them all. It takes half a minute, so the tests here are of its reader
alone.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

#: How many there are now, and from how many of them the way leads on. Lower it with what goes.
MOST, MOST_ON_THE_WAY = 59, 13

#: Of two runs only the second one misses; what both do is taken off.
PROGRAM = """
import os
import sys
import bfc
device = bfc.SimulatedSubAllocator("1 GiB")
stitching = bfc.CachingAllocator(device, stitch=True, memory_limit="36 MiB")
pieces = [stitching.allocate_raw(4 << 20) for _ in range(9)]
for piece in pieces[::2]:
    stitching.deallocate_raw(piece)
if sys.argv[1] == "miss":
    stitching.allocate_raw(16 << 20)
os._exit(0)
"""
TRACE = ("valgrind", "--tool=callgrind", "--compress-strings=no", "--compress-pos=no")
MODULE = re.compile(r"/bfc/([\w/]+)\.(?:cpython|abi3)[^/]*$")


class Function(NamedTuple):
    """A function of compiled code, and the file that it stands in."""

    file: str
    name: str


class Call(NamedTuple):
    """Who calls whom."""

    caller: Function
    called: Function

    @property
    def crosses(self) -> bool:
        return self.caller.file != self.called.file


def calls_in(trace: str) -> Counter[Call]:
    """How often each call in compiled code of ours was made, of callgrind's file."""
    found: Counter[Call] = Counter()
    at = {"ob": "", "fn": "", "cob": "", "cfn": ""}
    for line in trace.splitlines():
        kind, is_named, value = line.partition("=")
        if kind == "calls":
            caller = Function(module_of(at["ob"]), name_of(at["fn"]))
            called = Function(module_of(at["cob"] or at["ob"]), name_of(at["cfn"]))
            if caller.file and called.file:
                found[Call(caller, called)] += int(value.split()[0])
            at["cob"] = ""
        elif is_named and kind in at:
            at[kind] = value
    return found


def leading_on(calls: Counter[Call]) -> set[Call]:
    """Those into another file from which the way goes into a further one."""
    reaching = {call.caller for call in calls if call.crosses}
    while more := {call.caller for call in calls if call.called in reaching} - reaching:
        reaching |= more
    return {call for call in calls if call.crosses and call.called in reaching}


def module_of(path: str) -> str:
    """Which module of ours a library is; "" for another one."""
    found = MODULE.search(path)
    return found[1] if found else ""


def name_of(symbol: str) -> str:
    """`Pool.hand_out`, of the name that it has in C++: Cython writes the length of each part before
    it, but for the last."""
    rest = symbol.partition("(")[0].partition("__pyx_f_")[2]
    parts = []
    while number := re.match(r"_?(\d+)", rest):
        end = number.end() + int(number[1])
        parts.append(rest[number.end() : end])
        rest = rest[end:]
    classes = [part for part in parts if part[:1].isupper()]
    return ".".join([*classes, rest.removeprefix("_")]) if rest else symbol.partition("(")[0]


def trace_of(what: str) -> Counter[Call]:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace")
        command = [*TRACE, f"--callgrind-out-file={trace}", sys.executable, "-c", PROGRAM, what]
        subprocess.run(command, check=True, capture_output=True)
        return calls_in(trace.read_text())


def main() -> None:
    """Prints the counts, and fails where one is higher than it was."""
    calls = trace_of("miss") - trace_of("nothing")
    crossing = {call: times for call, times in calls.items() if call.crosses}
    on_the_way = leading_on(calls)
    if "--each" in sys.argv:
        for call in sorted(crossing):
            print(f"{'on' if call in on_the_way else '  '} {crossing[call]:2}", end="  ")
            print(
                f"{call.caller.file}: {call.caller.name} > {call.called.file}: {call.called.name}"
            )
    files = {function.file for call in crossing for function in call}
    print(f"{len(crossing)} calls between {len(files)} files ({sum(crossing.values())} with loops)")
    print(f"{len(on_the_way)} of them lead on")
    sys.exit(len(crossing) > MOST or len(on_the_way) > MOST_ON_THE_WAY)


SHORT = """\
ob=/some/bfc/_core.cpython-311-x86_64-linux-gnu.so
fn=__pyx_f_3bfc_5_core_4Pool_find(__pyx_obj_3bfc_5_core_Pool*)
cob=/some/bfc/allocators/_pages.cpython-311-x86_64-linux-gnu.so
cfn=__pyx_f_3bfc_10allocators_6_pages_5Pages_find_elsewhere(int)
calls=2 10
7 100
cfn=__pyx_f_3bfc_5_core_own(int)
calls=1 10
7 100
cob=/usr/lib/libc.so.6
cfn=malloc
calls=9 10
7 100
ob=/some/bfc/policies/_caching.cpython-311-x86_64-linux-gnu.so
fn=__pyx_f_3bfc_8policies_8_caching_16CachingAllocator_hit
cob=/some/bfc/_core.cpython-311-x86_64-linux-gnu.so
cfn=__pyx_f_3bfc_5_core_4Pool_find(__pyx_obj_3bfc_5_core_Pool*)
calls=1 10
7 100
"""
HIT = Function("policies/_caching", "CachingAllocator.hit")
FIND = Function("_core", "Pool.find")
ELSEWHERE = Function("allocators/_pages", "Pages.find_elsewhere")


def test_calls_between_our_files_are_read() -> None:
    own = Function("_core", "own")
    calls = {Call(FIND, ELSEWHERE): 2, Call(FIND, own): 1, Call(HIT, FIND): 1}
    assert calls_in(SHORT) == calls
    assert [call.crosses for call in calls] == [True, False, True]


def test_a_call_leads_on_where_its_function_calls_into_a_further_file() -> None:
    assert leading_on(calls_in(SHORT)) == {Call(HIT, FIND)}


def test_a_name_is_that_of_the_source() -> None:
    assert name_of("__pyx_f_3bfc_8backings_8_backing_grow_backing(int)") == "grow_backing"
    assert name_of("__pyx_tp_dealloc(_object*)") == "__pyx_tp_dealloc"


if __name__ == "__main__":
    main()
