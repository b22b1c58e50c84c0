"""The calls of vLLM and of torch_memory_saver that put memory to sleep, with PyTorch's tensors."""

from __future__ import annotations

import pytest
from cuda_machine import ON_GPU
from documents import block_of
from torch_runtime import Run, with_torch
from torch_sleep_script import BEGIN, MADE

END = """
torch.cuda.empty_cache()
pool.check()
print("done", flush=True)
os._exit(0)
"""

GRAPHS = """
side = torch.cuda.Stream()
x = filled(4 * MIB, 1)
with pool.tag("graph"):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        scratch = torch.empty_like(x)       # freed in the capture: the graph uses its address
        scratch.copy_(x)
        out = torch.empty_like(x)
        out.copy_(scratch)
        del scratch
place, held = out.data_ptr(), pool.tag_stats()["graph"]["bytes_in_use"]
assert held == 4 * MIB, held
for turn in range(4):
    x.copy_(torch.full((4 * MIB,), turn, dtype=torch.uint8))
    graph.replay()
    assert holds(out, turn)
    awake = free()
    keep = {"graph": "pinned"} if turn % 2 else {}
    report = pool.sleep(keep=keep, drop=["graph"] if not keep else [])
    assert report.released_bytes >= 8 * MIB, report
    assert free() - awake == report.released_bytes
    assert pool.stats().bytes_asleep == report.released_bytes
    pool.check()
    try:
        graph.replay()
    except bfc.AsleepError as error:
        assert "wake('graph')" in str(error), error
    else:
        raise AssertionError("its memory sleeps")
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=graph.pool(), stream=side):
            filled_too = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    except RuntimeError as error:
        assert "wake('graph')" in str(error), error
    else:
        raise AssertionError("its pool sleeps")
    torch.cuda.empty_cache()        # gives nothing back of what sleeps
    between = filled(100 * MIB, 7)
    del between
    pool.wake("graph")
    assert free() <= awake
    if turn % 2:
        assert holds(out, turn)
    assert out.data_ptr() == place
    x.copy_(torch.full((4 * MIB,), 100 + turn, dtype=torch.uint8))
    graph.replay()
    assert holds(out, 100 + turn)
    torch.cuda.empty_cache()
    pool.check()
def model(x):
    made = torch.empty_like(x)
    made.copy_(x)
    return made
x.copy_(torch.full((4 * MIB,), 7, dtype=torch.uint8))
exec(sys.argv[1])                   # the how-to's
assert not pool.asleep and holds(y, 7)
del graph, out, x, y
gc.collect()
torch.cuda.empty_cache()
assert pool.stats().pool_bytes == 0, pool.snapshot()
"""


@with_torch
def test_a_graph_runs_after_its_pool_has_slept(run: Run) -> None:
    how_to = block_of("how-to/sleep.md", 'keep={"graphs": "pinned"}', "graph.replay()")
    assert run(BEGIN + GRAPHS + END, how_to) == "done\n"


SAVER = """
from torch_memory_saver import torch_memory_saver as saver

assert saver.enabled
saver.hook_mode = "preload"
with saver.region(tag="weights", enable_cpu_backup=True):
    weights = filled(32 * MIB, 3)
    with saver.disable():
        beside = filled(2 * MIB, 9)
with saver.region("kv"):
    cache = filled(64 * MIB, 5)
with saver.region("kv", enable_cpu_backup=True):
    table = filled(2 * MIB, 4)              # the same tag, kept
with saver.region("both", enable_cpu_backup=True, cpu_backup_backend="mmap"):
    other = filled(2 * MIB, 6)
with saver.region("disk", enable_disk_backup=True):
    files = filled(2 * MIB, 8)
os.environ["TMS_INIT_CPU_BACKUP_BACKEND"] = "mmap"
with saver.region("both", enable_cpu_backup=True):      # where "both" is kept already
    pass
os.environ["TMS_INIT_CPU_BACKUP_BACKEND"] = "nmap"
try:
    with saver.region("both", enable_cpu_backup=True):
        pass
except ValueError as error:
    assert "TMS_INIT_CPU_BACKUP_BACKEND" in str(error)
else:
    raise AssertionError
del os.environ["TMS_INIT_CPU_BACKUP_BACKEND"]
assert sorted(pool.tag_stats()) == ["both", "disk", "kv", "kv (pinned)", "weights"]
places = [it.data_ptr() for it in (weights, cache, table)]
assert saver.get_cpu_backup(weights) is None
for turn in range(4):
    awake = free()
    saver.pause("kv")
    assert free() - awake == 66 * MIB
    saver.pause("weights")
    saver.pause("weights")                  # twice is harmless
    saver.pause("unknown")
    assert holds(beside, 9)
    backup = saver.get_cpu_backup(weights[MIB:])
    assert backup.numel() == 31 * MIB and holds(backup, 3)
    assert saver.get_cpu_backup(cache) is None
    training = filled(90 * MIB, 7)
    del training
    saver.resume("weights")
    assert holds(weights, 3)
    saver.resume("kv")
    assert holds(table, 4)
    assert places == [it.data_ptr() for it in (weights, cache, table)]
    saver.pause()
    assert not pool.stats().bytes_asleep == 0
    saver.resume()
    assert holds(weights, 3) and holds(table, 4) and holds(other, 6) and holds(files, 8)
    torch.cuda.empty_cache()
    assert free() >= awake
saver.pause()
training = filled(130 * MIB, 7)
try:
    saver.resume()
except torch.OutOfMemoryError as error:     # a RuntimeError, which its callers expect
    assert "again" in str(error) and isinstance(error.__cause__, bfc.OutOfMemoryError), error
else:
    raise AssertionError("there is no room")
del training
saver.resume()
assert holds(weights, 3) and holds(table, 4)
assert saver.memory_margin_bytes == 0
torch.cuda.empty_cache()
saver.memory_margin_bytes = free() - 10 * MIB
first = filled(4 * MIB, 1)
try:
    filled(12 * MIB, 1)
except torch.OutOfMemoryError:
    pass
else:
    raise AssertionError("it would leave less than the margin")
saver.pause("kv")
saver.memory_margin_bytes = free()
saver.resume("kv")                          # which is not bounded
try:
    filled(12 * MIB, 1)
except torch.OutOfMemoryError:
    pass
else:
    raise AssertionError("the margin is kept after a resume")
for wrong in (lambda: setattr(saver, "memory_margin_bytes", -1),):
    try:
        wrong()
    except ValueError:
        pass
    else:
        raise AssertionError
saver.memory_margin_bytes = 0
del first
filled(12 * MIB, 1)
x, graph = filled(MIB, 1), torch.cuda.CUDAGraph()
with saver.cuda_graph(graph, tag="graph"):
    y = torch.empty_like(x)
    y.copy_(x)
saver.pause("graph")
saver.resume("graph")
graph.replay()
assert holds(y, 1)
try:
    with saver.region(cpu_backup_backend="pinned"):
        pass
except ValueError as error:
    assert "enable_cpu_backup" in str(error)
else:
    raise AssertionError
Model, trained = lambda: torch.nn.Linear(4, 4), []
train_one_epoch = lambda: trained.append(pool.asleep)
exec(sys.argv[1])                   # the how-to's
assert trained == [{"weights"}] and not pool.asleep and holds(weights, 3)
before = dict(os.environ)
from torch_memory_saver import configure_subprocess
with configure_subprocess():
    import subprocess
    child = subprocess.run([sys.executable, "-c", '''
from bfc.testing import cuda_emulator
cuda_emulator.load().reset(devices=1)
import torch
from torch_memory_saver import torch_memory_saver as saver
with saver.region("a"):
    x = torch.empty(4 << 20, dtype=torch.uint8, device="cuda")
before = torch.cuda.mem_get_info()[0]
saver.pause("a")
print(torch.cuda.mem_get_info()[0] - before, flush=True)
import os
os._exit(0)
'''], capture_output=True, text=True)
assert child.stdout == f"{4 * MIB}\\n", child.stderr
assert dict(os.environ) == before
del model, weights, beside, cache, table, other, files, x, y, graph
gc.collect()
"""


@with_torch
def test_torch_memory_savers_calls_are_answered(run: Run) -> None:
    how_to = block_of("how-to/sleep.md", "torch_memory_saver.pause(")
    assert run(BEGIN + SAVER + END, how_to) == "done\n"


TWO_DEVICES = """
from torch_memory_saver import torch_memory_saver as saver

def on(device, value):
    x = torch.empty(16 * MIB, dtype=torch.uint8, device=f"cuda:{device}")
    x.copy_(torch.full((16 * MIB,), value, dtype=torch.uint8))
    return x

def free_of():
    return [torch.cuda.mem_get_info(device)[0] >> 20 for device in (0, 1)]

with saver.region("outer"):
    with saver.region("kept", enable_cpu_backup=True):
        here = on(0, 1)
        there = on(1, 2)            # the first of its device, whose pool is made in the region
        with saver.disable():
            beside = on(1, 3)
    dropped = on(1, 4)              # in the region around it
after = on(1, 5)                    # in none
pools = bfc.integrations.torch.pool(0), bfc.integrations.torch.pool(1)
assert [sorted(it.tag_stats()) for it in pools] == [["kept", "outer"]] * 2
awake = free_of()
saver.pause()
assert [now - then for now, then in zip(free_of(), awake)] == [16, 32], (awake, free_of())
assert holds(beside, 3) and holds(after, 5)
saver.resume()
assert holds(here, 1) and holds(there, 2) and free_of() == awake
assert not any(it.asleep for it in pools)
"""


@with_torch
@pytest.mark.skipif(ON_GPU, reason="needs two devices")
def test_a_region_holds_on_a_device_that_is_first_used_in_it(run: Run) -> None:
    two = "from bfc.testing import cuda_emulator\ncuda_emulator.load().reset(devices=2)\n"
    assert run(two + BEGIN + TWO_DEVICES + END) == "done\n"


COVERED = """
from torch_memory_saver import torch_memory_saver as saver

kept = "TMS_INIT_ENABLE_CPU_BACKUP" in os.environ

Made.nbytes = 2 * MIB
states = filled(32 * MIB, 1)                    # in no region
x = torch.empty(4, device="cuda", requires_grad=True)
y = Made.apply(x)
y.backward(torch.empty_like(y))                 # in a thread of autograd's
thread = threading.Thread(target=lambda: Made.made.append(filled(2 * MIB, 3)))
thread.start()
thread.join()
with saver.disable():
    awake = filled(2 * MIB, 4)
    with saver.region("other", enable_cpu_backup=True):
        other = filled(2 * MIB, 5)
    awake_too = filled(2 * MIB, 6)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    copy = torch.empty_like(states)
    copy.copy_(states)
used = pool.tag_stats()["default"]["bytes_in_use"]
assert 68 * MIB <= used < 69 * MIB, used
for turn in range(3):
    left = free()
    saver.pause("default")
    assert free() - left >= 68 * MIB
    assert holds(awake, 4) and holds(awake_too, 6) and holds(other, 5)
    backup = saver.get_cpu_backup(states)
    assert (backup is not None and holds(backup, 1)) if kept else backup is None
    saver.pause()
    assert pool.asleep == {"default", "other"}
    saver.resume()
    if not kept:
        states.copy_(torch.full((32 * MIB,), 1, dtype=torch.uint8))
    assert holds(states, 1) and (not kept or all(holds(it, 3) for it in Made.made))
    graph.replay()
    assert holds(copy, 1)
del states, awake, awake_too, other, copy, graph, x, y
Made.made.clear()
gc.collect()
"""


@with_torch
@pytest.mark.parametrize("more", [{}, {"TMS_INIT_ENABLE_CPU_BACKUP": "1"}], ids=["", "kept"])
def test_all_memory_is_in_a_region_where_the_environment_says_so(
    run: Run, more: dict[str, str]
) -> None:
    """Of every thread, as slime starts its trainers."""
    assert run(BEGIN + MADE + COVERED + END, TMS_INIT_ENABLE="1", **more) == "done\n"


RETAINED = """
from torch_memory_saver import torch_memory_saver as saver

assert saver.retain_cpu_backup
from bfc.testing import cuda_emulator
driver = cuda_emulator.load()
with saver.region("a", enable_cpu_backup=True):
    a = filled(40 * MIB, 1)
with saver.region("b", enable_cpu_backup=True):
    b = filled(20 * MIB, 2)
asked = []
for turn in range(4):
    a.copy_(torch.full((40 * MIB,), turn, dtype=torch.uint8))
    before = driver.count("cuMemHostAlloc")
    saver.pause()
    assert holds(saver.get_cpu_backup(a), turn) and holds(saver.get_cpu_backup(b), 2)
    saver.resume()
    asked.append(driver.count("cuMemHostAlloc") - before)
    assert holds(a, turn) and holds(b, 2)
assert asked == [3, 0, 0, 0], asked             # pieces of at most 32 MiB
saver.retain_cpu_backup = False
before = driver.count("cuMemFreeHost")
saver.pause()
saver.resume()
assert driver.count("cuMemFreeHost") - before == 3 and holds(b, 2)
del a, b
"""


@with_torch
@pytest.mark.skipif(ON_GPU, reason="the driver is asked what was called")
def test_the_hosts_memory_stays_for_the_next_pause(run: Run) -> None:
    assert run(BEGIN + RETAINED + END, TMS_RETAIN_CPU_BACKUP="1") == "done\n"


#: What of vLLM 0.33 calls an allocator of its own: the registry of back ends, the singleton, and
#: the steps of its worker.
VLLM = """
class SleepModeBackend:
    def __init__(self):
        self._state = "RUNNING"

    def state(self):
        return self._state

class SleepModeBackendFactory:
    _registry = {}

    @classmethod
    def register_backend(cls, name, module, kind):
        if name in cls._registry:
            raise ValueError(name)
        cls._registry[name] = lambda: getattr(__import__("importlib").import_module(module), kind)

class CuMemAllocator:
    instance = None

    @staticmethod
    def get_instance():
        return CuMemAllocator.instance

class ModelConfig:
    def __init__(self, enable_sleep_mode, sleep_mode_backend="cumem"):
        self.enable_sleep_mode, self.sleep_mode_backend = enable_sleep_mode, sleep_mode_backend
        self.__post_init__()

    def __post_init__(self):
        self.is_checked = True

for name, members in {
    "vllm": (), "vllm.device_allocator": (), "vllm.device_allocator.cumem": (CuMemAllocator,),
    "vllm.config": (), "vllm.config.model": (ModelConfig,),
    "vllm.device_allocator.sleep_mode_backend": (SleepModeBackend, SleepModeBackendFactory),
}.items():
    sys.modules[name] = types.ModuleType(name)
    for member in members:
        setattr(sys.modules[name], member.__name__, member)

from importlib.metadata import entry_points
from bfc.integrations import vllm
for _ in range(2):
    vllm.register()
"""
ENGINE = """
allocator = CuMemAllocator.get_instance()
assert allocator.get_current_usage() == 0
with allocator.use_memory_pool(tag="weights"):
    weights = filled(32 * MIB, 3)
with allocator.use_memory_pool(tag="kv_cache"):
    cache = filled(64 * MIB, 5)
with allocator.use_memory_pool(tag="runtime"):
    adapter = filled(2 * MIB, 6)
x = filled(2 * MIB, 1)
graph = torch.cuda.CUDAGraph()
with allocator.cudagraph_pool() as handle, torch.cuda.graph(graph, pool=handle):
    y = torch.empty_like(x)
    y.copy_(x)
assert allocator.get_current_usage() == 100 * MIB
backend = SleepModeBackendFactory._registry["bfc"]()()
assert backend.state() == "RUNNING"
left = None
for turn in range(6):
    level = 1 + turn % 2
    awake = free()
    backend.suspend(level)
    assert backend.state() == "SUSPENDED"
    assert free() - awake >= 100 * MIB
    assert left in (None, free()), "memory stays behind"
    left = free()
    backend.resume(["weights"])
    assert "kv_cache" in pool.asleep and len(pool.asleep) == 1
    assert holds(adapter, 6)
    if level == 1:
        assert holds(weights, 3)
    weights.copy_(torch.full((32 * MIB,), 3, dtype=torch.uint8))
    backend.resume(["kv_cache"])
    graph.replay()
    assert holds(y, 1) and backend.state() == "RUNNING"
    backend.discard(("kv_cache",))
    assert pool.asleep == {"kv_cache"}
    allocator.wake_up()
    torch.cuda.empty_cache()
    assert free() == awake
class LLM:
    def sleep(self, level=1):
        backend.suspend(level)

    def wake_up(self, tags=None):
        backend.resume(tags)

llm, trained = LLM(), []
train_one_epoch = lambda: trained.append(pool.asleep)
exec(sys.argv[1])                   # the how-to's
assert {"weights", "kv_cache"} < trained[0] and not pool.asleep and holds(weights, 3)
allocator.sleep()
assert pool.stats().bytes_reserved <= 4 * MIB
training = filled(130 * MIB, 7)
try:
    allocator.wake_up()
except RuntimeError as error:               # as vLLM's own
    assert "again" in str(error), error
else:
    raise AssertionError("there is no room")
del training
allocator.wake_up()
allocator.release_pools()
del weights, cache, adapter, graph, x, y
gc.collect()
"""


@with_torch
def test_vllms_calls_are_answered(run: Run) -> None:
    how_to = block_of("how-to/sleep.md", "llm.sleep(", "llm.wake_up(")
    assert run(BEGIN + VLLM + ENGINE + END, how_to) == "done\n"


UNSERVED = (
    """
import os, sys, types
"""
    + VLLM.replace("for _ in range(2):\n    vllm.register()\n", "")
    + """
for _ in range(2):
    vllm.register()
assert ModelConfig(True).is_checked and ModelConfig(False, "bfc").is_checked
assert CuMemAllocator.instance is None, "vLLM's own stays"
try:
    SleepModeBackendFactory._registry["bfc"]()()
except RuntimeError as error:
    assert "bfc run" in str(error)
else:
    raise AssertionError
if sys.argv[1] == "configured":
    assert "BFC_VLLM" not in os.environ
    assert ModelConfig(True, "bfc").is_checked
    assert os.environ["BFC_VLLM"] == "1"
elif sys.argv[1] == "spawned":
    os.environ["BFC_VLLM"] = "1"
    vllm.register()
else:
    os.environ["VLLM_PLUGINS"] = "other,bfc"
    vllm.register()
assert isinstance(CuMemAllocator.instance, vllm.Allocator)
served = CuMemAllocator.instance
vllm.register()
assert CuMemAllocator.instance is served
found = {it.name: it.value for it in entry_points(group="vllm.general_plugins")}
assert found.get("bfc", "bfc.integrations.vllm:register") == "bfc.integrations.vllm:register"
print("done", flush=True)
os._exit(0)
"""
)


@with_torch
@pytest.mark.parametrize("how", ["configured", "spawned", "plugins"])
def test_vllms_own_allocator_stays_unless_bfc_is_named(run: Run, how: str) -> None:
    assert run(UNSERVED, how) == "done\n"
