"""Tags for PyTorch's tensors: what sleeps, and what is there after waking."""

from __future__ import annotations

import pytest
from cuda_machine import ON_GPU
from torch_runtime import Run, with_torch

BEGIN = """
import os, sys, threading, torch, bfc

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


#: Memory that is in use otherwise when it is to sleep, and calls in which it cannot.
MISUSED = """
import gc
from bfc.testing import cuda_emulator

driver, side = cuda_emulator.load(), torch.cuda.Stream()
free = lambda: torch.cuda.mem_get_info()[0]
with pool.tag("weights"):
    weights = filled(16 * MIB, 3)
    spare = filled(16 * MIB, 4)
torch.cuda.synchronize()

# A kernel uses it: sleep waits for that (vllm#28714 was an illegal access).
out = torch.empty(16 * MIB, dtype=torch.uint8, device="cuda")
driver.hold(side.cuda_stream)
with torch.cuda.stream(side):
    weights.record_stream(side)
    out.copy_(weights, non_blocking=True)
waiting = driver.release_once_waited_for(side.cuda_stream)
pool.sleep(keep={"weights": "pinned"})
waiting.join()
assert holds(out, 3)
host = pool.tag_stats()["weights"]["bytes_kept"]
assert host == 32 * MIB, host

# What is freed while it sleeps is not freed twice (vllm#36651), and does not wake.
del spare
gc.collect()
torch.cuda.empty_cache()
pool.sleep(keep={"weights": "pinned"})
assert pool.tag_stats()["weights"]["bytes_kept"] == host

# Others have the memory, in the middle of the wake: what had come goes back (vllm#34600).
before = free()
for _ in range(3):
    driver.fail("cuMemCreate", at=5, times=None)
    try:
        pool.wake()
    except bfc.OutOfMemoryError:
        pass
    else:
        raise AssertionError("it cannot wake")
    driver.clear()
    assert free() == before and pool.asleep == {"weights"}

# A child that is forked meanwhile can end; its parent wakes.
child = os.fork()
if child == 0:
    try:
        pool.wake()
    except BaseException:
        pass
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
pool.wake()
assert holds(weights, 3)
pool.wake()
assert pool.tag_stats()["weights"]["bytes_kept"] == 0, "the host has its memory back (vllm#16663)"

# A capture is open on a stream that uses it.
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=side):
    inside = torch.empty_like(weights)
    inside.copy_(weights)
    weights.record_stream(side)
    try:
        pool.sleep(keep={"weights": "host"})
    except Exception as error:
        assert "captur" in str(error), error
    else:
        raise AssertionError("its capture is open")
assert not pool.asleep and holds(weights, 3)
graph.replay()
assert holds(inside, 3)

# Tags of another device.
with torch.cuda.device(1):
    other = bfc.integrations.torch.pool()
with other.tag("cache"):
    there = torch.empty(MIB, dtype=torch.uint8, device="cuda:1")
    here = filled(MIB, 7)
for call in (lambda: pool.sleep(drop="cache"), lambda: pool.wake("cache")):
    try:
        call()
    except ValueError as error:
        assert "'cache'" in str(error) and "'weights'" in str(error), error
    else:
        raise AssertionError("it is a tag of device 1")
other.sleep()
assert holds(here, 7) and other.asleep == {"cache"} and not pool.asleep
print("done", flush=True)
os._exit(0)
"""


@with_torch
@pytest.mark.skipif(ON_GPU, reason="calls of the driver fail, and work is held back")
def test_sleep_of_memory_that_is_in_use_otherwise(run: Run) -> None:
    two = "from bfc.testing import cuda_emulator\ncuda_emulator.load().reset(devices=2)\n"
    assert run(two + BEGIN + MISUSED) == "done\n"


@with_torch
@pytest.mark.skipif(ON_GPU, reason="calls of the driver fail")
@pytest.mark.parametrize(
    ("seed", "steps"),
    [(1, 400), *(pytest.param(seed, 2000, marks=pytest.mark.long) for seed in range(2, 7))],
)
def test_contents_are_right_after_any_sleep_and_failure(run: Run, seed: int, steps: int) -> None:
    """Of tensors and graphs, in two threads."""
    program = """
    import sys
    sys.path.insert(0, "tests/helpers")
    import torch_sleep_program
    torch_sleep_program.main(int(sys.argv[1]), int(sys.argv[2]))
    """
    assert "'compared'" in run(program, str(seed), str(steps))
