"""Tags for PyTorch's tensors: what sleeps, and what is there after waking."""

from __future__ import annotations

import pytest
from cuda_machine import ON_GPU
from torch_runtime import Run, with_torch

BEGIN = """
import os, random, sys, threading, torch, bfc

MIB = 1 << 20
bfc.integrations.torch.install(
    lambda device: bfc.CachingAllocator(
        bfc.CUDASubAllocator(device), memory_limit="160 MiB", stitch=True
    )
)
pool = bfc.integrations.torch.pool()

def filled(nbytes, value):
    x = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    x.copy_(torch.full((nbytes,), value, dtype=torch.uint8))
    return x

def holds(x, value):
    return bool((x.cpu() == value).all())
"""

#: What a server does that trains in turn, and what lies beside its tags.
IN_TURN = """
class Kept(torch.autograd.Function):
    made = []

    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        Kept.made.append(filled(1 * MIB, 3))
        return gradient

with pool.tag("weights"):
    weights = [filled(8 * MIB, value) for value in range(4)]
    with pool.tag(None):
        beside = filled(2 * MIB, 9)
    x = torch.empty(4, device="cuda", requires_grad=True)
    y = Kept.apply(x)
    y.backward(torch.empty_like(y))     # in a thread of autograd's
    thread = threading.Thread(target=lambda: Kept.made.append(filled(1 * MIB, 3)))
    thread.start()
    thread.join()
with pool.tag("kv"):
    cache = filled(64 * MIB, 5)
figures = pool.stats().by_owner
assert figures["kv"] == 64 * MIB, figures
assert 32 * MIB <= figures["weights"] < 33 * MIB, figures
assert 4 * MIB <= figures[""] < 5 * MIB, figures

places = [it.data_ptr() for it in (*weights, cache)]
for turn in range(int(sys.argv[1])):
    awake = torch.cuda.mem_get_info()[0]
    report = pool.sleep(keep={"weights": "pinned"}, drop=["kv"])
    assert 96 * MIB <= report.released_bytes < 100 * MIB
    assert torch.cuda.mem_get_info()[0] - awake == report.released_bytes
    assert pool.asleep == {"weights", "kv"}
    assert holds(beside, 9)
    assert all(holds(it, 3) for it in Kept.made)
    training = filled(90 * MIB, 7)      # where they were
    del training
    try:
        with pool.tag("kv"):
            filled(1 * MIB, 1)
    except RuntimeError as error:
        assert "wake('kv')" in str(error)
    else:
        raise AssertionError("it sleeps")
    pool.wake("weights")
    assert all(holds(it, value) for value, it in enumerate(weights))
    pool.wake(fill=turn % 256)
    assert holds(cache, turn % 256)
    assert places == [it.data_ptr() for it in (*weights, cache)]
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= awake, "nothing is left behind"
del weights, cache, x, y
print("done", flush=True)
os._exit(0)
"""


@with_torch
@pytest.mark.parametrize("turns", [4, pytest.param(1000, marks=pytest.mark.long)])
def test_tensors_sleep_and_wake_where_they_were(run: Run, turns: int) -> None:
    """As an engine that sleeps many times an hour (vllm#21336 and sglang#30474 lost memory at each
    turn)."""
    assert run(BEGIN + IN_TURN, str(turns)) == "done\n"


#: Others hold the memory when a tag is to wake.
REFUSED = """
import bfc
with pool.tag("weights"):
    weights = [filled(16 * MIB, value) for value in range(4)]
with pool.tag("kv"):
    cache = filled(16 * MIB, 9)
pool.sleep(keep={"weights": "pinned"}, drop=["kv"])
with bfc.owner("trainer"):
    states = filled(120 * MIB, 7)
for attempt in range(3):
    try:
        pool.wake("weights")
    except bfc.OutOfMemoryError as error:
        said = str(error)
    else:
        raise AssertionError("there is no room")
    assert "trainer" in said and "64.00 MiB" in said and "weights" in said, said
    assert pool.asleep == {"weights", "kv"}
    assert holds(states, 7)
pool.wake("kv")                     # for which there is room
assert pool.asleep == {"weights"}
for call in (lambda: pool.wake("wieghts"), lambda: pool.sleep(drop="wieghts")):
    try:
        call()
    except ValueError as error:
        assert "'weights'" in str(error), error
    else:
        raise AssertionError("there is no such tag")
pool.sleep(keep={"weights": "host"})    # it sleeps already, and keeps what it had
del states
pool.wake("weights")
assert all(holds(it, value) for value, it in enumerate(weights))
print("done", flush=True)
os._exit(0)
"""


@with_torch
def test_a_wake_without_room_can_be_repeated(run: Run) -> None:
    """As torch_memory_saver#99, where it failed for good, and other calls that are refused."""
    assert run(BEGIN + REFUSED) == "done\n"


#: Tensors of two tags and of none come and go, on two streams, while the tags sleep and wake, and
#: calls of the driver fail.
AT_RANDOM = """
from bfc.testing import cuda_emulator

draw, driver, side = random.Random(int(sys.argv[1])), cuda_emulator.load(), torch.cuda.Stream()
CALLS = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuMemcpyAsync",
         "cuStreamSynchronize", "cuEventQuery", "cuEventRecord", "cuCtxPushCurrent")
sys.unraisablehook = lambda unraisable: None
live, counts = [], dict(sleeps=0, wakes=0, faults=0)

def make():
    tag = draw.choice(["a", "b", None])
    if tag in pool.asleep:
        return
    value, on = draw.randrange(256), draw.choice([side, torch.cuda.default_stream()])
    with pool.tag(tag), torch.cuda.stream(on):
        live.append([filled(draw.choice([500, 5000, MIB, 5 * MIB]), value), value, tag])
    if draw.random() < 0.3:
        live[-1][0].record_stream(side)

def failing(call):
    if draw.random() < 0.3:
        driver.fail(draw.choice(CALLS), "CUDA_ERROR_UNKNOWN", at=draw.randrange(1, 6))
    try:
        call()
    except Exception:
        counts["faults"] += 1
    driver.clear()

def sleep():
    keep = {tag: draw.choice(["host", "pinned"]) for tag in "ab" if draw.random() < 0.5}
    drop = [tag for tag in "ab" if tag not in keep and draw.random() < 0.5]
    known = {row[2] for row in live}
    keep = {tag: way for tag, way in keep.items() if tag in known}
    drop = [tag for tag in drop if tag in known and tag not in pool.asleep]
    failing(lambda: pool.sleep(keep=keep, drop=drop))
    for row in live:
        if row[2] in drop:
            row[1] = None
    counts["sleeps"] += 1

def wake():
    tags = [tag for tag in "ab" if tag in pool.asleep and draw.random() < 0.7]
    if tags:
        failing(lambda: pool.wake(*tags))
        counts["wakes"] += 1

def check():
    for x, value, tag in live:
        if tag not in pool.asleep and value is not None:
            assert holds(x, value), (tag, value, x.numel())

for turn in range(int(sys.argv[2])):
    try:
        what = draw.random()
        if what < 0.4 and len(live) < 16:
            make()
        elif what < 0.75 and live:
            live.pop(draw.randrange(len(live)))
        elif what < 0.85:
            sleep()
        else:
            wake()
            check()
    except BaseException as error:
        raise AssertionError(f"seed {sys.argv[1]}, turn {turn}") from error
pool.wake()
check()
live.clear()
torch.cuda.empty_cache()
pool.check()
assert pool.stats().bytes_in_use == 0
assert counts["sleeps"] > 10 and counts["wakes"] > 10 and counts["faults"] > 0, counts
print("done", flush=True)
os._exit(0)
"""


@with_torch
@pytest.mark.skipif(ON_GPU, reason="calls of the driver fail")
@pytest.mark.parametrize(
    ("seed", "steps"),
    [(1, 400), (2, 400), *(pytest.param(seed, 4000, marks=pytest.mark.long) for seed in (3, 4, 5))],
)
def test_contents_are_right_after_any_sleep_and_failure(run: Run, seed: int, steps: int) -> None:
    assert run(BEGIN + AT_RANDOM, str(seed), str(steps)) == "done\n"
