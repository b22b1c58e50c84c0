"""The CUDA driver. In order:

_driver.pyx    its C functions, contexts, blocks, events, and its errors in words
    calls.py       its calls from Python
    nvrtc.py       its compiler at run time
"""
