"""The CUDA driver. In order:

_driver.pyx    its C functions, what devices there are, and its errors in words
    _device.pyx    one device: its primary context, blocks, events
    _virtual.pyx   its reserved addresses, and the memory that is mapped to them
    calls.py       the calls that only Python needs, in the same context
    nvrtc.py       its compiler at run time
"""
