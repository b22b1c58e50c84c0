"""Which kernel attention takes, as predictions have it, is what PyTorch itself says: its build for
CUDA is asked, on the emulated driver. `make test-torch-cuda` runs it."""

from __future__ import annotations

import importlib.metadata
import json
import re

import pytest
from rule_calls import Shape
from torch_runtime import Run, with_torch

from bfc_tools.predicting import devices
from bfc_tools.predicting.releases import release_of
from bfc_tools.predicting.rules.sdpa_choice import Attention, choose

#: Prints calls that are drawn, and PyTorch's choice for each.
ASKS = """
import json, random, sys
from bfc.testing import cuda_emulator

major, minor, seed = map(int, sys.argv[1:])
cuda_emulator.load().reset(devices=1, capability=(major, minor))
import torch

draw, rows = random.Random(seed), []
for _ in range(600):
    dtype = draw.choice(["bfloat16", "float16", "float32", "float32", "float64"])
    head = draw.choice([8, 36, 40, 64, 64, 128, 160, 192, 200, 224, 256, 260, 264])
    of_value = draw.choice([head, head, head, 128, 64])
    lengths = draw.choice([(1, 1), (1, 64), (64, 64), (128, 128), (64, 128), (128, 1), (0, 4)])
    heads = draw.choice([(8, 8), (8, 8), (8, 2), (8, 1), (8, 3)])
    gqa, causal, gradient = (draw.random() < 0.4 for _ in range(3))
    dropout = draw.choice([0.0, 0.0, 0.1, 0.125])
    mask = None if causal else draw.choice([None, None, "full", "learns"])
    batch = draw.choice([[2], [2], []])
    shapes = [
        [*batch, heads[at], lengths[at], size] for at, size in ((0, head), (1, head), (1, of_value))
    ]
    query, key, value = (
        torch.empty(*shape, device="cuda", dtype=getattr(torch, dtype)) for shape in shapes
    )
    added = None
    if mask is not None:
        added = query.new_empty(*batch, heads[0], *lengths).requires_grad_(mask == "learns")
    found = torch._fused_sdp_choice(
        query.requires_grad_(gradient), key, value, added, dropout, causal, enable_gqa=gqa
    )
    rows.append([shapes, dtype, mask, dropout, causal, gqa, gradient, found])
print(json.dumps(rows))
"""


@with_torch
@pytest.mark.parametrize("cc", ["7.5", "8.0", "8.6", "9.0", "10.0", "12.0"])
def test_the_choice_is_that_of_pytorch(run: Run, cc: str) -> None:
    seed = 7
    version = re.findall(r"\d+", importlib.metadata.version("torch"))
    gpu, release = devices.find("24GiB", cc=cc), release_of(tuple(map(int, version[:2])))
    differ = []
    for shapes, dtype, mask, *asked, found in json.loads(run(ASKS, *cc.split("."), str(seed))):
        query, key, value = (Shape(tuple(shape), dtype) for shape in shapes)
        added = None
        if mask is not None:
            size = (*query.shape[:-1], key.shape[-2])
            added = Shape(size, dtype, requires_grad=mask == "learns")
        ours = choose(Attention(query, key, value, added, *asked), gpu, release)
        if ours is None or ours != found:
            differ.append((shapes, dtype, mask, *asked, found, ours))
    assert differ == [], f"seed {seed}, compute capability {cc}"
