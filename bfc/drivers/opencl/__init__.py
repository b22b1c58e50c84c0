"""OpenCL, through pyopencl. In order:

platform.py    devices, contexts, and errors in words
queues.py      queues as streams, and marks in them
"""
