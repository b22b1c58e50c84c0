"""What C++ sees of an allocator in PyTorch's place, with PyTorch: `make test-torch-cuda`."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from cuda_machine import ON_GPU
from torch_runtime import VERSION, Run, with_torch

pytestmark = pytest.mark.skipif(ON_GPU, reason="streams are held back")

BEGIN = """
import contextvars, json, os, sys
sys.path.insert(0, "tests/helpers")
import torch, bfc, torch_native
from bfc.integrations._torch_cuda import rules_for
from bfc.testing import cuda_emulator

MIB, driver, kind = 1 << 20, cuda_emulator.load(), sys.argv[1]
if kind != "own":
    bfc.integrations.torch.install(
        lambda device: bfc.CachingAllocator(
            bfc.CUDASubAllocator(device),
            strict=kind == "caching",
            stitch=kind == "stitch",
            torch=rules_for(torch),
        )
    )

def some(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

native = torch_native.load()
"""

GIL = """
side = torch.cuda.Stream().cuda_stream
kept = [some(3) for _ in range(30)]
del kept
made = {"hits": native.pairs(20, 3 * MIB, 0)}
driver.hold(side)
some(3).record_stream(torch.cuda.ExternalStream(side))
made["beside what waits"] = native.pairs(10, 3 * MIB, 0)
made["behind a stream"] = native.pairs(10, 3 * MIB, side)
waiting = torch.cuda.memory_stats()["active_bytes.all.current"]
driver.release(side)
made["after it has waited"] = native.pairs(10, 3 * MIB, side)
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    some(3)
    made["in a pool"] = native.pairs(10, 3 * MIB, 0)
if kind == "stitch":  # only what is mapped has tags
    with bfc.integrations.torch.pool().tag("weights"):
        some(3)
        made["in a tag"] = native.pairs(10, 3 * MIB, 0)
        with torch.cuda.use_mem_pool(pool):
            made["in a pool in a tag"] = native.pairs(10, 3 * MIB, 0)
            inherited = contextvars.copy_context()
            made["in a pool, inherited"] = inherited.run(native.pairs, 10, 3 * MIB, 0)
print(json.dumps([made, waiting]), flush=True)
os._exit(0)
"""


@with_torch
@pytest.mark.parametrize("kind", ["caching", "stitch"])
def test_no_hit_and_no_free_takes_the_gil(run: Run, kind: str) -> None:
    """While another thread keeps it: also behind streams, in pools and in tags."""
    made, waiting = json.loads(run(BEGIN + GIL, kind))
    assert made == {name: 20 if name == "hits" else 10 for name in made}
    assert waiting >= 11 * (3 << 20), "nothing has waited"


#: Segments come, return at the same address for another stream, and go, all at a tracker's.
TRACKED = """
some(1)
native.attach()
rows = []

def note(what):
    streams = {0: 0, side.cuda_stream: 1}
    rows.append([what, [[row[0], row[2], streams[row[3]]] for row in native.told()]])

side = torch.cuda.Stream()
x = some(30)
note("comes")
y, z = some(3), some(50)
del x
torch.cuda.empty_cache()
x = some(60)
rows.append(["registered", [native.registered()]])      # the last one at an older address, perhaps
note("come")
del x, y, z
torch.cuda.reset_accumulated_memory_stats()
x = some(40)
note("comes after a reset")
del x
torch.cuda.empty_cache()
note("all go")
x = some(30)
at = x.data_ptr()
del x
torch.cuda.empty_cache()
with torch.cuda.stream(side):
    x = some(30)
same = at == x.data_ptr()
note("comes again on another stream")
del x
torch.cuda.synchronize()
pools = bfc.integrations.torch.pool() if kind != "own" else torch.cuda
with torch.cuda.stream(side):
    pools.empty_cache()
    x = some(30)
same = same and at == x.data_ptr()
note("comes again")
print(json.dumps([same, rows]), flush=True)
os._exit(0)
"""


@with_torch
def test_a_tracker_is_told_what_pytorchs_own_tells(run: Run) -> None:
    """As NCCL's, which registers segments by their addresses. What `empty_cache` of a pool of ours
    has done is told when memory is next asked for."""
    own, ours = (json.loads(run(BEGIN + TRACKED, kind)) for kind in ("own", "caching"))
    assert own[0], "PyTorch's segments have moved: the test shows nothing"
    assert own[1][1] == ["registered", [[20 << 20, 50 << 20, 60 << 20]]]
    for (what, theirs), (_, mine) in zip(own[1], ours[1], strict=True):
        assert Counter(map(str, mine)) == Counter(map(str, theirs)), what


#: What a thread says of itself changes at each step, the last of which is a free that had waited.
SAYING = """
torch.cuda.memory._record_memory_history(max_entries=1000)
say, side = torch._C._cuda_setMemoryMetadata, torch.cuda.Stream()
x = some(3)
say("one")
y = some(30)
native.compiling("a region")
z = some(31)
say("two")
del x
native.compiling("one in it")
x = some(5)
native.compiling(None)
y = some(6)
native.compiling(None)
del z
say("three")
try:
    some(1 << 30)
except torch.OutOfMemoryError:
    pass
some(40)
say("four")
torch.cuda.empty_cache()
y.record_stream(side)
say("five")
driver.hold(side.cuda_stream)
del y
say("six")
driver.release(side.cuda_stream)
y = some(1)
say("seven")
torch.cuda.memory._snapshot()
say("eight")
entries = torch.cuda.memory._snapshot()["device_traces"][0]
keys = "action", "size", "compile_context", "user_metadata"
print(json.dumps([[entry[key] for key in keys] for entry in entries]), flush=True)
os._exit(0)
"""


@with_torch
def test_entries_of_a_history_have_the_words_of_who_made_them(run: Run) -> None:
    """Texts of the program, and what is compiled: also those of frees, of segments, and of
    refusals."""
    own, ours = (json.loads(run(BEGIN + SAYING, kind)) for kind in ("own", "caching"))
    said = {(entry[0], entry[3]) for entry in own}
    expected = ["free_requested two", "segment_alloc one", "oom three", "segment_free four"]
    expected += ["free_completed six", "snapshot seven"]
    assert {tuple(it.split()) for it in expected} <= said
    assert {entry[2] for entry in own} == {"N/A", "a region", "one in it"}
    assert ours == own


#: Blocks are asked for at addresses in two segments: free ones, and such as cannot be had.
PLACED = """
base = some(64).data_ptr()
rows = []

def put(offset, nbytes, stream=0):
    with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
        try:
            found = native.place(base + offset, nbytes) - base
        except RuntimeError as error:
            found = str(error).partition(" 0x")[0]
    rows.append([found, torch.cuda.memory_stats()])

put(0, 3 * MIB)
put(8 * MIB, 3 * MIB)
for offset, nbytes in ((8, 3), (9, 3), (6, 3), (62, 4), (1 << 20, 4)):
    put(offset * MIB, nbytes * MIB)  # not free, or not as much
put(20 * MIB + 100, 3 * MIB)
put(20 * MIB, 1000)  # for a segment of small blocks
put(25 * MIB, 3 * MIB, torch.cuda.Stream().cuda_stream)
put(30 * MIB + 512, 30 * MIB)
small = torch.empty(5, device="cuda")
base = small.data_ptr()
put(512, 700)
native.let_go()
torch.cuda.empty_cache()
rows.append([torch.cuda.memory_reserved() >> 20])
if kind != "own":
    bfc.integrations.torch.pool().check()
print(json.dumps(rows), flush=True)
os._exit(0)
"""


@with_torch
@pytest.mark.skipif(VERSION.startswith("2.11."), reason="PyTorch 2.13 was the first to do this")
def test_a_block_is_put_at_an_address_as_pytorchs_own_puts_it(run: Run) -> None:
    """And where memory is stitched, the same can be had."""
    own, ours, stitched = (
        json.loads(run(BEGIN + PLACED, it)) for it in ("own", "caching", "stitch")
    )
    assert [row[0] for row in own[:2]] == [0, 8 << 20]
    assert own[-2][0] == 512
    assert own[2][0] == "Could not allocate CUDA storage at exact address"
    assert ours == own
    assert [row[0] for row in stitched] == [row[0] for row in own]
