"""The policies: where a request may look, and what is tried where nothing fits. In order:

tensorflow_rules.py    what sets the versions of TensorFlow's BFC apart
ends.py                the words for requests from two ends of a BFCAllocator's memory
_releasing.pyx         which regions PyTorch's policy gives back, and in what order
_bfc.pyx               TensorFlow's best fit with coalescing
_caching.pyx           PyTorch's caching policy
mem_pool.py            private pools of PyTorch's policy
device_allocator.py    an allocator on each OpenCL device, for a framework's back end
"""
