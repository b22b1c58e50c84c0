"""Tensors of one process in another one, from pools of ours: `make test-torch-cuda`."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda_machine import ON_GPU
from torch_runtime import Run, with_torch

pytestmark = pytest.mark.skipif(ON_GPU, reason="each process has an emulated machine of its own")

#: Device 0 stitches, and device 1 has ordinary segments.
SHARING = """
import os, sys, torch, torch.multiprocessing as mp
from bfc.testing import cuda_emulator

MIB = 1 << 20

def begin():
    cuda_emulator.load().reset(devices=2)
    import bfc
    from bfc.integrations._torch_cuda import device_memory
    bfc.integrations.torch.install(
        lambda device: bfc.CachingAllocator(
            device_memory(device), memory_limit=None if device else "64 MiB", stitch=not device
        )
    )

def some(mib, device):
    return torch.empty(mib * MIB, dtype=torch.uint8, device=device)

def child(there, back):
    begin()
    for device in (0, 1):
        x, part = there.get()
        assert part.data_ptr() == x.data_ptr() + 3 * MIB, "one piece of memory, mapped once"
        back.put([len(x), x.device.index, x[:4].tolist(), part.tolist()])
        x[:4] = torch.full((4,), 9, dtype=torch.uint8)
        made = torch.full((5,), 3, dtype=torch.uint8).to(device)
        back.put(made)
        there.get()
        del x, part, made
    there.get()

def main():
    mp.set_start_method("spawn")
    begin()
    there, back = mp.Queue(), mp.Queue()
    process = mp.Process(target=child, args=(there, back), daemon=True)
    process.start()
    for device in (0, 1):
        blocks = [some(4, device) for _ in range(15)]
        del blocks[::2]
        x = some(7 if device else 24, device)  # stitched from holes on device 0
        x[:6] = torch.arange(6).to(torch.uint8)
        there.put((x, x[3 * MIB : 3 * MIB + 4]))
        print(back.get())
        made = back.get()
        print(x[:6].tolist(), made.tolist(), made.device.index)
        del made
        there.put("gone")
        torch.cuda.ipc_collect()
    there.put("over")
    process.join()
    del x, blocks
    torch.cuda.ipc_collect()
    print(process.exitcode, [torch.cuda.memory_allocated(device) for device in (0, 1)])
    print(cuda_emulator.load().complaints, flush=True)
"""


@with_torch
def test_tensors_go_to_another_process_and_come_back(run: Run, tmp_path: Path) -> None:
    """What is stitched, page by page, and ordinary segments by CUDA's own handles."""
    (tmp_path / "sharing.py").write_text(SHARING)
    module = "import sys; sys.path.insert(0, sys.argv[1]); import sharing; sharing.main()"
    printed = run(module, str(tmp_path))
    assert printed.splitlines() == [
        "[25165824, 0, [0, 1, 2, 3], [0, 0, 0, 0]]",
        "[9, 9, 9, 9, 4, 5] [3, 3, 3, 3, 3] 0",
        "[7340032, 1, [0, 1, 2, 3], [0, 0, 0, 0]]",
        "[9, 9, 9, 9, 4, 5] [3, 3, 3, 3, 3] 1",
        "0 [0, 0]",
        "[]",
    ]
