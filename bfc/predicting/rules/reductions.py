"""Partial results of reductions that several blocks of threads share.

Source: aten/src/ATen/native/cuda/Reduce.cuh of PyTorch 2.13, `setReduceConfig` and
`ReduceConfig::global_memory_size`; the order of dimensions is that of
aten/src/ATen/TensorIterator.cpp, `reorder_dimensions` and `coalesce_dimensions`.
"""
