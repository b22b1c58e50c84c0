"""Tags for PyTorch's tensors: what sleeps, and what is there after waking."""

from __future__ import annotations

import pytest
from cuda_machine import ON_GPU
from documents import block_of
from torch_runtime import Run, with_torch
from torch_sleep_script import BEGIN, MADE

#: What a server does that trains in turn, and what lies beside its tags.
IN_TURN = """
with pool.tag("weights"):
    weights = [filled(8 * MIB, value) for value in range(4)]
    with pool.tag(None):
        beside = filled(2 * MIB, 9)
    x = torch.empty(4, device="cuda", requires_grad=True)
    y = Made.apply(x)
    y.backward(torch.empty_like(y))     # in a thread of autograd's
    thread = threading.Thread(target=lambda: Made.made.append(filled(1 * MIB, 3)))
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
    assert all(holds(it, 3) for it in Made.made)
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

trained = []
def train_one_epoch():
    filled(90 * MIB, 7)
    trained.append(pool.asleep)
with pool.tag("engine"):
    engine = filled(4 * MIB, 6)
del cache
torch.cuda.empty_cache()
exec(sys.argv[2])                   # the three lines of the how-to
assert trained == [{"engine"}] and not pool.asleep and holds(engine, 6)
Model, blocks, rows = lambda: torch.nn.Linear(4, 4), 4 * MIB, 5
train = lambda: trained.append(pool.asleep)
exec(sys.argv[3])                   # how it begins there
assert trained[1:] == [{"weights", "kv"}] and not pool.asleep
assert cache.dtype == torch.float16 and holds(cache, 0) and table.numel() == 5
del weights, x, y
print("done", flush=True)
os._exit(0)
"""


@with_torch
def test_tensors_sleep_and_wake_where_they_were(run: Run) -> None:
    three_lines = block_of("how-to/sleep.md", 'wake("engine")')
    assert three_lines.count("\n") == 3
    first = block_of("how-to/sleep.md", "Model().cuda()", 'pool.wake("kv", fill=0)')
    assert run(BEGIN + MADE + IN_TURN, "4", three_lines, first) == "done\n"


#: Each pattern is a function that takes one turn. What is free and reserved after each is the same
#: as after the first. "update" and "trainer" stand in for what engines reported in sglang#32718 and
#: verl#5979, whose texts could not be read: they are made from what such programs do.
PATTERNS = """
import gc
from torch_memory_saver import torch_memory_saver as saver

gc.freeze()     # a wake without room collects cycles: that takes long among all of PyTorch

def put(x, value):
    x.copy_(torch.full((x.numel(),), value % 256, dtype=torch.uint8))

def rotation():
    "Three engines, one of which is awake, take turns. One lost 3.4 GiB a cycle (vllm#21336)."
    engines = "abc"
    weights, caches = {}, {}
    for number, engine in enumerate(engines):
        with pool.tag(engine + " weights"):
            weights[engine] = [filled(2 * MIB, number), filled(9000, 100 + number)]
        with pool.tag(engine + " kv"):
            caches[engine] = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        sleep = dict(keep={engine + " weights": "pinned"}, drop=[engine + " kv"])
        pool.sleep(**sleep)
    def take(turn):
        number = turn % 3
        engine = engines[number]
        pool.wake(engine + " weights")
        pool.wake(engine + " kv")
        assert holds(weights[engine][0], number) and holds(weights[engine][1], 100 + number)
        put(caches[engine][: 2 * MIB], turn)
        assert holds(caches[engine][: 2 * MIB], turn % 256)
        pool.sleep(keep={engine + " weights": "pinned"}, drop=[engine + " kv"])
        assert len(pool.asleep) == 6
    return take

def in_the_way():
    "Others have the memory at the first try: that failed for good (torch_memory_saver#99)."
    with saver.region("weights", enable_cpu_backup=True):
        weights = [filled(2 * MIB, value) for value in range(3)]
    with saver.region("kv"):
        cache = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
    def take(turn):
        saver.pause("kv")
        saver.pause("weights")
        with bfc.owner("trainer"):
            states = torch.empty(120 * MIB, dtype=torch.uint8, device="cuda")
        saver.resume("weights")
        try:
            saver.resume("kv")
        except torch.OutOfMemoryError as error:
            assert "trainer" in str(error) and "wake('kv') again" in str(error), error
        else:
            raise AssertionError("there is no room")
        assert pool.asleep == {"kv"} and all(holds(x, value) for value, x in enumerate(weights))
        del states
        saver.resume("kv")
        put(cache[: 2 * MIB], turn)
        assert holds(cache[: 2 * MIB], turn % 256)
    return take

def update():
    "Weights wake first and are updated in place, then graphs and caches. The graphs stay valid."
    side = torch.cuda.Stream()
    with pool.tag("weights"):
        weights = filled(2 * MIB, 1)
    with pool.tag("kv_cache"):
        cache = filled(4 * MIB, 2)
    graph = torch.cuda.CUDAGraph()
    with pool.tag("cuda_graph"), torch.cuda.graph(graph, stream=side):
        scratch = torch.empty_like(weights)
        scratch.copy_(weights)
        cache[: 2 * MIB].copy_(scratch)
        del scratch
    def take(turn):
        pool.sleep(keep={"weights": "host"} if turn % 2 else {}, drop=[
            *(["weights"] if turn % 2 == 0 else []), "kv_cache", "cuda_graph"])
        pool.wake("weights")
        assert not turn % 2 or holds(weights, (turn - 1) % 256)
        put(weights, turn)
        pool.wake("cuda_graph")
        pool.wake("kv_cache", fill=9)
        assert holds(cache, 9)
        graph.replay()
        assert holds(cache[: 2 * MIB], turn % 256) and holds(cache[2 * MIB :], 9)
    return take

def trainer():
    "Engine and training each have nearly all of the memory, and one copies to the other."
    with pool.tag("engine"):
        engine = filled(2 * MIB, 0)
    with pool.tag("cache"):
        cache = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    pool.sleep(keep={"engine": lambda nbytes: bytearray(nbytes)}, drop="cache")
    with pool.tag("training"):
        master = filled(2 * MIB, 0)
    def take(turn):
        with pool.tag("training"):
            gradient = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
        put(master, turn + 1)
        del gradient                        # it stays cached, and the cache has no room beside it
        pool.wake("engine")
        assert holds(engine, turn % 256)
        engine.copy_(master)
        pool.sleep(keep={"training": "pinned"})
        pool.wake("cache")
        put(cache[: 2 * MIB], turn)
        assert holds(cache[: 2 * MIB], turn % 256) and holds(engine, (turn + 1) % 256)
        pool.sleep(keep={"engine": "pinned"}, drop="cache")
        pool.wake("training")
        assert holds(master, (turn + 1) % 256)
    return take
"""
TAKE_TURNS = """
from bfc.testing import cuda_emulator

driver = cuda_emulator.load()
take, before = globals()[sys.argv[1]](), None
for turn in range(int(sys.argv[2])):
    take(turn)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    left = (torch.cuda.mem_get_info()[0], pool.stats().bytes_reserved, driver.live(),
            driver.reservations(), driver.live_handles())
    before = before or left
    assert left == before, (turn, left, before)
    pool.check()
print("done", flush=True)
os._exit(0)
"""


@with_torch
@pytest.mark.skipif(ON_GPU, reason="the driver is asked what is left")
@pytest.mark.parametrize(
    ("pattern", "turns"),
    [
        ("in_the_way", 4),
        ("trainer", 8),
        *(
            pytest.param(pattern, 1000, marks=pytest.mark.long)
            for pattern in ("rotation", "in_the_way", "update", "trainer")
        ),
    ],
)
def test_nothing_is_left_behind(run: Run, pattern: str, turns: int) -> None:
    """As servers and trainers take turns many times an hour."""
    assert run(BEGIN + PATTERNS + TAKE_TURNS, pattern, str(turns)) == "done\n"


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
    assert "trainer" in said and "64.00 MiB" in said and "wake('weights') again" in said, said
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
