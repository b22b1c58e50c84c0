"""What scripts of tests begin with that put PyTorch's tensors to sleep."""

from __future__ import annotations

BEGIN = """
import gc, os, sys, threading, types, torch, bfc

MIB = 1 << 20
torch.set_num_threads(1)    # what has several waits for them, on a busy machine
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

def free():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]
"""

MADE = '''
class Made(torch.autograd.Function):
    """Has a thread of autograd's make tensors of `nbytes`, filled with 3s, and keeps them."""

    made = []
    nbytes = 1 << 20

    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        Made.made.append(filled(Made.nbytes, 3))
        return gradient
'''
