"""The policies: where a request may look, and what is tried where nothing fits. In order:

_growth.pyx            how TensorFlow's regions grow, and what is asked for after a refusal
_observers.pyx         functions that PyTorch's policy calls before memory is asked for or refused
_private_pools.pyx     who uses PyTorch's private pools, and what is diverted into them
_pool_uses.pyx         references to private pools, and the scopes that divert into them
_releasing.pyx         which regions PyTorch's policy gives back
_emptying.pyx          what goes back where there are expandable segments
_paged.pyx             what both policies do where memory is mapped page by page
_bfc.pyx               TensorFlow's best fit with coalescing
_caching.pyx           PyTorch's caching policy
mem_pool.py            private pools of PyTorch's policy
device_allocator.py    an allocator on each OpenCL device, for a framework's back end
"""
