"""PyTorch's device "opencl": tensors whose memory comes from pools of bfc.

Memory, copies, streams and statistics are real. Most computation runs on the host: kernels serve
fill_, add, sub, mul, div, relu, sum and mm of float32, and everything else goes through PyTorch's
fallback to the CPU, which `fallbacks()` counts.

Its sources are a package of their own, `bfc_torch_opencl`.
"""

from bfc_torch_opencl import enable, fallbacks

__all__ = ["enable", "fallbacks"]
