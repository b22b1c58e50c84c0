"""A pipeline of four stages: the last has the largest layer, the first keeps the most batches.

torchrun --nproc-per-node 4 pipeline.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=2048)
parser.add_argument("--batch", type=int, default=4096)
parser.add_argument("--words", type=int, default=32000)
options = parser.parse_args()

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank % torch.cuda.device_count())
torch.cuda.set_device(device)

width = options.width
layers = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))]
if rank == world - 1:
    layers.append(nn.Sequential(nn.Linear(width, options.words)))
part = nn.Sequential(*layers).to(device)
stage = PipelineStage(part, rank, world, device)
schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=nn.functional.cross_entropy)
optimizer = torch.optim.AdamW(part.parameters())

for _ in range(3):
    if rank == 0:
        schedule.step(torch.randn(options.batch, width, device=device))
    elif rank == world - 1:
        schedule.step(target=torch.randint(options.words, (options.batch,), device=device))
    else:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()

dist.destroy_process_group()
