"""OpenCL, through pyopencl. In order:

platform.py    devices, contexts and queues, and errors in words
"""
