"""PyTorch's whole allocator over pools of bfc, with PyTorch itself: `make test-torch-cuda`."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from cuda_machine import ON_GPU
from documents import ROOT
from torch_features import FEATURES
from torch_programs import differences
from torch_runtime import Run, environment, with_torch

KINDS = ("own", "caching", "stitch")
SCRIPT = ROOT / "tests/helpers/torch_features.py"


@pytest.fixture(scope="session", params=KINDS)
def outcomes(
    request: pytest.FixtureRequest, runtime: Path | None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """What became of each feature: one process for each kind of allocator."""
    return outcomes_of(request.param, tmp_path_factory.mktemp("features"), runtime)


def outcomes_of(kind: str, folder: Path, runtime: Path | None) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, kind, folder],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env=environment(runtime),
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@with_torch
def test_each_feature_works_as_with_pytorchs_own_allocator(outcomes) -> None:
    assert outcomes == dict.fromkeys(FEATURES, "ok")


@with_torch
@pytest.mark.parametrize("seed", [1, 2, 9])
def test_random_programs_see_what_they_see_with_pytorchs_own(run: Run, seed: int) -> None:
    """Figures, refusals, segments, blocks and histories of 1,500 steps; `torch_programs.py` repeats
    them. Of 9, PyTorch sees other peaks when its streams have other numbers."""
    assert differences(run, seed, 1500) == "", f"seed {seed}"


#: Prints the order in which three pools lend, and into how many pieces memory falls while two
#: streams give it back, for one set of pools and pair of streams after another.
NUMBERS = """
import json, os, sys, torch, bfc
from bfc.integrations._torch_cuda import rules_for
from bfc.testing import cuda_emulator

MIB = 1 << 20
driver = cuda_emulator.load()
if sys.argv[1] == "ours":
    bfc.integrations.torch.install(
        lambda device: bfc.CachingAllocator(
            bfc.CUDASubAllocator(device), strict=True, torch=rules_for(torch)
        )
    )

def some(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

def order_of_lenders():
    pools, lies = [torch.cuda.MemPool(use_on_oom=True) for _ in range(3)], {}
    for number, pool in enumerate(pools):
        with torch.cuda.use_mem_pool(pool):
            lies[some(12 * MIB).data_ptr()] = number
    limit = torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(limit)
    taken = [lies[it.data_ptr()] for it in [some(12 * MIB) for _ in pools]]
    torch.cuda.set_per_process_memory_fraction(1.0)
    return taken

def most_pieces():
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    blocks = [some(512) for _ in range(4)]
    for number, block in enumerate(blocks[:3]):
        block.record_stream(streams[number % 2])
    for stream in streams:
        driver.hold(stream.cuda_stream)
    torch.cuda.reset_peak_memory_stats()
    del block, blocks[:3]
    driver.release_all()
    some(512)
    return torch.cuda.memory_stats()["inactive_split.small_pool.peak"]

print(json.dumps([[order_of_lenders() for _ in range(8)], [most_pieces() for _ in range(8)]]))
sys.stdout.flush()
os._exit(0)
"""


@with_torch
@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="streams are held back")
def test_what_hangs_on_numbers_of_pools_and_streams_in_pytorch_does_not_in_ours(run: Run) -> None:
    """Why random programs may see what PyTorch sees under other numbers."""
    own, ours = (json.loads(run(NUMBERS, kind)) for kind in ("own", "ours"))
    assert [len(set(map(str, it))) > 1 for it in own] == [True, True]
    assert ours == [[[0, 1, 2]] * 8, [3] * 8]
    assert 3 in own[1]


#: Allocates, lets streams use what it has, and frees, while streams are held back and let go.
#: Prints at the address of which earlier allocation each one begins, and figures now and then.
STREAMS = """
import json, os, random, sys, torch, bfc
from bfc.integrations._torch_cuda import rules_for
from bfc.testing import cuda_emulator

kind, seed, captures = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "captures"
if kind == "ours":
    bfc.integrations.torch.install(
        lambda device: bfc.CachingAllocator(
            bfc.CUDASubAllocator(device), strict=True, torch=rules_for(torch)
        )
    )
draw, driver = random.Random(seed), cuda_emulator.load()
streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
live, seen, begins, figures, held, graphs = [], {}, [], [], set(), []

def allocate():
    size = draw.choice([draw.randrange(1, 4096), draw.randrange(1, 3 << 20)])
    x = torch.empty(size, dtype=torch.uint8, device="cuda")
    begins.append(seen.get(x.data_ptr(), -1))
    seen[x.data_ptr()] = len(begins)
    live.append(x)

def capture():
    driver.release_all()
    held.clear()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(draw.randrange(4)):
            allocate()
            live[-1].record_stream(draw.choice(streams[1:]))
            live.pop(draw.randrange(len(live)))
    graphs.append(graph)

for turn in range(1500):
    what = draw.random()
    if what < 0.4 or not live:
        with torch.cuda.stream(draw.choice(streams)):
            allocate()
    elif what < 0.6:
        draw.choice(live).record_stream(draw.choice(streams))
    elif what < 0.93:
        live.pop(draw.randrange(len(live)))
    elif what < 0.94 and captures:
        capture()
    else:
        number = draw.choice((1, 2))
        (driver.release if number in held else driver.hold)(streams[number].cuda_stream)
        held ^= {number}
    if turn % 10 == 0:
        stats = torch.cuda.memory_stats()
        # of the order in which two streams give back neighbours, which hangs on hashes there
        figures.append({key: stats[key] for key in stats if not key.startswith("inactive_split")})
driver.release_all()
# which of two free blocks of one size is taken hangs on where the driver has put their segments,
# and a capture gives segments back first
print(json.dumps([figures, len(begins) if captures else begins]), flush=True)
os._exit(0)
"""


@with_torch
@pytest.mark.skipif(ON_GPU, reason="streams are held back")
@pytest.mark.parametrize("among", ["captures", "no captures"])
@pytest.mark.parametrize("seed", [1, 2])
def test_memory_comes_back_from_streams_as_it_does_to_pytorchs_own(
    run: Run, seed: int, among: str
) -> None:
    own, ours = (json.loads(run(STREAMS, kind, str(seed), among)) for kind in ("own", "ours"))
    assert max(row["active_bytes.all.current"] for row in own[0]) > 0
    assert own == ours, f"seed {seed}"


BEGIN = """
import os, sys, torch, bfc
from bfc.integrations import torch as integration

MIB = 1 << 20
def some(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")
def small():
    return bfc.CachingAllocator(bfc.CUDASubAllocator(0), memory_limit="8 MiB")
"""

HOLES = """
integration.install(
    lambda device: bfc.CachingAllocator(
        bfc.CUDASubAllocator(device), memory_limit="64 MiB", stitch=True
    )
)
blocks = [some(4) for _ in range(15)]
del blocks[::2]
joined = some(24)
print(torch.cuda.memory_reserved() // MIB)
os._exit(0)
"""


@with_torch
def test_holes_are_stitched_for_an_unchanged_program(run: Run) -> None:
    assert run(BEGIN + HOLES) == "60\n"


REFUSALS = {
    "late": ("some(1)\nintegration.install()", "PyTorch has used CUDA already"),
    "twice": ("integration.install()\nintegration.install()", "in this process already"),
    "another": (
        "integration.replace(small())\nintegration.install()",
        "another allocator (pluggable) has the place of PyTorch's own",
    ),
    "other": (
        "integration.install(lambda d: bfc.BFCAllocator(bfc.CUDASubAllocator(d)))\nsome(1)",
        "replace takes either policy",
    ),
    "changed": (
        "integration.install()\ntorch.cuda.memory.change_current_allocator(None)",
        "bfc has taken the place",
    ),
    "unknown": ("torch.__version__ = '2.99.0'\nintegration.install()", "replace works with it"),
    "overrides": (
        """
Mine = type("Mine", (bfc.CUDASubAllocator,), {"alloc": lambda *_: None})
integration.mem_pool(bfc.CachingAllocator(Mine()))
""",
        "Mine overrides alloc, and PyTorch asks a MemPool for segments without the GIL",
    ),
    "limit": (
        "integration.install(small())\nsome(9)",
        "CUDA out of memory. Tried to allocate 20.00 MiB",
    ),
}


@with_torch
@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_done_is_an_error_in_words(run: Run, case: str) -> None:
    program, words = REFUSALS[case]
    lines = "\n".join(f"    {line}" for line in program.splitlines())
    caught = "except Exception as error:\n    print(error, flush=True)\nos._exit(0)"
    script = f"{BEGIN}try:\n{lines}\n{caught}"
    assert words in run(script)


@with_torch
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("backend:cudaMallocAsync", "leave it out"),
        ("expandable_segments:True", "leave it out"),
        ("max_split_size_mb:nonsense", "max_split_size_mb"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(run: Run, settings: str, words: str) -> None:
    script = """
    import os
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = SETTINGS
    import torch, bfc
    try:
        bfc.integrations.torch.install()
    except Exception as error:
        print(error, flush=True)
    print("backend:", torch.cuda.get_allocator_backend(), flush=True)
    os._exit(0)
    """
    told = run(f"SETTINGS = {settings!r}\n" + textwrap.dedent(script))
    assert words in told
    assert "backend: bfc" not in told


WHILE_IT_RUNS = """
import json, os, sys, torch, bfc
if sys.argv[1] == "ours":
    bfc.integrations.torch.install()
torch.empty(3, device="cuda")
shown = [torch.cuda.memory._snapshot()["allocator_settings"]]
for text in sys.argv[2:]:
    torch.cuda.memory._set_allocator_settings(text)
    shown.append(torch.cuda.memory._snapshot()["allocator_settings"])
print(json.dumps(shown), flush=True)
os._exit(0)
"""


@with_torch
def test_settings_are_followed_while_a_program_runs(run: Run) -> None:
    """Also those of pinned memory, which is PyTorch's own."""
    texts = (
        "max_split_size_mb:64,roundup_power2_divisions:[64:8,256:4,>:1]",
        "pinned_num_register_threads:4,pinned_use_cuda_host_register:True",
        "backend:native,garbage_collection_threshold:0.5,graph_capture_record_stream_reuse:True",
    )
    before = "backend:native,max_split_size_mb:128"
    own, ours = (
        json.loads(run(WHILE_IT_RUNS, kind, *texts, PYTORCH_CUDA_ALLOC_CONF=before))
        for kind in ("own", "ours")
    )
    assert own[2]["pinned_num_register_threads"] == 4
    assert [it.pop("PYTORCH_CUDA_ALLOC_CONF") for it in own] == [before, *texts]
    assert [it.pop("PYTORCH_CUDA_ALLOC_CONF") for it in ours] == [before[15:], *texts]
    assert ours == own
