"""The CUDA driver. In order:

_driver.pyx    its C functions, what devices there are, and its errors in words
    _device.pyx    one device: context, blocks, events
    calls.py       its calls from Python
    nvrtc.py       its compiler at run time
"""
