"""The CUDA driver. In order:

_driver.pyx    its C functions, its devices, and its errors in words
    _device.pyx    one device: its primary context, blocks, events, and memory that is mapped
    calls.py       calls from Python only, in the same context
    nvrtc.py       CUDA's run-time compiler
"""
