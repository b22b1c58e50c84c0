"""The CUDA driver. In order:

_driver.pyx    its C functions, contexts, blocks, events, and its errors in words
"""
